// Run where node_modules holds `openai`: url and key in, one line of JSON with what the client saw out.
import OpenAI from "openai";

const [url, key] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
const ask = { model: "tiny", messages: [{ role: "user", content: "hi" }], max_tokens: 8, temperature: 0 };

const plain = await client.chat.completions.create(ask);
let streamed = "";
let usage = null;
for await (const chunk of await client.chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
const errors = {};
for (const [name, call] of Object.entries({
  model: () => client.chat.completions.create({ ...ask, model: "other" }),
  value: () => client.chat.completions.create({ ...ask, top_p: 0 }),
  key: () => new OpenAI({ baseURL: `${url}/v1`, apiKey: "not-the-key", maxRetries: 0 }).models.list(),
})) {
  try { await call(); errors[name] = []; } catch (error) { errors[name] = [error.constructor.name, error.status, error.code]; }
}
const models = [];
for await (const model of await client.models.list()) models.push(model.id);
console.log(JSON.stringify({ text: plain.choices[0].message.content, streamed, tokens: usage.completion_tokens, models, errors }));

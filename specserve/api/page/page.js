"use strict";
// Everything shown is set as text, never as markup: answers are whatever a model writes.
const at = (id) => document.getElementById(id);
const state = { model: "", messages: [], busy: false, rules: "", depth: 0 };

function headers() {
  const key = at("key").value || sessionStorage.getItem("specserve.key") || "";
  return key ? { Authorization: `Bearer ${key}` } : {};
}

// ---- the pipeline ----
const sum = (column, seconds) => column.slice(-seconds).reduce((a, b) => a + b, 0);
const share = (value) => `${Math.round(100 * value)} %`;

function smooth(over, under, seconds = 10) {
  return over.map((_, i) => {
    const from = Math.max(0, i - seconds + 1);
    const below = under.slice(from, i + 1).reduce((a, b) => a + b, 0);
    return below ? over.slice(from, i + 1).reduce((a, b) => a + b, 0) / below : null;
  });
}

function spark(id, text, values, top) {
  at(id).querySelector("strong").textContent = text;
  const svg = at(id).querySelector("svg");
  const padded = [...Array(Math.max(0, 300 - values.length)).fill(null), ...values];
  const highest = top || Math.max(1e-9, ...padded.map((v) => v || 0));
  const points = padded.map((v, i) => [i, v === null ? null : 39 - 36 * Math.min(1, v / highest)]).filter((p) => p[1] !== null);
  svg.setAttribute("viewBox", "0 0 299 40");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.replaceChildren();
  if (points.length < 2) return;
  const line = points.map(([x, y], i) => `${i && x - points[i - 1][0] === 1 ? "L" : i ? "L" : "M"}${x},${y.toFixed(1)}`).join("");
  for (const [d, kind] of [[`${line}L${points.at(-1)[0]},40L${points[0][0]},40Z`, "area"], [line, "line"]]) {
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("d", d);
    path.setAttribute("class", kind);
    svg.append(path);
  }
}

function box(id, device, fill, says, away) {
  const place = at(id);
  place.classList.toggle("away", Boolean(away));
  place.querySelector(".device").textContent = device;
  place.querySelector(".bar i").style.width = `${Math.min(100, 100 * fill)}%`;
  place.querySelector(".says").textContent = says;
}

const megabytes = (n) => (n > 1e9 ? `${(n / 1e9).toFixed(1)} GB` : `${Math.round(n / 1e6)} MB`);

function worker(role, status, busy) {
  const about = status.workers[role];
  if (!about || about.device === undefined) {
    box(role, status.speculator === "none" ? "none" : status.speculator, 0, "drafts beside the coordinator");
    return;
  }
  const held = status.levels ? status.levels[`${role}_blocks_held`] / Math.max(1, status.levels[`${role}_blocks_capacity`]) : 0;
  const says = `computes ${share(busy)} · KV ${share(held)} · ${megabytes(about.weights_bytes)} of weights`;
  box(role, about.up ? about.device : "away", about.up ? busy : 0, about.up ? says : "being restarted", !about.up);
}

function show(status) {
  const h = status.history, levels = status.levels || { running: 0, waiting: 0, slots_held: 0, slots_capacity: 1 };
  state.model = status.model;
  at("facts").textContent = `${status.model} · drafts: ${status.told_drafts}, rule ${status.rule} · version ${status.version}`;
  const health = at("health");
  health.textContent = status.health.status;
  health.className = `pill ${status.health.status}`;
  health.title = status.health.detail;
  worker("draft", status, sum(h.draft_busy_s, 5) / 5);
  worker("target", status, sum(h.target_busy_s, 5) / 5);
  const slots = `${levels.running} running · ${levels.waiting} waiting · slots ${levels.slots_held} of ${levels.slots_capacity}`;
  box("coordinator", "owns requests, slots and commits", levels.slots_held / Math.max(1, levels.slots_capacity), slots);
  document.querySelectorAll(".wire").forEach((wire) => wire.classList.toggle("live", sum(h.tokens, 3) > 0));
  const drafted = sum(h.drafted, 30), drafts = sum(h.drafts, 30), busy = sum(h.target_busy_s, 30);
  spark("tokens", (sum(h.tokens, 5) / 5).toFixed(1), h.tokens);
  spark("acceptance", drafted ? share(sum(h.kept, 30) / drafted) : "–", smooth(h.kept, h.drafted), 1);
  spark("length", drafts ? (1 + sum(h.kept, 30) / drafts).toFixed(2) : "–", smooth(h.kept, h.drafts).map((v) => (v === null ? null : 1 + v)), status.depth + 1);
  spark("overlap", busy ? share(sum(h.overlap_s, 30) / busy) : "–", smooth(h.overlap_s, h.target_busy_s), 1);
  spark("running", `${levels.running + levels.waiting}`, h.running.map((v, i) => v + h.waiting[i]));
  choices(status);
}

function choices(status) {
  const depth = at("depth");
  if (state.depth !== status.depth) {
    state.depth = status.depth;
    depth.max = Math.max(1, status.depth);
    depth.value = depth.max;
    at("depth-shown").textContent = depth.value;
    if (!status.depth) at("speculate").checked = false;
    at("speculate").disabled = !status.depth;
  }
  const names = status.rules.map((rule) => rule.name).join();
  if (names === state.rules) return;
  state.rules = names;
  at("rule").replaceChildren(...status.rules.map((rule) => new Option(rule.lossless ? rule.name : `${rule.name} (lossy)`, rule.name, rule.name === status.rule, rule.name === status.rule)));
  state.rule = status.rule;
}

async function poll() {
  try {
    if (!document.hidden) {
      const reply = await fetch("status.json", { headers: headers() });
      if (reply.status === 401 || reply.status === 403) at("key-field").hidden = false;
      if (!reply.ok) throw new Error(reply.status === 401 ? "needs a key" : `status ${reply.status}`);
      show(await reply.json());
    }
  } catch (error) {
    at("health").textContent = error.message.includes("fetch") ? "no answer" : error.message;
    at("health").className = "pill dead";
  }
  setTimeout(poll, 1000);
}

// ---- the playground ----
function element(kind, className, text) {
  const made = document.createElement(kind);
  made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function request(speculate, messages) {
  const body = {
    model: state.model, messages, stream: true, max_tokens: Number(at("max-tokens").value) || 120,
    temperature: Number(at("temperature").value), seed: 1,
    stream_options: { include_usage: true, include_origins: true },
  };
  const rule = at("rule").value;
  body.speculation = speculate ? { enabled: true, depth: Number(at("depth").value) } : { enabled: false };
  if (rule && rule !== state.rule) body.speculation.rule = rule;
  return body;
}

async function* events(body) {
  const reply = await fetch("v1/chat/completions", {
    method: "POST", headers: { "Content-Type": "application/json", ...headers() }, body: JSON.stringify(body),
  });
  if (!reply.ok) throw new Error((await reply.json()).error.message);
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: {")) continue;
      const event = JSON.parse(part.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

function draw(round, number, text, rounds) {
  round.texts.forEach((piece, i) => {
    const token = element("span", `token ${round.origins[i]}`, piece);
    token.title = `round ${number}: ${round.origins[i]}; ${round.kept} of ${round.drafted} drafts kept`;
    text.append(token);
  });
  const column = element("span", "");
  for (let i = 0; i < round.drafted; i++) column.append(element("i", i < round.kept ? "kept" : ""));
  const own = round.origins.find((origin) => origin !== "accepted");
  if (own) column.append(element("i", `own ${own}`));
  column.title = `round ${number}: ${round.kept} of ${round.drafted} drafts kept`;
  rounds.append(column);
}

async function answer(place, label, speculate, messages) {
  const article = element("article", "answer");
  const numbers = element("p", "numbers", label), text = element("div", "text"), rounds = element("div", "rounds");
  article.append(numbers, text, rounds);
  place.append(article);
  const began = performance.now();
  let count = 0, tokens = 0, drafted = 0, kept = 0, first = null, whole = "";
  try {
    for await (const event of events(request(speculate, messages))) {
      whole += event.choices[0]?.delta?.content || "";
      const round = event.specserve;
      if (!round) continue;
      first ??= performance.now();
      count += 1; tokens += round.texts.length; drafted += round.drafted; kept += round.kept;
      draw(round, count, text, rounds);
      const seconds = (performance.now() - began) / 1000, decode = (performance.now() - first) / 1000;
      const pace = tokens > 1 && decode > 0 ? ` · ${((tokens - 1) / decode).toFixed(1)} tokens/s after the first` : "";
      numbers.textContent = `${label} · ${tokens} tokens in ${count} rounds · ${seconds.toFixed(1)} s${pace}` +
        (drafted ? ` · ${share(kept / drafted)} of ${drafted} drafts kept · ${(tokens / count).toFixed(2)} tokens a round` : "");
    }
  } catch (error) {
    article.append(element("p", "error", error.message));
    return null;
  }
  return whole;
}

async function ask(both) {
  const message = at("message").value.trim();
  if (!message || state.busy) return;
  busy(true);
  at("message").value = "";
  const messages = [...state.messages, { role: "user", content: message }];
  const place = element("div", "answers");
  at("talk").append(element("div", "question", message), place);
  place.scrollIntoView({ block: "nearest" });
  const speculate = both || at("speculate").checked;
  const said = await answer(place, speculate ? "with speculation" : "without speculation", speculate, messages);
  if (both && said !== null) {
    const plain = await answer(place, "without speculation", false, messages);
    place.lastChild.append(element("p", "numbers verdict", plain === said ? "✓ the same text, token for token" : "another text: above temperature 0 answers differ from draw to draw"));
  }
  if (said !== null) state.messages = [...messages, { role: "assistant", content: said }];
  busy(false);
}

function busy(is) {
  state.busy = is;
  at("send").disabled = at("both").disabled = is;
  document.body.dataset.busy = is ? "1" : "";
}

at("ask").addEventListener("submit", (event) => { event.preventDefault(); ask(false); });
at("both").addEventListener("click", () => ask(true));
at("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); ask(false); }
});
at("clear").addEventListener("click", () => { state.messages = []; at("talk").replaceChildren(); });
at("key").addEventListener("change", () => sessionStorage.setItem("specserve.key", at("key").value));
for (const id of ["depth", "temperature"]) at(id).addEventListener("input", () => { at(`${id}-shown`).textContent = at(id).value; });
at("settings").addEventListener("submit", (event) => event.preventDefault());
poll();

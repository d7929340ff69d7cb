"""What transformers' own greedy generate says on the shipped prompts, in the shape of a chat answer."""

from __future__ import annotations

import httpx
import torch
from transformers import AutoModelForCausalLM

from specserve import demo
from specserve.bench.prompts import CHATS
from specserve.text import Tokenizer


def generate(tokens: int, texts=CHATS):
    """(prompt tokens, text, answer tokens) of every prompt, end tokens cut off, as `ask` returns them."""
    folder = demo.target(lambda _: None)
    tokenizer = Tokenizer.load(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    answers = []
    for text in texts:
        prompt = tokenizer.chat_prompt([{"role": "user", "content": text}])
        with torch.inference_mode():
            out = model.generate(torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False)
        answer = out[0, len(prompt) :].tolist()
        while answer and answer[-1] in tokenizer.end_tokens:
            answer.pop()
        answers.append((len(prompt), tokenizer.decode(answer), len(answer)))
    return answers


def ask(url: str, text: str, depth: int, tokens: int):
    """The same of a server, asked over HTTP at a depth of the request's own."""
    body = {
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": tokens,
        "speculation": {"enabled": True, "depth": depth} if depth else {"enabled": False},
    }
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    usage = answer["usage"]
    return usage["prompt_tokens"], answer["choices"][0]["message"]["content"], usage["completion_tokens"]

"""From checked bodies to jobs: prompts, predictions and tools as tokens and grammars, one engine request a sequence."""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from dataclasses import replace

from specserve.api import convert
from specserve.api.generate import Job
from specserve.api.messages import messages_of, template_options
from specserve.api.objects import Head
from specserve.api.schemas import ChatBody, CompletionBody, Generation, StreamOptions
from specserve.api.shapes import ChatShape, CompletionShape, Shape
from specserve.api.speculation import predicted_text
from specserve.api.structured import CheckStructured, structured_of
from specserve.api.tools import Tools, tools_of
from specserve.config import Config
from specserve.errors import InvalidField
from specserve.text import Tokenizer
from specserve.types import EngineClient, ModelCard, Request, RequestId, Structured


class Jobs:
    """Makes jobs for one engine."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        config: Config,
        check_structured: CheckStructured,
        fingerprint: str,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._config = config
        self._check_structured = check_structured
        self._fingerprint = fingerprint

    async def completion(self, body: CompletionBody, deadline: float) -> Job:
        """Continue one or more prompts. Raises a RequestError."""
        prompts = convert.prompts_of(body, self._config)
        if len(prompts) > 1 and body.prediction is not None:
            raise InvalidField("prediction: only for one prompt", param="prediction")
        for prompt in prompts:
            if isinstance(prompt, str):
                convert.check_size(prompt, self._tokenizer, self._engine.card, "prompt")
        tokens = await asyncio.to_thread(self._tokens, prompts)
        return await self._job(CompletionShape(), body, tokens, deadline, None)

    async def chat(self, body: ChatBody, deadline: float) -> Job:
        """Answer a conversation. Raises a RequestError."""
        messages = messages_of(body.messages, takes_calls=self._tokenizer.takes_calls)
        for message in messages:
            convert.check_size(message["content"], self._tokenizer, self._engine.card, "messages")
        options = template_options(body.chat_template_kwargs, body.reasoning_effort)
        tools = await asyncio.to_thread(self._tools, body)
        shown = None if tools is None else tools.shown
        tokens = await asyncio.to_thread(self._tokenizer.chat_prompt, messages, shown, options)
        return await self._job(ChatShape(), body, [tokens], deadline, tools)

    def _tools(self, body: ChatBody) -> Tools | None:
        if body.tools is None and body.tool_choice is None:
            return None
        found = self._tokenizer.call_format
        tools = tools_of(body.tools, body.tool_choice, body.parallel_tool_calls, found, self._config.server.max_tools)
        if tools is not None and structured_of(body.response_format, body.structured_outputs) is not None:
            raise InvalidField("tools: cannot go with structured output; set tool_choice to none", param="tools")
        return tools

    async def _job(
        self, shape: Shape, body: Generation, prompts: list[list[int]], deadline: float, tools: Tools | None
    ) -> Job:
        card, name = self._engine.card, f"{shape.prefix}-{uuid.uuid4().hex}"
        predicted = await asyncio.to_thread(self._predicted, body, card)
        structured = structured_of(body.response_format, body.structured_outputs)
        structured = structured if tools is None else tools.structured
        options = body.stream_options or StreamOptions()
        job = Job(
            Head(name, int(time.time()), card, self._fingerprint, self._config.engine.rule),
            shape,
            self._requests(name, body, prompts, predicted, structured),
            deadline,
            echo=isinstance(body, CompletionBody) and bool(body.echo),
            include_usage=bool(options.include_usage),
            continuous_usage=bool(options.continuous_usage_stats),
            origins=bool(options.include_origins),
            keep_stop=bool(body.include_stop_str_in_output),
            token_ids=bool(body.return_token_ids),
            calls=None if tools is None else tools.format,
            keepalive_s=self._config.server.sse_keepalive_s,
        )
        if structured is not None:
            await asyncio.to_thread(self._check_structured, structured)
        return job

    def _predicted(self, body: Generation, card: ModelCard) -> list[int]:
        text = predicted_text(body, card)
        if text is None:
            return []
        convert.check_size(text, self._tokenizer, card, "prediction")
        return self._tokenizer.encode(text, special=False)

    def _requests(
        self,
        name: str,
        body: Generation,
        prompts: list[list[int]],
        predicted: list[int],
        structured: Structured | None,
    ) -> list[Request]:
        """One engine request per prompt and branch, the branches of a prompt side by side.

        A client that gives no seed gets one per prompt, so that a retry can be exact.
        """
        bad_words = convert.bad_words_of(body, self._tokenizer)
        requests = [
            convert.to_request(
                body,
                prompt,
                self._engine.card,
                self._config,
                request_id=name,
                seed=secrets.randbits(63),
                bad_words=bad_words,
                prediction=predicted,
                structured=structured,
            )
            for prompt in prompts
        ]
        branches = body.n or 1
        if len(requests) * branches == 1:
            return requests
        return [
            replace(
                request,
                id=RequestId(f"{name}-{index * branches + branch}"),
                branch=branch,
                family=f"{name}-{index * branches}" if branches > 1 else None,
            )
            for index, request in enumerate(requests)
            for branch in range(branches)
        ]

    def _tokens(self, prompts: list[convert.Prompt]) -> list[list[int]]:
        encode = self._tokenizer.encode
        return [encode(prompt, special=True) if isinstance(prompt, str) else prompt for prompt in prompts]

"""The systems that `bench compare` runs, behind one call: these prompts, this depth, this many at a time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import httpx
from prometheus_client.parser import text_string_to_metric_families

from specserve import __version__
from specserve.config import ModelConfig
from specserve.errors import SpecserveError
from specserve.local import LocalEngine
from specserve.models.loading import load_model
from specserve.types import Request, RequestId, RequestStats, Sampling

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run made. answers are token ids, and texts their text, where the system shows them; rounds None where
    it has none."""

    tokens: int
    seconds: float
    rounds: int | None = None
    drafted: int | None = None
    kept: int | None = None
    overhead_ms_per_round: float | None = None
    answers: tuple[tuple[int, ...], ...] | None = None
    texts: tuple[str, ...] | None = None

    @property
    def tokens_per_s(self) -> float:
        """Answer tokens per second of wall time, prefill included."""
        return self.tokens / self.seconds

    def answers_equal_to(self, other: Outcome) -> int | None:
        """How many answers are those of another run, by ids, else by text; None where both do not show the same."""
        if self.answers is not None and other.answers is not None:
            return sum(mine == its for mine, its in zip(self.answers, other.answers, strict=True))
        if self.texts is not None and other.texts is not None:
            return sum(mine.strip() == its.strip() for mine, its in zip(self.texts, other.texts, strict=True))
        return None


class System(Protocol):
    """Something that answers prompts."""

    name: str
    mode: str
    version: str | None

    def run(self, prompts: Prompts, max_tokens: int, depth: int, concurrency: int) -> Outcome:
        """Answer every prompt greedily with exactly max_tokens tokens, `concurrency` at a time."""
        ...


class TransformersGenerate:
    """transformers' own `generate`: plain, with an assistant model, or as one static left-padded batch.

    lookup: guess so many tokens from the prompt itself.
    """

    name = "transformers"

    def __init__(
        self, folder: Path, *, assistant: Path | None = None, batched: bool = False, lookup: int | None = None
    ) -> None:
        from transformers import AutoModelForCausalLM, __version__

        self.version: str | None = __version__

        self.mode = "assistant" if assistant else "static_batch" if batched else "generate"
        self._batched = batched
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
        self._options: dict[str, Any] = {} if lookup is None else {"prompt_lookup_num_tokens": lookup}
        if assistant is not None:
            # Not from_pretrained: it would pass over a head for a part of the vocabulary, and guess with the embedding.
            self._options["assistant_model"] = load_model(assistant, ModelConfig(source=str(assistant), device="cpu"))

    def run(self, prompts: Prompts, max_tokens: int, depth: int, concurrency: int) -> Outcome:
        """concurrency counts only for the static batch; otherwise one prompt follows the other."""
        import torch

        began = time.perf_counter()
        answers: list[tuple[int, ...]] = []
        with torch.inference_mode():
            size = concurrency if self._batched else 1
            for start in range(0, len(prompts), size):
                answers += self._generate(prompts[start : start + size], max_tokens, depth)
        return Outcome(sum(map(len, answers)), time.perf_counter() - began, answers=tuple(answers))

    def _generate(self, batch: Prompts, max_tokens: int, depth: int) -> list[tuple[int, ...]]:
        import torch

        widest = max(map(len, batch))
        ids = torch.tensor([[0] * (widest - len(prompt)) + list(prompt) for prompt in batch])
        mask = torch.tensor([[0] * (widest - len(prompt)) + [1] * len(prompt) for prompt in batch])
        if "assistant_model" in self._options:
            self._options["assistant_model"].generation_config.num_assistant_tokens = max(1, depth)
        out = self._model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            **self._options,
        )
        return [tuple(row[widest:].tolist()) for row in out]


class Local:
    """specserve in this process."""

    name = "specserve-local"
    version: str | None = __version__

    def __init__(self, engine: LocalEngine) -> None:
        self.mode = engine.config.draft.told_names
        self._engine = engine
        self._numbers = itertools.count()

    def run(self, prompts: Prompts, max_tokens: int, depth: int, concurrency: int) -> Outcome:
        """All requests go through the running engine; the pools and models are the same for every depth."""
        before = RoundTotals.of(self._engine.metrics_text())
        began = time.perf_counter()
        with ThreadPoolExecutor(concurrency) as pool:
            done = list(pool.map(lambda prompt: self._one(prompt, max_tokens, depth), prompts))
        seconds = time.perf_counter() - began
        overhead = RoundTotals.of(self._engine.metrics_text()).overhead_ms_since(before)
        return _outcome([stats for _, stats in done], seconds, overhead, tuple(tokens for tokens, _ in done))

    def _one(self, prompt: Sequence[int], max_tokens: int, depth: int) -> tuple[tuple[int, ...], RequestStats]:
        request = Request(
            RequestId(f"bench-{next(self._numbers)}"),
            tuple(prompt),
            max_tokens,
            Sampling(temperature=0.0),
            ignore_eos=True,
            depth=depth,
        )
        completion = self._engine.complete([request])[0]
        return completion.tokens, completion.stats


class Http:
    """A specserve server, asked over HTTP as any client would. source: whose guesses requests ask for."""

    version: str | None = __version__

    def __init__(
        self, base_url: str, model: str, mode: str, name: str = "specserve-ray", source: str | None = None
    ) -> None:
        self.name = name
        self.mode = mode
        self._model = model
        self._source = source
        self._client = httpx.Client(base_url=base_url, timeout=600)

    def run(self, prompts: Prompts, max_tokens: int, depth: int, concurrency: int) -> Outcome:
        """One connection per concurrent request; what is timed is what a client sees."""
        before = RoundTotals.of(self._client.get("/metrics").text)
        began = time.perf_counter()
        with ThreadPoolExecutor(concurrency) as pool:
            bodies = list(pool.map(lambda prompt: self._one(prompt, max_tokens, depth), prompts))
        seconds = time.perf_counter() - began
        overhead = RoundTotals.of(self._client.get("/metrics").text).overhead_ms_since(before)
        choices = [body["choices"][0] for body in bodies]
        outcome = _outcome(
            [_stats(body) for body in bodies], seconds, overhead, tuple(tuple(each["token_ids"]) for each in choices)
        )
        return replace(outcome, texts=tuple(each["text"] for each in choices))

    def _one(self, prompt: Sequence[int], max_tokens: int, depth: int) -> dict[str, Any]:
        reply = self._client.post(
            "/v1/completions",
            json={
                "model": self._model,
                "prompt": list(prompt),
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
                "speculation": {"enabled": True, "depth": depth, "source": self._source} if depth else _PLAINLY,
            },
        )
        if reply.status_code != 200:
            raise SpecserveError(f"the server answered {reply.status_code}: {reply.text[:300]}")
        body: dict[str, Any] = reply.json()
        return body

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


_PLAINLY = {"enabled": False}


def _stats(body: dict[str, Any]) -> RequestStats:
    """What a completion says of its making."""
    spec = body.get("metrics", {}).get("speculative_decoding") or {}
    return RequestStats(
        prompt_tokens=body["usage"]["prompt_tokens"],
        generated_tokens=body["usage"]["completion_tokens"],
        # Without speculation the server reports no rounds: there is one for each token.
        rounds=spec.get("num_spec_steps", body["usage"]["completion_tokens"]),
        drafted_tokens=spec.get("num_draft_tokens", 0),
        kept_tokens=spec.get("num_accepted_draft_tokens", 0),
        histogram=tuple(spec.get("acceptance_histogram", ())),
        queue_s=0.0,
        first_token_s=0.0,
        total_s=0.0,
    )


@dataclass(frozen=True, slots=True)
class RoundTotals:
    """Sums over all rounds so far: how many, their wall time, and the workers' computing in them. Seconds."""

    rounds: float
    wall_s: float
    busy_s: float

    @staticmethod
    def of(exposition: str) -> RoundTotals:
        """Read the sums out of a Prometheus text."""
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(exposition):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
        return RoundTotals(
            totals.get("specserve_round_seconds_count", 0.0),
            totals.get("specserve_round_seconds_sum", 0.0),
            totals.get("specserve_worker_busy_seconds_total", 0.0),
        )

    def overhead_ms_since(self, before: RoundTotals) -> float | None:
        """Milliseconds per round in which no worker computed; None when there was no round."""
        rounds = self.rounds - before.rounds
        if rounds <= 0:
            return None
        return 1000 * ((self.wall_s - before.wall_s) - (self.busy_s - before.busy_s)) / rounds


def _outcome(
    stats: Sequence[RequestStats], seconds: float, overhead: float | None, answers: tuple[tuple[int, ...], ...] | None
) -> Outcome:
    return Outcome(
        tokens=sum(one.generated_tokens for one in stats),
        seconds=seconds,
        rounds=sum(one.rounds for one in stats),
        drafted=sum(one.drafted_tokens for one in stats),
        kept=sum(one.kept_tokens for one in stats),
        overhead_ms_per_round=overhead,
        answers=answers,
    )

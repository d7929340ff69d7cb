"""Every option gives the same answer with speculation as without, alone as in company, and has its effect."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import httpx
import pytest
import torch
from tiny_models import tiny_llama
from transformers import LlamaForCausalLM

from specserve.api.app import create_app
from specserve.local import LocalEngine
from specserve.types import Request, RequestId, Sampling

LENGTH = 24
PROMPT = tuple((7 * i) % 400 + 3 for i in range(37))
END = 2


def greedy(**options):
    return Sampling(temperature=0, **options)


OPTIONS: dict[str, dict] = {
    "plain": {},
    "min_p": {"sampling": greedy(min_p=0.3, top_k=5, top_p=0.9)},
    "frequency": {"sampling": greedy(frequency_penalty=0.7)},
    "presence": {"sampling": greedy(presence_penalty=-0.6)},
    "repetition": {"sampling": greedy(repetition_penalty=1.3)},
    "logit_bias": {"sampling": greedy(logit_bias=((77, 3.0), (78, -3.0), (90, 2.5)))},
    "allowed": {"sampling": greedy(allowed_token_ids=tuple(range(30, 90)))},
    "bad_words": {"sampling": greedy(bad_words=((50,), (60, 61)), frequency_penalty=0.3)},
    "min_tokens": {"sampling": greedy(min_tokens=7, logit_bias=((END, 100.0),)), "ignore_eos": False},
    "stop_ids": {"stop_token_ids": tuple(range(3, 420, 9))},
    "stop_ids_later": {"stop_token_ids": tuple(range(3, 420, 9)), "sampling": greedy(min_tokens=14)},
    "logprobs_0": {"logprobs": 0},
    "logprobs": {"logprobs": 20, "prompt_logprobs": 3, "sampling": greedy(frequency_penalty=0.7)},
    "everything": {
        "sampling": greedy(
            min_p=0.1,
            repetition_penalty=1.1,
            presence_penalty=0.3,
            frequency_penalty=0.4,
            logit_bias=((77, 3.0),),
            min_tokens=5,
            bad_words=((50,), (60, 61)),
            allowed_token_ids=tuple(range(2, 300)),
        ),
        "logprobs": 2,
        "stop_token_ids": tuple(range(3, 420, 9)),
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, and a draft that is the target with noise in its weights: some drafts are kept, some are not."""
    target = tiny_llama(tmp_path_factory.mktemp("target"), seed=1)
    draft = tiny_llama(tmp_path_factory.mktemp("draft"), seed=1)
    model = LlamaForCausalLM.from_pretrained(draft)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.02 * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(draft)
    return target, draft


def engine(folders, speculator="small_model", **settings):
    target, draft = ({"source": str(folder), "kv_memory_gib": 0.02, "device": "cpu"} for folder in folders)
    return LocalEngine(
        {
            "target": target,
            "draft": {"speculator": speculator, "model": draft},
            "engine": {"depth": 4, "prefill_chunk": 16, "max_requests": 8, "max_batch_tokens": 64} | settings,
        }
    )


@pytest.fixture(scope="module", params=["small_model", "ngram"])
def running(request, folders):
    with engine(folders, request.param) as made:
        yield made


_numbers = iter(range(10**6))


def requests(name, depth, branches=1, temperature=0.0, **more):
    """The option's requests: `branches` of them, one family when there are several."""
    number = next(_numbers)
    fields = {"sampling": greedy(), "ignore_eos": True} | OPTIONS[name] | more
    fields["sampling"] = replace(fields["sampling"], temperature=temperature)
    return [
        Request(
            RequestId(f"{number}-{branch}"),
            PROMPT,
            LENGTH,
            depth=depth,
            branch=branch,
            family=f"{number}" if branches > 1 else None,
            **fields,
        )
        for branch in range(branches)
    ]


_plain: dict[str, object] = {}


def without_speculation(engine, name):
    """The option's answer at depth 0, alone."""
    if name not in _plain:
        (_plain[name],) = engine.complete(requests(name, 0))
    return _plain[name]


def assert_same(found, expected):
    assert (found.tokens, found.finish_reason, found.text) == (expected.tokens, expected.finish_reason, expected.text)
    assert len(found.logprobs) in (0, len(found.tokens))
    for mine, theirs in ((found.logprobs, expected.logprobs), (found.prompt_logprobs, expected.prompt_logprobs)):
        assert [score.token for score in mine] == [score.token for score in theirs]
        assert [score.logprob for score in mine] == pytest.approx([score.logprob for score in theirs], abs=1e-4)
        for one, other in zip(mine, theirs, strict=True):
            assert dict(one.top) == pytest.approx(dict(other.top), abs=1e-4)


@pytest.mark.parametrize("name", OPTIONS)
def test_speculation_changes_no_answer(running, name):
    """Depth 0, 1 and 4, alone and in company of other options, and three answers at once."""
    expected = without_speculation(running, name)
    for depth in (1, 4):
        (found,) = running.complete(requests(name, depth))
        assert_same(found, expected)
    names = list(OPTIONS)
    place = names.index(name)
    company = [name, *(names[(place + step) % len(names)] for step in (1, 4, 8))]
    together = running.complete([each for other in company for each in requests(other, 4)])
    for other, found in zip(company, together, strict=True):
        assert_same(found, without_speculation(running, other))
    for found in running.complete(requests(name, 4, branches=3)):
        assert_same(found, expected)
    levels = running.levels()
    assert levels.slots_held + levels.target_blocks_held + levels.draft_blocks_held == 0


@pytest.mark.parametrize("temperature", [0.7, 1.3])
@pytest.mark.parametrize("name", OPTIONS)
def test_under_coupled_speculation_changes_no_sampled_answer(running, name, temperature):
    """A seeded answer is the same at depths 0, 1 and 4, alone and beside an answer to another seed, for each option."""
    options = {"temperature": temperature, "rule": "coupled", "seed": 3}
    (expected,) = running.complete(requests(name, 0, **options))
    (alone,) = running.complete(requests(name, 1, **options))
    first, _ = running.complete(requests(name, 4, **options) + requests(name, 4, **(options | {"seed": 4})))

    assert_same(alone, expected)
    assert_same(first, expected)


def test_some_drafts_are_kept_and_some_refused(running):
    """Or the comparison above would say little."""
    stats = [done.stats for name in OPTIONS for done in running.complete(requests(name, 4))]
    kept, drafted = sum(each.kept_tokens for each in stats), sum(each.drafted_tokens for each in stats)
    assert 0 < kept < drafted


def test_each_option_has_its_effect(running):
    """Held against what a client would expect of each, so that no option is simply dropped."""
    answers = {name: without_speculation(running, name) for name in OPTIONS}
    plain = answers["plain"].tokens
    for name in ("frequency", "repetition", "logit_bias", "allowed", "everything"):
        assert answers[name].tokens != plain, name
    assert answers["min_p"].tokens == answers["logprobs_0"].tokens == plain
    assert len(set(answers["frequency"].tokens)) > len(set(plain))
    assert set(answers["allowed"].tokens) <= set(range(30, 90))
    assert 50 not in answers["bad_words"].tokens
    assert (len(answers["min_tokens"].tokens), answers["min_tokens"].finish_reason) == (7, "stop")
    stops = set(OPTIONS["stop_ids"]["stop_token_ids"])
    assert not stops & set(answers["stop_ids"].tokens)
    assert len(answers["stop_ids"].tokens) < 14 <= len(answers["stop_ids_later"].tokens)
    assert not stops & set(answers["stop_ids_later"].tokens[:14])


def test_logprobs_are_the_models_own(running, folders):
    """transformers' log-softmax over prompt and answer, at every position."""
    found = without_speculation(running, "logprobs")
    tokens = [*PROMPT, *found.tokens]
    model = LlamaForCausalLM.from_pretrained(folders[0]).eval()
    with torch.inference_mode():
        logs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    scores = [*found.prompt_logprobs, *found.logprobs]
    assert (len(scores), scores[0].logprob) == (len(tokens), None)
    for at, (token, score) in enumerate(zip(tokens[1:], scores[1:], strict=True)):
        assert score.logprob == pytest.approx(float(logs[at, token]), abs=1e-4)
        best = logs[at].topk(len(score.top))
        assert [value for _, value in score.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert {len(score.top) for score in found.logprobs} == {20}


def test_max_tokens_0_only_scores(running):
    """No token is made; the prompt's scores are those of a request that goes on."""
    request = Request(RequestId("score"), PROMPT, 0, greedy(), prompt_logprobs=3)
    (found,) = running.complete([request])
    assert (found.tokens, found.finish_reason) == ((), "length")
    expected = without_speculation(running, "logprobs").prompt_logprobs
    assert [s.logprob for s in found.prompt_logprobs] == pytest.approx([s.logprob for s in expected], abs=1e-4)


SAMPLED = Sampling(
    temperature=0.9,
    top_p=0.95,
    min_p=0.02,
    repetition_penalty=1.1,
    frequency_penalty=0.3,
    presence_penalty=0.2,
    bad_words=((50,), (60, 61)),
    min_tokens=5,
)


def sampled(engine, depth, seed, branches=3):
    """Answers of one family at temperature 0.9."""
    number = next(_numbers)
    return engine.complete(
        [
            Request(
                RequestId(f"{number}-{branch}"),
                PROMPT,
                LENGTH,
                SAMPLED,
                seed=seed,
                ignore_eos=True,
                depth=depth,
                branch=branch,
                family=f"{number}",
            )
            for branch in range(branches)
        ]
    )


def test_seeded_answers_do_not_depend_on_depth_or_company(folders):
    """Under keep-while-equal, noise by position: depth 0, 1, 4, alone or three at once; three different streams."""
    with engine(folders, rule="exact") as running:
        expected = [done.tokens for done in sampled(running, 0, 11)]
        assert len(set(expected)) == 3
        for depth in (1, 4):
            assert [done.tokens for done in sampled(running, depth, 11)] == expected
        assert sampled(running, 4, 11, branches=1)[0].tokens == expected[0]
        assert [done.tokens for done in sampled(running, 4, 12)] != expected


def test_seeded_answers_survive_preemption(folders):
    """KV for less than all eight branches: some are preempted, refilled and shared again, and none changes."""
    target, draft = ({"source": str(folder), "kv_blocks": 32, "context_length": 128} for folder in folders)
    config = {"target": target, "draft": {"model": draft}}
    limits = {"depth": 4, "rule": "exact", "max_requests": 8, "block_tokens": 4, "prefill_chunk": 16}
    with engine(folders, rule="exact") as roomy, LocalEngine(config | {"engine": limits}) as tight:
        expected = [done.tokens for done in sampled(roomy, 0, 5, branches=8)]
        assert [done.tokens for done in sampled(tight, 4, 5, branches=8)] == expected
        (line,) = (line for line in tight.metrics_text().splitlines() if line.startswith("specserve_preemptions_total"))
        assert float(line.split()[-1]) > 0


def asked(running, path, **fields):
    """One request to the HTTP application over a running engine."""

    async def ask():
        transport = httpx.ASGITransport(
            app=create_app(running, running.tokenizer, running.config, check_structured=running.check_structured)
        )
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(f"/v1/{path}", json=fields)

    reply = asyncio.run(ask())
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_echo_and_n_over_http(running):
    """Scores as loglikelihood tools read them; n seeded answers of which the first is what n = 1 gives."""
    options = {"prompt": list(PROMPT), "temperature": 0, "max_tokens": 4, "ignore_eos": True}
    (choice,) = asked(running, "completions", **options, echo=True, logprobs=1)["choices"]
    found = choice["logprobs"]
    assert len(found["tokens"]) == len(found["token_logprobs"]) == len(PROMPT) + 4
    expected = without_speculation(running, "logprobs").prompt_logprobs
    numbers = [score.logprob for score in expected]
    assert found["token_logprobs"][: len(PROMPT)] == pytest.approx(numbers, abs=1e-4)
    (scored,) = asked(running, "completions", **options | {"max_tokens": 0}, echo=True, logprobs=0)["choices"]
    assert choice["text"].startswith(scored["text"])
    assert scored["logprobs"]["token_logprobs"] == pytest.approx(numbers, abs=1e-4)

    chat = {"messages": [{"role": "user", "content": "fox"}], "seed": 3, "max_tokens": 8, "logprobs": True}
    three = asked(running, "chat/completions", **chat, n=3)
    (one,) = asked(running, "chat/completions", **chat)["choices"]
    assert three["choices"][0]["message"] == one["message"]
    assert len({choice["message"]["content"] for choice in three["choices"]}) == 3
    counted = sum(len(choice["logprobs"]["content"]) for choice in three["choices"])
    assert counted == three["usage"]["completion_tokens"]

"""What /metrics says of a real engine over HTTP, after mixed load with clients that leave."""

from __future__ import annotations

import threading
import time

import httpx
import pytest
from http_server import serving
from scraped import Scrape
from tiny_models import tiny_llama

from specserve.local import LocalEngine

LOAD = [
    {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0},
    {"prompt": "The sky is", "max_tokens": 17, "temperature": 1.0, "seed": 3},
    {"prompt": "one two one two one two", "max_tokens": 30, "temperature": 0, "speculation": {"enabled": False}},
    {"prompt": "A longer prompt, that is fed in several chunks " * 3, "max_tokens": 12, "n": 3, "temperature": 0.8},
    {"prompt": "stop", "max_tokens": 40, "temperature": 0, "stop": ["e", "a"]},
]


@pytest.fixture(scope="module", params=["small_model", "ngram"])
def scrape(request, tmp_path_factory):
    """One scrape behind the load, with the wall time between two scrapes around it."""
    base = tmp_path_factory.mktemp("models")
    model = {"kv_blocks": 128, "threads": 1}
    config = {
        "target": model | {"source": str(tiny_llama(base / "target", seed=1))},
        "draft": {"speculator": request.param, "model": model | {"source": str(tiny_llama(base / "draft", seed=2))}},
        "engine": {"depth": 3, "max_requests": 4, "prefill_chunk": 32},
    }
    with LocalEngine(config) as engine, serving(engine) as url:
        asked = time.monotonic()
        before = Scrape(httpx.get(f"{url}/metrics").text)
        began = time.monotonic()
        drive(url)
        ended = time.monotonic()
        after = Scrape(httpx.get(f"{url}/metrics").text)
        after.wall_s, after.before, after.depth = (ended - began, time.monotonic() - asked), before, 3
        yield after


def drive(url: str) -> None:
    threads = [threading.Thread(target=ask, args=(url, body)) for body in LOAD * 3]
    threads += [threading.Thread(target=leave, args=(url,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    deadline = time.monotonic() + 20
    while httpx.get(f"{url}/health").json()["running"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ask(url: str, body: dict[str, object]) -> None:
    answer = httpx.post(f"{url}/v1/completions", json=body | {"ignore_eos": True}, timeout=60)
    assert answer.status_code == 200, answer.text


def leave(url: str) -> None:
    body = {"prompt": "Go on", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        for _, _line in zip(range(6), answer.iter_lines(), strict=False):
            pass


def test_emitted_kinds_sum_to_the_generated_tokens(scrape):
    """Every committed token has one origin, and speculation off means plain."""
    emitted = scrape.by("kind", "specserve_spec_decode_emitted_tokens_total")
    assert sum(emitted.values()) == scrape.sum("specserve_generation_tokens_total")
    assert all(emitted[kind] for kind in ("accepted", "correction", "plain")), emitted


def test_no_more_is_accepted_than_drafted_at_any_place(scrape):
    """Place by place; later places are offered and kept no more often than earlier ones."""
    name = "specserve_spec_decode_num_{}_tokens_per_pos_total"
    drafted = scrape.by("position", name.format("draft"))
    accepted = scrape.by("position", name.format("accepted"))
    assert len(drafted) == scrape.depth
    for place in drafted:
        assert accepted[place] <= drafted[place]
    for counts in (drafted, accepted):
        assert [counts[str(k)] for k in range(scrape.depth)] == sorted(counts.values(), reverse=True)
    assert sum(drafted.values()) == scrape.sum("specserve_spec_decode_num_draft_tokens_total") > 0
    assert sum(accepted.values()) == scrape.sum("specserve_spec_decode_num_accepted_tokens_total")


def test_each_drafted_token_was_kept_or_wasted_for_a_reason(scrape):
    """What was offered and did not become part of an answer is under rejected, stop or cancelled."""
    wasted = scrape.by("reason", "specserve_spec_decode_wasted_draft_tokens_total")
    accepted = scrape.sum("specserve_spec_decode_num_accepted_tokens_total")
    offered = scrape.sum("specserve_spec_decode_num_draft_tokens_total")
    assert wasted["rejected"] + wasted["stop"] + accepted == offered


def test_slot_states_sum_to_the_capacity_and_idle_holds_none(scrape):
    """Free, drafting, drafted and verifying are all there is."""
    states = scrape.by("state", "specserve_slots")
    assert sum(states.values()) == scrape.sum("specserve_slots_capacity") == states["free"]
    for role in ("target", "draft"):
        blocks = scrape.by("state", "specserve_kv_blocks", role=role)
        assert sum(blocks.values()) == scrape.sum("specserve_kv_blocks_capacity", role=role)


def test_busy_and_wait_make_up_the_wall_time(scrape):
    """Within 5 % for each worker that there is."""
    for role in ("target", "draft"):
        spent = [
            sum(side.sum(f"specserve_worker_{kind}_seconds_total", role=role) for kind in ("busy", "wait"))
            for side in (scrape.before, scrape)
        ]
        if spent[1]:
            least_s, most_s = scrape.wall_s  # without and with the two scrapes themselves
            assert 0.95 * least_s <= spent[1] - spent[0] <= 1.05 * most_s
        else:
            assert role == "draft"


def test_histograms_agree_with_the_counters(scrape):
    """Gaps are one per token but the first of each answer; chains are those that were offered."""
    tokens = scrape.sum("specserve_generation_tokens_total")
    gaps = scrape.sum("specserve_inter_token_latency_seconds_count")
    answers = scrape.sum("specserve_request_success_total")
    assert tokens - gaps >= answers  # a first round may bring several tokens
    assert tokens - gaps <= answers * (scrape.depth + 1)
    name = "specserve_spec_decode_accepted_length"
    assert scrape.sum(f"{name}_count") == scrape.sum("specserve_spec_decode_num_drafts_total")
    assert scrape.sum(f"{name}_sum") == scrape.sum("specserve_spec_decode_num_accepted_tokens_total")


def test_every_decode_row_had_a_chain_or_a_reason_for_none(scrape):
    """Fallbacks are the rows whose token is plain."""
    emitted = scrape.by("kind", "specserve_spec_decode_emitted_tokens_total")
    fallbacks = scrape.by("reason", "specserve_spec_decode_fallback_total")
    assert fallbacks["request"] > 0
    assert sum(fallbacks.values()) >= emitted["plain"]


def test_requests_add_up(scrape):
    """Finished, aborted, and judged by what was promised."""
    ended = scrape.by("finished_reason", "specserve_request_success_total")
    assert ended["stop"] + ended["length"] == 3 * (len(LOAD) + 2)
    assert ended["abort"] == 3
    slo = scrape.by("slo", "specserve_request_slo_total")
    assert set(slo.values()) == {ended["stop"] + ended["length"]}
    assert scrape.sum("specserve_client_disconnects_total") == 3
    assert scrape.fell(scrape.before) == {}

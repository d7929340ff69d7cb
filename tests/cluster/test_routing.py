"""Which pipeline a request goes to: facts and properties of the pure part."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specserve.cluster.routing import PrefixMemory, Router, block_hashes, choose

PATIENT = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
NAMES = ("a", "b", "c", "d")
LOADS = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 50), min_size=1)
MATCHES = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 9))
TOKENS = st.lists(st.integers(0, 200_000), max_size=40)


def router(policy: str = "prefix", slack: float = 4, **more: object) -> Router:
    return Router(policy, block_tokens=4, slack=slack, **more)  # type: ignore[arg-type]


@PATIENT
@given(loads=LOADS, matched=MATCHES, slack=st.integers(0, 9), turn=st.integers(0, 99))
def test_imbalance_is_bounded_and_no_better_match_is_left_within_the_bound(loads, matched, slack, turn):
    """Whoever is taken is at most `slack` above the least loaded, and has the longest match of all who are."""
    taken = choose(loads, matched, slack, turn)
    near = [name for name in loads if loads[name] <= min(loads.values()) + slack]
    assert taken in near
    assert matched.get(taken, 0) == max(matched.get(name, 0) for name in near)
    rivals = [loads[name] for name in near if matched.get(name, 0) == matched.get(taken, 0)]
    assert loads[taken] == min(rivals)


@PATIENT
@given(loads=LOADS)
def test_equals_are_taken_in_turn(loads):
    """Over as many turns as there are pipelines, each of equal load and match is taken."""
    level = dict.fromkeys(loads, 3)
    assert {choose(level, {}, 4, turn) for turn in range(len(level))} == level.keys()


@PATIENT
@given(first=TOKENS, second=TOKENS, block=st.integers(1, 8))
def test_equal_hashes_are_equal_prefixes_of_full_blocks(first, second, block):
    """Hash k of two prompts is equal exactly where their first k + 1 blocks are."""
    ours, theirs = block_hashes(first, block), block_hashes(second, block)
    assert len(ours) == len(first) // block
    for place, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        end = (place + 1) * block
        assert (mine == other) == (first[:end] == second[:end])


@PATIENT
@given(prompts=st.lists(TOKENS, min_size=1, max_size=8), blocks=st.integers(1, 12))
def test_memory_is_bounded_and_holds_whole_beginnings(prompts, blocks):
    """The newest prompt is remembered from its beginning, as far as there is room; never more than `blocks` of one."""
    memory = PrefixMemory(blocks)
    for prompt in prompts:
        memory.note("a", block_hashes(prompt, 2))
        assert memory.matched("a", block_hashes(prompt, 2)) == min(len(prompt) // 2, blocks)
        assert len(memory._sent["a"]) <= blocks
    assert memory.matched("b", block_hashes(prompts[-1], 2)) == 0
    memory.forget("a")
    assert memory.matched("a", block_hashes(prompts[-1], 2)) == 0


def test_a_shared_prefix_stays_with_its_pipeline_until_that_is_too_busy():
    """The second request with a prefix follows the first one; beyond the slack it goes to the idlest."""
    routes = router(slack=2)
    prefix = list(range(40))
    home = routes.route([*prefix, 1], {"a": 0, "b": 0})
    other = "b" if home == "a" else "a"
    assert routes.route([*prefix, 2], {home: 2, other: 0}) == home
    assert routes.route([*prefix, 3], {home: 3, other: 0}) == other
    assert (routes.blocks, routes.matched_blocks) == (30, 10)


@pytest.mark.parametrize(
    ("policy", "expected"), [("prefix", ["a", "a", "a"]), ("least_loaded", ["b"] * 3), ("round_robin", ["a", "b", "a"])]
)
def test_policies_differ_where_load_and_prefix_disagree(policy, expected):
    """One knows the prompt but is busier: only the policy decides."""
    memory = PrefixMemory()
    memory.note("a", block_hashes(range(40), 4))
    routes = router(policy, memory=memory)
    assert [routes.route(range(40), {"a": 3, "b": 0}) for _ in range(3)] == expected


def test_a_pipeline_that_is_gone_is_forgotten():
    """A new pipeline under the same name has an empty cache, and no claim to old prompts."""
    routes = router()
    home = routes.route(range(40), {"a": 0, "b": 0})
    routes.forget(home)
    assert routes.route(range(40), {"a": 0 if home == "b" else 1, "b": 0 if home == "a" else 1}) != home

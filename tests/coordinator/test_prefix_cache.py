"""The pool that caches: every block is free, held or cached, what is found is what was asked for, parents go last."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from machines import histories, hold, search

from specserve.coordinator.block_keys import BlockKeys
from specserve.coordinator.blocks import empty_table
from specserve.coordinator.prefix_cache import PrefixCache
from specserve.errors import PoolError

SIZE = 2


class Text:
    """A request as the pool sees it: committed tokens, their keys, and a table."""

    def __init__(self, tokens, salt=""):
        self.tokens = list(tokens)
        self.keys = BlockKeys(self.tokens, salt)
        self.table = empty_table()


def read(pool, tokens, salt=""):
    """Somebody reads these tokens, and goes: what the pool found of them."""
    text = Text(tokens, salt)
    found = pool.reuse(text.table, text.keys)
    assert pool.cover(text.table, len(tokens))
    pool.remember(text.table, text.keys, len(tokens))
    pool.clear(text.table)
    pool.check()
    return found


def test_what_was_read_is_found_again():
    """Full blocks only, never the newest token's, and no further than the texts agree."""
    pool = PrefixCache(16, SIZE)
    assert read(pool, [1, 2, 3, 4, 5, 6, 7]) == 0
    assert read(pool, [1, 2, 3, 4, 5, 6, 7]) == 6
    assert read(pool, [1, 2, 3, 4, 5, 6]) == 4  # the block of the newest token is full, and is fed
    assert read(pool, [1, 2, 3, 9, 5, 6, 7]) == 2
    assert read(pool, [2, 3, 4, 5, 6, 7]) == 0  # the same tokens elsewhere are other KV
    assert (pool.held_count, pool.free_count) == (0, 16)


def test_salts_keep_texts_apart():
    """Only texts of one salt find each other's blocks; any text can be a salt."""
    pool = PrefixCache(16, SIZE)
    text = [1, 2, 3, 4, 5]
    assert [read(pool, text, salt) for salt in ("", "a", "\ud800", "", "a", "\ud800")] == [0, 0, 0, 4, 4, 4]


def test_stats_are_exact():
    """Queries count the tokens that came, hits those that were found, evictions the blocks that went; once each."""
    pool = PrefixCache(4, SIZE)
    read(pool, [1, 2, 3, 4, 5])
    read(pool, [1, 2, 3, 4, 5])
    stats = pool.take_stats()
    assert (stats.queries, stats.hits, stats.evictions) == (10, 4, 0)
    read(pool, [6, 7, 8, 9, 6, 7, 8])  # four blocks: two are free, two are taken from the cache
    stats = pool.take_stats()
    assert (stats.queries, stats.hits, stats.evictions) == (7, 0, 2)
    assert pool.take_stats().queries == 0


def test_the_longest_unused_goes_first_and_a_child_before_its_parent():
    """Of two texts the one that was used last stays; of one text its tail goes first."""
    pool = PrefixCache(6, SIZE)
    old, new = [1, 2, 3, 4, 5, 6, 0], [7, 8, 9, 10, 0]
    read(pool, new)
    read(pool, old)
    read(pool, new)
    assert pool.cached_count == 5
    taken = pool.alloc(2)  # one is free, one is evicted
    assert pool.take_stats().evictions == 1
    pool.free(taken)
    assert read(pool, new) == 4
    assert read(pool, old) == 4


def test_one_block_for_one_name():
    """Two that read the same text at once end up with the same blocks; the second copy is free again."""
    pool = PrefixCache(16, SIZE)
    texts = [Text([1, 2, 3, 4, 5]) for _ in range(2)]
    for text in texts:
        assert pool.reuse(text.table, text.keys) == 0
        pool.cover(text.table, 5)
    for text in texts:
        pool.remember(text.table, text.keys, 5)
    assert texts[0].table[:2] == texts[1].table[:2]
    assert (pool.held_count, pool.count(texts[0].table[0])) == (4, 2)
    pool.check()


def test_only_what_others_hold_takes_no_room():
    """A scheduler that counts blocks must count cached ones: to hold them again takes them from the room."""
    pool = PrefixCache(16, SIZE)
    keys = Text([1, 2, 3, 4, 5]).keys
    reader = Text([1, 2, 3, 4, 5])
    read(pool, reader.tokens)
    assert pool.held_prefix(keys) == 0
    pool.reuse(reader.table, reader.keys)
    assert pool.held_prefix(keys) == 2
    assert pool.free_count == 14


def test_void_forgets_everything_and_takes_nothing_away():
    """What is held stays held, what was cached is free, nothing is found."""
    pool = PrefixCache(8, SIZE)
    held = Text([1, 2, 3])
    pool.cover(held.table, 3)
    pool.remember(held.table, held.keys, 3)
    read(pool, [4, 5, 6, 7, 8])
    pool.void()
    pool.check()
    assert (pool.held_count, pool.cached_count, pool.free_count) == (2, 0, 6)
    assert read(pool, [1, 2, 3]) == read(pool, [4, 5, 6, 7, 8]) == 0


def test_a_pool_is_resized_only_while_nobody_holds_anything():
    """What is cached does not survive, what is held forbids it."""
    pool = PrefixCache(8, SIZE)
    read(pool, [1, 2, 3, 4, 5])
    pool.resize(5)
    pool.check()
    assert (pool.capacity, pool.free_count, pool.cached_count) == (5, 5, 0)
    pool.alloc(1)
    with pytest.raises(PoolError, match="1 blocks are held"):
        pool.resize(9)


@pytest.mark.parametrize("damage", ["cached and free", "cached and held", "free with a name", "a name of two blocks"])
def test_check_notices_a_damaged_cache(damage):
    """Each way of being two things at once, or of a wrong name, is found."""
    pool = PrefixCache(8, SIZE)
    read(pool, [1, 2, 3, 4, 5])
    block = next(iter(pool._cached))
    match damage:
        case "cached and free":
            pool._free.append(block)
        case "cached and held":
            pool._counts[block] = 1
        case "free with a name":
            pool._free.append(block)
            del pool._cached[block]
        case _:
            pool._names[pool._free[0]] = pool._names[block]
    with pytest.raises(PoolError):
        pool.check()


class CacheMachine(RuleBasedStateMachine):
    """Requests over two tokens come, grow, are rewound and go. The model knows what each block physically holds."""

    pool_type = PrefixCache

    def __init__(self):
        super().__init__()
        self.pool = self.pool_type(10, SIZE)
        self.holds: dict[int, tuple[int, ...]] = {}  # block → the text that its positions were computed with
        self.texts: list[Text] = []

    def write(self, text, start):
        """Feed from `start` on. Nobody else may be reading what is written."""
        for place in range(start // SIZE, len(text.table)):
            self.holds[text.table[place]] = tuple(text.tokens[: (place + 1) * SIZE])
            assert self.pool.count(text.table[place]) == 1, "a block that others hold is written"

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8))
    def begin(self, tokens):
        text = Text(tokens)
        found = self.pool.reuse(text.table, text.keys)
        assert found < len(tokens)
        for place, block in enumerate(text.table):
            assert self.holds[block] == tuple(tokens[: (place + 1) * SIZE]), "another text's KV"
        if self.pool.cover(text.table, len(tokens)):
            self.write(text, found)
            self.texts.append(text)
        else:
            self.pool.clear(text.table)

    @rule(which=st.integers(0, 9), more=st.lists(st.integers(0, 1), min_size=1, max_size=3), drafts=st.integers(0, 3))
    def grow(self, which, more, drafts):
        if not self.texts:
            return
        text = self.texts[which % len(self.texts)]
        before = len(text.tokens)
        if not self.pool.cover(text.table, before + len(more) + drafts):
            return
        text.tokens += more
        self.write(text, before - 1)  # the newest token is fed again
        self.pool.rewind(text.table, len(text.tokens))

    @rule()
    def remember(self):
        for text in self.texts:
            self.named(text)

    def named(self, text):
        self.pool.remember(text.table, text.keys, len(text.tokens))
        for place, block in enumerate(text.table[: (len(text.tokens) - 1) // SIZE]):
            assert self.holds[block] == tuple(text.tokens[: (place + 1) * SIZE]), "exchanged for another text's KV"

    @rule(which=st.integers(0, 9))
    def end(self, which):
        if self.texts:
            text = self.texts.pop(which % len(self.texts))
            self.named(text)
            self.pool.clear(text.table)

    @rule()
    def lose(self):
        self.pool.void()
        for text in self.texts:
            self.pool.clear(text.table)
        self.texts.clear()
        self.holds.clear()

    @rule(count=st.integers(1, 10))
    def lease(self, count):
        """An array of blocks for a moment, as plans ahead take them."""
        if count <= self.pool.free_count:
            taken = self.pool.lease(count)
            for block in taken.tolist():
                self.holds[block] = ()
            self.pool.give_back(taken)

    @invariant()
    def adds_up(self):
        self.pool.check()
        held = {block for text in self.texts for block in text.table}
        assert self.pool.held_count == len(held)
        assert self.pool.free_count == 10 - len(held)
        for block in held:
            assert self.pool.count(block) == sum(text.table.count(block) for text in self.texts)

    @invariant()
    def no_child_without_its_parent(self):
        named = {self.holds[block] for block in self.pool._names}
        assert all(text[:-SIZE] in named for text in named if len(text) > SIZE)


@histories(80, 500)
def test_any_order_of_calls_keeps_the_books(examples):
    """Requests that come, grow, share, go and are lost: what is found is what was asked for, and all adds up."""
    hold(CacheMachine, examples, steps=40)


class NewestFirst(PrefixCache):
    """Evicts parents before children."""

    def _evict(self, n):
        for _ in range(n):
            block, _ = self._cached.popitem()
            del self._found[self._names.pop(block)]
            self._free.append(block)


class KeepsCopies(PrefixCache):
    """Names the children of a block that has no name."""

    def remember(self, table, keys, covered):
        full = min(covered, keys.length - 1) // self.block_tokens
        for place, key in enumerate(keys.between(0, full, self.block_tokens)):
            if key not in self._found and table[place] not in self._names:
                self._found[key], self._names[table[place]] = table[place], key


class NamesTheNewest(PrefixCache):
    """Names the block that the newest token's position may be written to again."""

    def remember(self, table, keys, covered):
        class Longer:
            length = keys.length + 1
            between = keys.between

        super().remember(table, Longer(), covered)


class Flat(PrefixCache):
    """Names blocks by their own tokens only."""

    def remember(self, table, keys, covered):
        super().remember(table, _Flattened(keys), covered)

    def reuse(self, table, keys):
        return super().reuse(table, _Flattened(keys))


class _Flattened:
    def __init__(self, keys):
        self.length = keys.length
        self._tokens = keys._tokens

    def between(self, first, end, size):
        return [bytes(self._tokens[at * size : (at + 1) * size]) for at in range(first, end)]


class Holds(PrefixCache):
    """Forgets that a block that is found is not cached any more."""

    def _hold(self, block):
        self._counts[block] += 1


class KeepsNames(PrefixCache):
    """Goes on to find what a lost worker held."""

    def void(self):
        self._free.extend(self._cached)
        self._cached.clear()


def machine_of(broken):
    """The machine, on another pool."""
    return type(broken.__name__, (CacheMachine,), {"pool_type": broken})


RARE = [pytest.param(broken, marks=pytest.mark.full) for broken in (KeepsCopies, NamesTheNewest)]


@pytest.mark.parametrize("broken", [NewestFirst, Flat, Holds, KeepsNames, *RARE])
def test_broken_caches_are_caught(broken):
    """The machine sees each way of getting it wrong."""
    with pytest.raises((AssertionError, PoolError, KeyError, IndexError)):
        search(machine_of(broken), 2000, steps=40)


def a_copy_beside_a_named_block(machine):
    """Two texts that begin alike are computed at once; the one whose blocks got the names ends, and is evicted."""
    machine.begin([0, 1, 0])
    machine.begin([0, 1, 0, 1, 0])
    machine.remember()
    machine.end(0)
    machine.lease(7)
    machine.no_child_without_its_parent()


def the_newest_token_again(machine):
    """Another text goes on from a full block that ends with a newest token, which is fed again."""
    machine.begin([0, 1, 0, 1])
    machine.remember()
    machine.begin([0, 1, 0, 1, 1])
    machine.grow(0, [1], 0)


@pytest.mark.parametrize(
    ("history", "broken"), [(a_copy_beside_a_named_block, KeepsCopies), (the_newest_token_again, NamesTheNewest)]
)
def test_what_only_rare_histories_show_is_caught_in_short_ones(history, broken):
    """And the pool itself passes them."""
    history(machine_of(PrefixCache)())
    with pytest.raises(AssertionError):
        history(machine_of(broken)())


def test_keys_are_made_once_and_follow_the_tokens():
    """Names of blocks that are there already do not change when tokens are appended."""
    tokens = [1, 2, 3, 4]
    keys = BlockKeys(tokens, "")
    first = keys.between(0, 2, SIZE)
    tokens += [5, 6]
    assert keys.between(0, 3, SIZE)[:2] == first
    assert len({*keys.between(0, 3, SIZE)}) == 3
    assert keys.between(0, 2, SIZE) == BlockKeys([1, 2, 3, 4], "").between(0, 2, SIZE)
    assert array("i", [1]).itemsize == 4  # a name is of 32-bit ids on every machine

"""What the coordinator counts."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from itertools import pairwise
from typing import Any, Protocol

from specserve.config import Config, SloConfig
from specserve.metrics.board import Board, Counter, Snapshot
from specserve.metrics.history import History, Moment
from specserve.metrics.table import ENGINE_METRICS, MEMORY_USES, OTHER, ROLES, SLOT_STATES, SOURCES, STEP_RESULTS
from specserve.types import CacheStats, LostBy, PoolLevels, RequestStats, Role, RoundStats, WorkerInfo

log = logging.getLogger(__name__)

STATS_EVERY_S = 10.0


class Committed(Protocol):
    """A round that was committed, as far as it is counted."""

    def wasted(self) -> Mapping[str, int]:
        """Drafted tokens that came to nothing, by reason."""
        ...

    @property
    def stats(self) -> RoundStats:
        """The round in numbers."""
        ...


class EngineMetrics:
    """Every series carries `model_name`; `max_depth` positions exist from the start.

    slo holds what `request_slo` is judged by. One thread records; snapshots may be taken by others.
    """

    def __init__(
        self,
        model_name: str,
        max_depth: int = 0,
        slo: SloConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._board = Board(ENGINE_METRICS, {"model_name": model_name})
        self._slo = SloConfig() if slo is None else slo
        self._clock = clock
        self._told_s = clock()
        self._levels: PoolLevels | None = None
        self.history = History(clock)
        self._began_s = clock()
        self._about: dict[str, Any] = {"model": model_name}
        self.workers: dict[str, dict[str, Any]] = {}
        self._lost_by: dict[Role, LostBy] = {}
        self._speculator = OTHER
        self._each_round = _EachRound(self._board)
        for position in range(max_depth):
            self._position(position, 0, 0)

    def configured(self, config: Config, version: str) -> None:
        """Say what runs here."""
        self._set("specserve_build_info", 1, version, platform.python_version(), _version_of("ray"))
        draft = config.draft.model.source if config.draft.speculator == "small_model" else ""
        names = (config.target.source, draft, config.draft.speculator, config.engine.rule)
        self._speculator = config.draft.speculator
        engine = config.engine
        planned = (config.cluster.transport, str(engine.depth), engine.depth_policy)
        self._set("specserve_config_info", 1, *names, *planned)
        shape = engine.tree_shape
        self._about.update(
            version=version,
            speculator=config.draft.speculator,
            rule=engine.rule,
            depth=engine.depth,
            depth_policy=engine.depth_policy,
            tree_nodes=None if shape is None else shape.nodes(engine.depth),
            told_drafts=config.told_drafts,
            rules=[],
        )

    # ---- rounds ---------------------------------------------------------------------------------------------

    def committed(self, verdicts: Committed) -> None:
        """Count a round of the verifier, and what it wasted."""
        for reason, tokens in verdicts.wasted().items():
            if tokens:
                self.wasted(reason, tokens)
        self.round(verdicts.stats)

    def round(self, stats: RoundStats) -> None:
        """Count one round. Its kept, correction, bonus and plain tokens are those that were committed."""
        series = self._each_round
        accepted = sum(stats.kept_at)
        emitted = accepted, stats.bonus, stats.correction, stats.plain
        for counter, count in zip(series.emitted, emitted, strict=True):
            counter.inc(count)
        tokens = sum(emitted)
        series.tokens.inc(tokens)
        series.prefilled.inc(stats.prefill_tokens)
        series.recomputed.inc(stats.recomputed_tokens)
        drafts, drafted = max(stats.drafted_at, default=0), sum(stats.drafted_at)
        self._drafts(stats, drafts, drafted, accepted)
        series.round_s.observe(stats.wall_s)
        series.positions.observe(stats.positions)
        for (gap_s, count), rows in stats.gaps.items():
            series.interval_s.observe(gap_s, rows)
            series.latency_s.observe(gap_s / count, count * rows)  # its tokens share the gap, and each of them counts
        moment = self.history.now()
        moment.tokens += tokens
        moment.prefill_tokens += stats.prefill_tokens
        moment.drafts += drafts
        moment.drafted += drafted
        moment.kept += accepted
        self._tell()

    def _drafts(self, stats: RoundStats, drafts: int, drafted: int, accepted: int) -> None:
        series = self._each_round
        series.drafts.inc(drafts)
        series.drafted.inc(drafted)
        series.accepted.inc(accepted)
        for position, offered in enumerate(stats.drafted_at):
            self._position(position, offered, stats.kept_at[position] if position < len(stats.kept_at) else 0)
        for reason, count in stats.fallbacks.items():
            self._add("specserve_spec_decode_fallback_total", count, reason)
        for own, counts in stats.sources.items():
            source = self._speculator if own is None else own
            listed = source if source in SOURCES else OTHER
            for result, count in zip(("offered", "kept"), counts, strict=True):
                series.by_source[listed, result].inc(count)
        ahead = stats.ahead
        for counter, count in zip(series.outcomes, (ahead.hits, ahead.misses, ahead.unprepared), strict=True):
            counter.inc(count)
        series.foreseen.inc(ahead.outcomes)
        if drafts:
            series.length.set(drafted / drafts)
            # kept_at[j] counts the chains that kept more than j tokens
            at_least = (drafts, *stats.kept_at, 0)
            for length, (here, beyond) in enumerate(pairwise(at_least)):
                if here > beyond:
                    series.kept.observe(length, here - beyond)

    def levels(self, levels: PoolLevels) -> None:
        """Set the gauges of queue, slots and blocks."""
        self._levels = levels
        self.history.level(levels.running, levels.waiting, levels.slots_held)
        series = self._each_round
        series.running.set(levels.running)
        series.waiting.set(levels.waiting)
        drafted = levels.slots_held - levels.slots_drafting - levels.slots_verifying
        free = levels.slots_capacity - levels.slots_held
        counts = free, levels.slots_drafting, drafted, levels.slots_verifying
        for state, count in zip(series.slots, counts, strict=True):
            state.set(count)
        series.all_slots.set(levels.slots_capacity)
        target = levels.target_blocks_held, levels.target_blocks_cached, levels.target_blocks_capacity
        draft = levels.draft_blocks_held, levels.draft_blocks_cached, levels.draft_blocks_capacity
        series.blocks["target"].set(*target)
        series.blocks["draft"].set(*draft)

    def prefix_cache(self, role: Role, stats: CacheStats) -> None:
        """Count what a prefix cache did since the last time."""
        for name, count in (("queries", stats.queries), ("hits", stats.hits), ("evictions", stats.evictions)):
            if count:
                self._add(f"specserve_prefix_cache_{name}_total", count, role)

    # ---- requests -------------------------------------------------------------------------------------------

    def ended(self, reason: str, stats: RequestStats) -> None:
        """Count a request that ended. One that never yielded a token leaves the latencies alone."""
        self._board.listed("specserve_request_success_total", reason).inc()
        self._add("specserve_prompt_tokens_total", stats.prompt_tokens)
        self._add("specserve_prompt_tokens_cached_total", stats.cached_tokens)
        if stats.generated_tokens == 0:
            return
        decode_s = stats.total_s - stats.first_token_s
        per_token_s = decode_s / (stats.generated_tokens - 1) if stats.generated_tokens > 1 else None
        observe = self._observe
        observe("specserve_time_to_first_token_seconds", stats.first_token_s)
        observe("specserve_e2e_request_latency_seconds", stats.total_s)
        observe("specserve_request_queue_time_seconds", stats.queue_s)
        observe("specserve_request_prefill_time_seconds", max(0.0, stats.first_token_s - stats.queue_s))
        observe("specserve_request_decode_time_seconds", decode_s)
        observe("specserve_request_prompt_tokens", stats.prompt_tokens)
        observe("specserve_request_generation_tokens", stats.generated_tokens)
        if per_token_s is not None:
            observe("specserve_request_time_per_output_token_seconds", per_token_s)
        if reason in ("stop", "length"):
            self._judge(stats, per_token_s or 0.0)

    def _judge(self, stats: RequestStats, per_token_s: float) -> None:
        """Goodput counts requests that met all that was promised; what the client gave up is nobody's failure."""
        met = {
            "ttft": stats.first_token_s <= self._slo.ttft_s,
            "tpot": per_token_s <= self._slo.tpot_s,
            "e2e": stats.total_s <= self._slo.e2e_s,
        }
        for name, good in {**met, "all": all(met.values())}.items():
            self._add("specserve_request_slo_total", 1, name, "true" if good else "false")

    def rejected(self, reason: str) -> None:
        """Count a request that was not admitted, under the `code` of its error."""
        self._board.listed("specserve_requests_rejected_total", reason).inc()

    def cancelled(self, stage: str) -> None:
        """Count a request that was given up, by where it was: queued, prefill or decode."""
        self._add("specserve_requests_cancelled_total", 1, stage)

    def resumed(self) -> None:
        """Count a request that came again."""
        self._add("specserve_requests_resumed_total", 1)

    def refilled(self, count: int) -> None:
        """Count requests that the verifier could not go on with."""
        self._add("specserve_refills_total", count)

    def preempted(self) -> None:
        """Count a request that lost its place."""
        self._add("specserve_preemptions_total", 1)

    # ---- drafts and workers ---------------------------------------------------------------------------------

    def dropped(self, reason: str, count: int = 1) -> None:
        """Count messages of workers that were too late: stale_push, late_push, failed_plan, old_life, …"""
        self._board.listed("specserve_dropped_messages_total", reason).inc(count)

    def wasted(self, reason: str, tokens: int) -> None:
        """Count drafted tokens that came to nothing: rejected, stale, cancelled, stop, unlikely."""
        self._board.listed("specserve_spec_decode_wasted_draft_tokens_total", reason).inc(tokens)

    def worker(self, role: Role, up: bool) -> None:
        """Say whether a worker answers."""
        self._set("specserve_worker_up", 1 if up else 0, role)
        self.workers.setdefault(role, {})["up"] = up

    def lost(self, role: Role, why: LostBy) -> None:
        """A worker does not answer any more."""
        self._lost_by[role] = why
        self.worker(role, False)

    def joined(self, role: Role, info: WorkerInfo) -> None:
        """A worker with a loaded model joined, for the first time or after a loss."""
        if "device" in self.workers.get(role, {}):
            self._add("specserve_worker_restarts_total", 1, role, self._lost_by.pop(role, "replaced"))
        self._set("specserve_model_load_seconds", info.load_s, role)
        self._set("specserve_model_weights_bytes", info.weights_bytes, role)
        for use in MEMORY_USES:
            self._set("specserve_memory_bytes", info.memory.get(use, 0), role, use)
        about = {"device": info.device, "weights_bytes": info.weights_bytes, "load_s": round(info.load_s, 3)}
        self.workers.setdefault(role, {}).update(about, kv_blocks=info.blocks, block_tokens=info.block_tokens)
        self.worker(role, True)

    def rules(self, lossless: Mapping[str, bool]) -> None:
        """Say which rules there are, and whether each is lossless."""
        for rule, exact in lossless.items():
            self._set("specserve_rule_lossless", 1 if exact else 0, rule)
        self._about["rules"] = [{"name": rule, "lossless": exact} for rule, exact in lossless.items()]

    def computed(self, role: Role, phases: Mapping[str, float], wire_s: float) -> None:
        """A worker answered a batch: what it spent by phase, and what of the round trip it did not compute."""
        series, busy_s = self._each_round, sum(phases.values())
        for phase, spent_s in phases.items():
            self._add("specserve_worker_busy_seconds_total", spent_s, role, phase)
        series.waits[role, "wire"].inc(wire_s)
        series.transfer_s[role].observe(wire_s)
        series.step_s[role].observe(busy_s)
        moment = self.history.now()
        if role == "draft":
            moment.draft_busy_s += busy_s
        else:
            moment.target_busy_s += busy_s

    def stepped(self, role: Role, steps: tuple[int, int, int]) -> None:
        """A worker told what became of its emulated steps; real ones are not counted."""
        for result, count in zip(STEP_RESULTS, steps, strict=True):
            if count:
                self._add("specserve_emulated_steps_total", count, role, result)

    def waited(self, role: Role, reason: str, seconds: float) -> None:
        """A worker did not compute for a while."""
        self._each_round.waits[role, reason].inc(seconds)

    def waited_for_slots(self, seconds: float) -> None:
        """A request has draft slots again, after so long without any."""
        self._observe("specserve_slot_wait_seconds", seconds)

    def overlapped(self, seconds: float) -> None:
        """Draft and target computed at once for a while."""
        self._each_round.overlap.inc(seconds)
        self.history.now().overlap_s += seconds

    def network(self, totals: Iterable[tuple[str, str, int, int]], packing_s: Mapping[str, float]) -> None:
        """Bring the counters of messages up to these totals: (link, kind, messages, bytes), and seconds by link."""
        for link, kind, messages, size in totals:
            self._raise_to("specserve_network_messages_total", messages, link, kind)
            self._raise_to("specserve_network_bytes_total", size, link, kind)
        for link, spent_s in packing_s.items():
            self._raise_to("specserve_serialization_seconds_total", spent_s, link)

    # ---- what others may know -------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Every sample as it stands."""
        return self._board.snapshot()

    def render(self) -> str:
        """Prometheus text format 0.0.4 of this process alone."""
        return self._board.render()

    def status(self) -> dict[str, Any]:
        """What the status page shows: facts, levels, workers, and the last minutes second by second."""
        return {
            **self._about,
            "uptime_s": round(self._clock() - self._began_s, 1),
            "workers": {role: dict(about) for role, about in self.workers.items()},
            "levels": None if self._levels is None else asdict(self._levels),
            "history": self.history.columns(),
        }

    def _tell(self) -> None:
        """A line about the last seconds, while there is something to tell."""
        now = self._clock()
        if now - self._told_s < STATS_EVERY_S or self._levels is None:
            return
        seconds = min(int(now - self._told_s), int(STATS_EVERY_S))
        self._told_s = now
        log.info("%s", stats_line(self.history.window(seconds), seconds, self._levels))

    def _position(self, position: int, drafted: int, kept: int) -> None:
        known = self._each_round.by_position
        while position >= len(known):
            name = str(len(known))
            offered = self._board.counter("specserve_spec_decode_num_draft_tokens_per_pos_total", name)
            known.append(
                (offered, self._board.counter("specserve_spec_decode_num_accepted_tokens_per_pos_total", name))
            )
        offered, accepted = known[position]
        offered.inc(drafted)
        accepted.inc(kept)

    def _set(self, name: str, value: float, *values: str) -> None:
        self._board.gauge(name, *values).set(value)

    def _add(self, name: str, amount: float, *values: str) -> None:
        if amount:
            self._board.counter(name, *values).inc(amount)

    def _raise_to(self, name: str, total: float, *values: str) -> None:
        counter = self._board.counter(name, *values)
        counter.inc(max(0.0, total - counter.value))

    def _observe(self, name: str, value: float) -> None:
        self._board.histogram(name).observe(value)


class _Blocks:
    """The gauges of one model's blocks."""

    def __init__(self, board: Board, role: Role) -> None:
        self._states = [board.gauge("specserve_kv_blocks", role, state) for state in ("held", "cached", "free")]
        self._capacity = board.gauge("specserve_kv_blocks_capacity", role)
        self._usage = board.gauge("specserve_kv_cache_usage_ratio", role)

    def set(self, held: int, cached: int, capacity: int) -> None:
        """They stand so now."""
        for state, count in zip(self._states, (held, cached, capacity - held - cached), strict=True):
            state.set(count)
        self._capacity.set(capacity)
        self._usage.set(held / capacity if capacity else 0)


class _EachRound:
    """The series that every round writes to, by what they count: to find them by name takes longer than to count."""

    def __init__(self, board: Board) -> None:
        self.emitted = [
            board.counter("specserve_spec_decode_emitted_tokens_total", kind)
            for kind in ("accepted", "bonus", "correction", "plain")
        ]
        self.tokens = board.counter("specserve_generation_tokens_total")
        self.prefilled = board.counter("specserve_prefill_tokens_total")
        self.recomputed = board.counter("specserve_recomputed_tokens_total")
        self.drafts = board.counter("specserve_spec_decode_num_drafts_total")
        self.drafted = board.counter("specserve_spec_decode_num_draft_tokens_total")
        self.accepted = board.counter("specserve_spec_decode_num_accepted_tokens_total")
        self.by_position: list[tuple[Counter, Counter]] = []  # offered and kept
        self.by_source = board.counters("specserve_spec_decode_source_draft_tokens_total")
        self.outcomes = [
            board.counter("specserve_spec_decode_outcomes_total", result) for result in ("hit", "miss", "none")
        ]
        self.foreseen = board.counter("specserve_spec_decode_outcomes_drafted_total")
        self.length = board.gauge("specserve_spec_decode_draft_length")
        self.kept = board.histogram("specserve_spec_decode_accepted_length")
        self.round_s = board.histogram("specserve_round_seconds")
        self.positions = board.histogram("specserve_verify_batch_tokens")
        self.interval_s = board.histogram("specserve_step_interval_seconds")
        self.latency_s = board.histogram("specserve_inter_token_latency_seconds")
        self.waits = board.counters("specserve_worker_wait_seconds_total")
        self.overlap = board.counter("specserve_overlap_seconds_total")
        self.transfer_s = {role: board.histogram("specserve_network_transfer_seconds", role) for role in ROLES}
        self.step_s = {
            "draft": board.histogram("specserve_draft_step_seconds"),
            "target": board.histogram("specserve_verify_step_seconds"),
        }
        self.running = board.gauge("specserve_num_requests_running")
        self.waiting = board.gauge("specserve_num_requests_waiting")
        self.slots = [board.gauge("specserve_slots", state) for state in SLOT_STATES]
        self.all_slots = board.gauge("specserve_slots_capacity")
        self.blocks: dict[Role, _Blocks] = {"draft": _Blocks(board, "draft"), "target": _Blocks(board, "target")}


def _version_of(package: str) -> str:
    """Of an installed package; empty where it is not."""
    try:
        return installed(package)
    except PackageNotFoundError:
        return ""


def stats_line(moment: Moment, seconds: int, levels: PoolLevels) -> str:
    """What the last seconds brought, for the log."""
    line = (
        f"{levels.running} running, {levels.waiting} waiting; {moment.tokens / seconds:.1f} tokens/s, "
        f"prefill {moment.prefill_tokens / seconds:.1f}/s; "
        f"target busy {moment.target_busy_s / seconds:.0%}, draft {moment.draft_busy_s / seconds:.0%}, "
        f"overlap {moment.overlap_s / seconds:.0%}; slots {levels.slots_held}/{levels.slots_capacity}, "
        f"KV {levels.target_blocks_held / max(1, levels.target_blocks_capacity):.0%}"
    )
    if not moment.drafted:
        return line
    return (
        f"{line}; acceptance {moment.kept / moment.drafted:.0%}, {1 + moment.kept / moment.drafts:.2f} tokens per chain"
    )

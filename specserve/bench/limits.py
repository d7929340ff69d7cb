"""How fast a pipeline could be if nothing but its devices took time: closed forms over step times.

B rows decode at once; each row and round yields E tokens. A round takes

plain    v₁(B)                                  the target's step of one position per row
serial   K · d(B) + v(B, positions)             K draft steps, then a verification (Leviathan et al., 2023)
ahead    max(v(B, positions), s · d(B))         where the draft does s steps in a round

with drafts that are pushed while the target works, so that no round waits for one and a miss is a plain step (the
asynchronous scheme of Kumar et al., "Speculative speculative decoding", 2026, with a plain step for its fallback).
Where drafting ahead gave way to turns for some rounds, these count as serial ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from specserve.models._device_profile import DeviceProfile


@dataclass(frozen=True, slots=True)
class Load:
    """What was measured: how many rows decode, and per row and round: tokens that came out of it, the chance that it
    had a draft, and drafted tokens offered, rounds without a draft included. draft_steps are the draft's in a round.
    in_turns is the share of rounds that waited for their drafts though the mode is another.
    """

    rows: int
    tokens: float
    drafted_share: float
    drafted_tokens: float
    draft_steps: float = 1.0
    in_turns: float = 0.0


def tokens_per_s(profile: DeviceProfile, mode: str, depth: int, load: Load) -> float:
    """The limit of a mode (`plain`, `serial`, or any other name for drafting ahead) under a measured load."""
    return load.rows * load.tokens / _round_s(profile, mode, depth, load)


def _round_s(profile: DeviceProfile, mode: str, depth: int, load: Load) -> float:
    draft_s = profile.draft.step_s(load.rows, load.rows)
    if mode == "plain":
        return profile.target.step_s(load.rows, load.rows)
    verify_s = _verify_s(profile, load)
    serial_s = depth * draft_s + verify_s
    if mode == "serial":
        return serial_s
    turns = load.in_turns
    steps_ahead = max(0.0, load.draft_steps - turns * depth)  # of all rounds together, as those of a round
    return turns * serial_s + max((1 - turns) * verify_s, steps_ahead * draft_s)


def _verify_s(profile: DeviceProfile, load: Load) -> float:
    """The mean target step: plain where no row of a round has a draft, which rows have independently of each other."""
    plain_s = profile.target.step_s(load.rows, load.rows)
    none = (1 - load.drafted_share) ** load.rows
    if none >= 1:
        return plain_s
    positions = load.rows * (1 + load.drafted_tokens / (1 - none))  # of a round in which any row has a draft
    return none * plain_s + (1 - none) * profile.target.step_s(load.rows, max(load.rows + 1, round(positions)))

"""How state machines are run: the same histories every time, a sample by default and many in the full matrix."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def histories(few: int, many: int) -> pytest.MarkDecorator:
    """Give a test its number of `examples`: few by default, many in the full matrix."""
    return pytest.mark.parametrize("examples", [few, pytest.param(many, marks=pytest.mark.full)])


def hold(machine: type[RuleBasedStateMachine], examples: int, steps: int) -> None:
    """Run histories of at most so many steps; one that fails is told at its shortest."""
    _run(machine, examples, steps, (Phase.generate, Phase.shrink))


def search(machine: type[RuleBasedStateMachine], examples: int, steps: int) -> None:
    """The same for machines that are meant to fail: the first failure is enough."""
    _run(machine, examples, steps, (Phase.generate,))


def _run(machine: type[RuleBasedStateMachine], examples: int, steps: int, phases: tuple[Phase, ...]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
            derandomize=True,
            database=None,
            phases=phases,
            report_multiple_bugs=False,
        ),
    )

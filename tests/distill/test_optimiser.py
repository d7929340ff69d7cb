"""Steps that take into account how large inputs are."""

from __future__ import annotations

import torch
from torch import nn

from specserve.distill.optimiser import InputScaledAdamW


def student_of(sizes):
    """A matrix and a norm, and inputs of these sizes."""
    torch.manual_seed(1)
    inputs = torch.randn(64, len(sizes)) * torch.tensor(sizes)
    return nn.Sequential(nn.Linear(len(sizes), 2, bias=False), nn.LayerNorm(2)), inputs


def one_step(student, inputs, *, measured):
    """How much a step of rate 0.01 changes the weights of the matrix."""
    optimiser = InputScaledAdamW(student, weight_decay=0.0)
    if measured:
        optimiser.measure(lambda: student(inputs))
    for group in optimiser.param_groups:
        group["lr"] = 0.01
    before = student[0].weight.detach().clone()
    (student(inputs) * torch.tensor([1.0, 3.0])).square().sum().backward()
    optimiser.step()
    return (student[0].weight.detach() - before).abs(), optimiser


def test_what_an_input_brings_about_does_not_depend_on_its_size():
    student, inputs = student_of([10.0, 1.0, 0.1])
    changed, _ = one_step(student, inputs, measured=True)
    brought = changed * inputs.square().mean(0).sqrt()
    torch.testing.assert_close(brought, brought[:, 1:2].expand(-1, 3), rtol=1e-3, atol=0)
    torch.testing.assert_close(changed[:, 1], torch.full((2,), 0.01), rtol=0.02, atol=0)  # the median's is the rate's


def test_without_sizes_it_is_adam():
    student, inputs = student_of([10.0, 1.0, 0.1])
    changed, _ = one_step(student, inputs, measured=False)
    torch.testing.assert_close(changed, torch.full((2, 3), 0.01), rtol=1e-3, atol=0)


def test_an_input_that_is_never_there_has_a_bounded_factor():
    student, inputs = student_of([1.0, 0.0, 1.0])
    _, optimiser = one_step(student, inputs, measured=True)
    assert 1 < float(optimiser.param_groups[0]["columns"][1]) <= 50


def test_factors_are_saved_with_the_state():
    student, inputs = student_of([10.0, 1.0, 0.1])
    _, optimiser = one_step(student, inputs, measured=True)
    other = InputScaledAdamW(student, weight_decay=0.0)
    other.load_state_dict(optimiser.state_dict())
    torch.testing.assert_close(other.param_groups[0]["columns"], optimiser.param_groups[0]["columns"])


def test_every_parameter_is_taught():
    student, inputs = student_of([10.0, 1.0])
    _, optimiser = one_step(student, inputs, measured=True)
    held = {id(weight) for group in optimiser.param_groups for weight in group["params"]}
    assert held == {id(weight) for weight in student.parameters()}

"""Attending over pages: kernels are handed what they promise to take, and the fastest way that is right is chosen."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from reference_kernel import reference_kernel
from test_step_graphs import SHAPES, compared, garbage, recorded, rounds
from tiny_causal import BLOCK, BLOCKS, CONFIGS, paged, ragged, random_tokens, tiny

from specserve.models import TokenTree, _attention_choice, _flash_attention, _varlen_attention
from specserve.models._attention_choice import Case, best
from specserve.models._kernel_attention import KernelAttention, KernelCall
from specserve.models._pages import Gathered, LayerLayout
from specserve.models._recorder import PlainRecorder
from specserve.models.paged_transformers import PagedTransformers

CPU = torch.device("cpu")
LAYOUT = LayerLayout(kv_heads=2, key_dim=8, value_dim=8, dtype=torch.float32, window=None)


def by_kernel(
    family: str, *, softcaps: bool = True, record: bool = False
) -> tuple[PagedTransformers, list[KernelCall]]:
    """A backend that attends by a kernel on the way that it takes on a GPU, and what the kernel was asked."""
    calls: list[KernelCall] = []

    def kernel(call: KernelCall) -> torch.Tensor:
        calls.append(call)
        return reference_kernel(call)

    backend = PagedTransformers(tiny(family), None)
    backend._native = backend._flat = None
    backend.plan_steps(SHAPES if record else ())
    backend.allocate(BLOCKS, BLOCK)
    backend._attention = KernelAttention("reference", kernel, BLOCK, softcaps=softcaps)
    if record:
        for _ in backend.record_with(_Unguarded()):
            pass
        backend.pages.keys[0].zero_()
    else:
        garbage(backend)
    calls.clear()
    return backend, calls


class _Unguarded(PlainRecorder):
    """The reference kernel reads lengths on the host, as kernels do on the device."""

    def record(self, step):
        step()
        return step


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_kernels_are_handed_rows_as_they_take_them(family: str) -> None:
    """Ragged rows, prompts among them, in scattered blocks; windows, scalings and soft caps: what gathering says."""
    backend, calls = by_kernel(family)
    compared(backend, paged(family), rounds())
    assert len(calls) == 3 * len(rounds())


@pytest.mark.parametrize("family", ["llama", "mistral_window", "gemma2_softcap"])
def test_recorded_steps_hand_over_padded_rows(family: str) -> None:
    """Rows with fewer tokens end where a kernel expects it, and padded rows have no keys."""
    backend, calls = by_kernel(family, record=True)
    compared(backend, paged(family), rounds())
    assert backend.graphs is not None
    assert backend.graphs.replayed == 5
    assert any(0 in call.rows.used.tolist() for call in calls)
    assert len(calls) == 3 * len(rounds())


def test_what_a_kernel_cannot_do_is_gathered() -> None:
    """Soft caps where it knows none, and trees, whose nodes do not see all that is before them."""
    backend, calls = by_kernel("gemma2_softcap", softcaps=False)
    compared(backend, paged("gemma2_softcap"), rounds()[:2])
    assert not calls
    backend, calls = by_kernel("llama")
    eager = paged("llama")
    first = ragged([(random_tokens(1, 6), 0, [3, 1])])
    plain = ragged([(random_tokens(2, 3), 5, [3, 1])])
    tree = type(plain)(
        plain.tokens,
        plain.positions,
        plain.offsets,
        plain.tables,
        plain.wanted,
        trees={0: TokenTree(6, np.array([-1, -1]))},
    )
    for batch in (first, tree):
        torch.testing.assert_close(backend.forward(batch), eager.forward(batch), atol=2e-5, rtol=2e-5)
    assert len(calls) == 3


def cases(window: int | None = None) -> list[Case]:
    return [Case(LayerLayout(2, 8, 8, torch.float32, window), 4, 16, CPU)]


def kernel_named(name: str, kernel=reference_kernel):
    return lambda block_tokens, device: KernelAttention(name, kernel, block_tokens, softcaps=True)


def test_the_fastest_that_is_right_is_chosen_and_all_are_told() -> None:
    """By what was measured, gathering among them."""
    times = {"gather": 2e-3, "quick": 1e-3, "slow": 3e-3}
    kernels = {"quick": kernel_named("quick"), "slow": kernel_named("slow")}
    found, told = best(kernels, cases(), 16, CPU, lambda way, _: times[way.name])
    assert found.name == "quick"
    assert told == "gather: 2.000 ms; quick: 1.000 ms; slow: 3.000 ms"
    times["gather"] = 1e-4
    assert best(kernels, cases(), 16, CPU, lambda way, _: times[way.name])[0].name == "gather"


@pytest.mark.parametrize("wrong", ["window", "causal", "nan"])
def test_one_that_is_wrong_is_never_chosen(wrong: str) -> None:
    """A kernel that leaves out a window, looks ahead, or finds no numbers."""

    def kernel(call: KernelCall) -> torch.Tensor:
        if wrong == "window":
            call = KernelCall(call.query, call.keys, call.values, call.rows, None, call.scaling, call.softcap)
        found = reference_kernel(call)
        if wrong == "nan":
            found[3] = float("nan")
        return found.roll(1, 0) if wrong == "causal" else found

    found, told = best({wrong: kernel_named(wrong, kernel)}, cases(window=7), 16, CPU, lambda way, _: 1.0)
    assert isinstance(found, Gathered)
    assert f"{wrong}: off by" in told


def test_one_that_fails_is_told_with_its_reason() -> None:
    """In a line, whatever it raises when it is used."""

    def kernel(call: KernelCall) -> torch.Tensor:
        raise RuntimeError("Paged KV cache block size must be divisible by 256\nand more")

    found, told = best({"picky": kernel_named("picky", kernel)}, cases(), 16, CPU)
    assert isinstance(found, Gathered)
    assert told.endswith("; picky: RuntimeError: Paged KV cache block size must be divisible by 256")


def test_the_real_ones_are_not_there_on_a_cpu() -> None:
    """They say so when they are made, torch's attention stays as it is, and a CPU gathers without measuring."""
    found, told = best(_attention_choice.KERNELS, cases(), 16, CPU, lambda way, _: 1.0)
    assert isinstance(found, Gathered)
    assert "varlen: RuntimeError: needs a CUDA device, not cpu" in told
    assert "flash-attn: RuntimeError: needs a CUDA device, not cpu" in told
    assert torch.nn.attention.current_flash_attention_impl() is None
    assert isinstance(_attention_choice.chosen([(LAYOUT, 4)], 16, CPU), Gathered)


def test_the_real_ones_are_made_by_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU without a backend that has block tables, and without the library, each says what it lacks."""
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(RuntimeError, match="compute capability 8"):
        _varlen_attention.made(16, device)
    with pytest.raises(ImportError, match="flash_attn"):
        _flash_attention.made(16, device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(ImportError):  # the third generation's kernels are a package of their own
        _varlen_attention.made(16, device)
    assert torch.nn.attention.current_flash_attention_impl() is None


def test_recorded_backends_of_other_tests_gather() -> None:
    """On a CPU."""
    assert isinstance(recorded("llama")._attention, Gathered)

"""Writes into weights that do not change torch's version counter, and weights that move."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusewright
from fusewright.plan.execute.prepare import EVERY, PreparedCache, Samples

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def doubled(*weights: Tensor) -> tuple[Tensor, ...]:
    return tuple(w * 2 for w in weights)


def row(w: Tensor) -> None:
    w.data[5] = 0


def column(w: Tensor) -> None:
    w.data[:, 77] = 3


def through_numpy(w: Tensor) -> None:
    w.detach().numpy()[100:102] *= 2


WRITES = (row, column, through_numpy)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_write_that_torch_does_not_count_is_seen_within_a_few_calls(write: Any, dtype: torch.dtype) -> None:
    if write is through_numpy and dtype is torch.bfloat16:
        dtype = torch.float64  # numpy has no bfloat16
    weights = [torch.randn(512, 512, dtype=dtype) for _ in range(3)]
    cache = PreparedCache(doubled)
    cache(*weights)
    write(weights[1])
    for _ in range(3 * EVERY):
        found = cache(*weights)
    assert torch.equal(found[1], weights[1] * 2)
    assert cache.runs == 2


def test_two_pieces_in_a_row_are_always_seen() -> None:
    w = torch.zeros(1 << 14)
    samples = Samples([w])
    for start in range(0, (1 << 14) - 32, 97):
        w[start : start + 32] = 1
        assert not all(samples.unchanged() for _ in range(EVERY))
        w[start : start + 32] = 0


class Scaled(nn.Module):
    """The doubled weight is computed once."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(512, 512))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight * 2).t()


BACKENDS = [
    pytest.param("x86_onednn", {}, marks=pytest.mark.hardware("x86_onednn"), id="x86_onednn"),
    pytest.param("nvidia_triton", {"simulate": True}, id="nvidia_triton"),
    pytest.param("fusewright_null", {"fallback": "allow"}, id="fusewright_null"),
]


@pytest.mark.parametrize(("backend", "options"), BACKENDS)
def test_refresh_forgets_what_was_made_of_a_model(backend: str, options: dict[str, Any]) -> None:
    model, x = Scaled(), torch.randn(3, 512)
    compiled = torch.compile(model, backend=backend, options=options)
    with torch.no_grad():
        compiled(x)
        for again in (lambda: fusewright.refresh(model), fusewright.refresh):
            model.weight.data[100, 333] += 100
            assert not torch.allclose(compiled(x), model(x)), "this very write is seen without a refresh"
            again()
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-3, atol=1e-3)


def test_refresh_of_one_model_leaves_others() -> None:
    ours, theirs = nn.Linear(3, 3), nn.Linear(3, 3)
    cache = PreparedCache(doubled)
    kept = cache(theirs.weight)
    held = cache.prepared([ours.weight])
    fusewright.refresh(ours)
    assert cache(theirs.weight) is kept
    assert not held.holds([ours.weight]), "a recording that holds it must be made anew"


@pytest.mark.parametrize(("backend", "options"), BACKENDS)
def test_the_check_of_weights_sees_every_byte_and_says_so(
    backend: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model, x = Scaled(), torch.randn(3, 512)
    for _ in range(2):  # the second time from the cache on disk
        torch.compiler.reset()
        caplog.clear()
        compiled = torch.compile(model, backend=backend, options={**options, "check": "weights"})
        with torch.no_grad(), caplog.at_level(logging.WARNING, logger="fusewright"):
            compiled(x)
            compiled(x)
            assert not caplog.records
            model.weight.data[100, 333] += 100
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-3, atol=1e-3)
        assert "was written in a way that torch does not count" in caplog.text


# ---------------------------------------------------------------- swap_tensors

SWAPS: dict[str, Callable[[nn.Linear, nn.Linear], Any]] = {
    "swap_tensors": lambda a, b: torch.utils.swap_tensors(a.weight, b.weight),
    "assigned": lambda a, b: a.load_state_dict(b.state_dict(), assign=True),
    "loaded": lambda a, b: a.load_state_dict(b.state_dict()),
    "converted": lambda a, b: a.double().float(),
}


@pytest.mark.hardware("x86_onednn")
@pytest.mark.parametrize("swapping", [True, False], ids=["by swapping", "by data"])
@pytest.mark.parametrize("how", SWAPS)
def test_weights_may_be_swapped(how: str, swapping: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other, x = nn.Linear(64, 64), nn.Linear(64, 64), torch.randn(3, 64)
    compiled = torch.compile(model, backend="x86_onednn")
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(swapping)
    refused = torch.__version__.startswith("2.10.") and (swapping or how == "swap_tensors")
    try:
        with torch.no_grad():
            compiled(x)
            if refused:  # with any backend: Dynamo has weak references to the weights, and 2.10 swaps none that have
                with pytest.raises(RuntimeError, match="swap"):
                    SWAPS[how](model, other)
            for _ in range(0 if refused else 3):
                SWAPS[how](model, other)
                torch.testing.assert_close(compiled(x), model(x))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def test_a_parameter_made_anew_in_the_same_memory_is_seen() -> None:
    """The new tensor may have the old one's id, memory, address and version."""
    layer = nn.Linear(8, 8)
    cache = PreparedCache(doubled)
    for _ in range(6):
        layer.weight = nn.Parameter(layer.weight.data.mul_(2))
        assert torch.equal(cache(layer.weight)[0], layer.weight * 2)

"""`as_strided` on inputs with a storage offset: read, written through and returned as in eager.

An explicit offset counts from the storage's first element regardless of the tensor's own offset; without one, a view starts
where the tensor does. One compiled function receives inputs with different offsets, which no guard distinguishes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.plan.replay.test_inference import Recorder
from tests.unit.plan.replay.test_inference import compiled as recorded

Function = Callable[[Tensor], Tensor]
QUIET: dict[str, Any] = {"cache": False, "fallback": "allow"}


def dynamo(backend: str, **more: Any) -> Callable[[Function], Function]:
    return lambda fn: torch.compile(fn, backend=backend, options={**QUIET, **more})


def simulated(fn: Function) -> Function:
    pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")
    return dynamo("nvidia_triton", simulate=True)(fn)


WAYS: dict[str, Callable[[Function], Function]] = {
    "null": dynamo("fusewright_null"),
    "x86_onednn": dynamo("x86_onednn"),
    "x86_onednn, symbolic": lambda fn: torch.compile(fn, backend="x86_onednn", dynamic=True, options=QUIET),
    "nvidia_triton": simulated,
    "replayed": lambda fn: recorded(fn, Recorder()),
}


def windows(x: Tensor) -> Tensor:
    return x.as_strided((3, 4), (2, 1))


def busy(x: Tensor) -> Tensor:
    """Do enough work to make a recording worthwhile."""
    return ((x.exp() * 2) @ x.new_ones(x.shape[-1], 2) + 1).softmax(0) @ x.new_ones(2, 3)


def mutated(x: Tensor, view: Tensor) -> Tensor:
    view.mul_(3)
    return x * 2


FUNCTIONS: dict[str, Function] = {
    "from the tensor": lambda x: busy(windows(x)),
    "from the storage": lambda x: busy(x.as_strided((3, 4), (2, 1), 1)),
    "from the storage's start": lambda x: busy(x.as_strided((3, 4), (2, 1), 0)) + x[:3],
    "of a slice": lambda x: busy(windows(x[3:])),
    "of a slice, from the storage": lambda x: busy(x[3:].as_strided((3, 4), (2, 1), 2)),
    "of what the graph made": lambda x: busy(windows(x.exp()[3:])) + busy(x.exp()[3:].as_strided((3, 4), (2, 1), 1)),
    "returned": windows,
    "returned, from the storage": lambda x: x.as_strided((3, 4), (2, 1), 2),
    "scattered": lambda x: busy(torch.as_strided_scatter(x, torch.zeros(3, 2), (3, 2), (2, 1), 6)[None]),
    "scattered from the tensor": lambda x: busy(torch.as_strided_scatter(x, torch.zeros(3, 2), (3, 2), (2, 1))[None]),
    "written": lambda x: mutated(x, x.as_strided((3, 2), (2, 1))),
    "written from the storage": lambda x: mutated(x, x.as_strided((3, 2), (2, 1), 6)),
    "written and returned": lambda x: x.as_strided((3, 2), (2, 1), 6).mul_(3),
}
"""Writes stay within the tensor's own elements: AOTAutograd functionalizes tensors and loses others. It refuses writes through
`as_strided` of a slice."""

BEGINS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda b: b[0:24], lambda b: b[3:27], lambda b: b[5:29], lambda b: b[24:], lambda b: b[5:29],
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "way"), [(n, w) for n in FUNCTIONS for w in WAYS if w != "replayed" or not n.startswith("written")]
)
@torch.no_grad()
def test_as_in_eager(name: str, way: str) -> None:
    torch.compiler.reset()
    fn = FUNCTIONS[name]
    fast = WAYS[way](fn)
    for begin in BEGINS[: 3 if "written" in name else None]:
        memory = torch.randn(48)
        other = memory.clone()
        want, got = fn(begin(memory)), fast(begin(other))
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(other, memory)
        assert got.stride() == want.stride()
        shares, also = (
            a.untyped_storage().data_ptr() == m.untyped_storage().data_ptr() for a, m in ((want, memory), (got, other))
        )
        assert shares == also and (not shares or got.storage_offset() == want.storage_offset())


@torch.no_grad()
def test_only_what_counts_from_a_storage_is_not_replayed() -> None:
    for name, times in (
        ("from the tensor", 1),
        ("of a slice", 1),
        ("of what the graph made", 1),
        ("from the storage", 0),
        ("scattered", 0),
    ):
        recorder = Recorder()
        fast = recorded(FUNCTIONS[name], recorder)
        for _ in range(3):
            fast(torch.randn(24))
        assert recorder.recorded == times, name


@pytest.mark.parametrize("name", ["from the tensor", "from the storage", "of a slice", "of a slice, from the storage"])
def test_gradients_through_overlapping_windows(name: str) -> None:
    """Compiled anew for each offset: AOTAutograd stores it in the gradients' graph, and Dynamo does not guard on it."""
    for begin in BEGINS[1:3]:
        torch.compiler.reset()
        x = torch.randn(48, requires_grad=True, dtype=torch.float64)
        (want,) = torch.autograd.grad(FUNCTIONS[name](begin(x)).square().sum(), x)
        (got,) = torch.autograd.grad(WAYS["x86_onednn"](FUNCTIONS[name])(begin(x)).square().sum(), x)
        torch.testing.assert_close(got, want)

"""Which instructions of a plan may wait in a queue of launches, and when the queue is closed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fusewright.interface import KernelCode, TensorSpec
from fusewright.plan import native
from fusewright.plan.build import Plan
from fusewright.plan.execute import codegen
from fusewright.plan.execute.queued import queued
from fusewright.plan.ir import Call, CallPython, Instruction, Launch, Ref
from fusewright.plan.vocabulary import function_of

VECTOR = TensorSpec((4,), (1,), torch.float32)


class Doubled:
    """A kernel whose launches are queued: it computes when the queue is closed."""

    queues = True

    def __init__(self) -> None:
        self.waiting: list[Sequence[torch.Tensor]] = []
        self.is_open = False
        self.closed_with: list[int] = []
        self.most = 100

    def __call__(self, tensors: Sequence[torch.Tensor], sizes: Any, scalars: Any) -> None:
        if len(self.waiting) == self.most:
            raise ValueError("too many")
        self.waiting.append(tensors)
        if not self.is_open:
            self.launch()

    def launch(self) -> None:
        for x, out in self.waiting:
            torch.mul(x, 2, out=out)
        self.waiting.clear()

    def open(self) -> None:
        self.is_open = True

    def close(self) -> None:
        if self.is_open:
            self.closed_with.append(len(self.waiting))
        self.is_open = False
        self.launch()


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Doubled:
    """A kernel and its queue; nothing else is queued."""
    found = Doubled()
    monkeypatch.setattr(native, "launch_queue", lambda: native.LaunchQueue(found.open, found.close))
    monkeypatch.setattr("fusewright.plan.execute.queued.queues", lambda function: isinstance(function, Doubled))
    return found


def launch(x: int) -> Launch:
    """Compute value x + 1 from value x."""
    return Launch("k", (Ref(x),), (x + 1,))


def call(target: str, x: int, *args: Any) -> Call:
    return Call(target, (Ref(x), *args), (x + 1,))


def loaded(kernel: Doubled, *instructions: Instruction) -> Any:
    last = instructions[-1].outs[0]
    specs = dict.fromkeys(range(1, last + 1), VECTOR)
    plan = Plan((1,), (Ref(last),), list(instructions), [], (), (), specs)
    return codegen.load(plan, {"k": KernelCode(kernel)})


@pytest.mark.parametrize(
    ("between", "closed_with"),
    [
        ([], [8]),
        ([call("aten::view.default", 5, [4])], [8]),
        ([call("aten::slice.Tensor", 5, 0, 0, 4), call("aten::as_strided.default", 6, [4], [1])], [8]),
        ([call("aten::neg.default", 5)], [4, 4]),
        ([call("aten::relu_.default", 5)], [4, 4]),
        ([call("aten::reshape.default", 5, [4])], [4, 4]),  # may copy
        ([CallPython(lambda x: (-x,), (Ref(5),), (6,))], [4, 4]),
    ],
)
def test_launches_wait_until_something_else_uses_the_device(
    kernel: Doubled, between: Sequence[Instruction], closed_with: Sequence[int]
) -> None:
    at = 5 + len(between)
    run = loaded(kernel, *map(launch, range(1, 5)), *between, *map(launch, range(at, at + 4)))
    x = torch.ones(4)
    plain = x * 16
    for i in between:
        (plain,) = i.fn(plain) if isinstance(i, CallPython) else (function_of(i.target)(plain, *i.args[1:]),)
    assert torch.equal(run([x])[0], plain * 16)
    assert kernel.closed_with == list(closed_with)


def test_few_launches_and_leading_views_are_not_queued(kernel: Doubled) -> None:
    view, other = call("aten::view.default", 1, [4]), call("aten::neg.default", 3)
    kernels, four = {"k": KernelCode(kernel)}, [*map(launch, range(2, 6))]
    assert not list(queued([view, *four[:3], other, *four[:3]], kernels, function_of))
    assert list(queued([view, *four], kernels, function_of)) == [range(1, 5)]
    cpu = {"k": KernelCode(kernel, address=1)}
    assert not list(queued(four, cpu, function_of)), "these run when they are called"


def test_what_was_queued_is_launched_when_an_instruction_raises(kernel: Doubled) -> None:
    run = loaded(kernel, *map(launch, range(1, 6)))
    kernel.most = 2
    with pytest.raises(ValueError, match="too many"):
        run([torch.ones(4)])
    assert kernel.closed_with == [2]


def test_first_runs_look_at_each_instruction(kernel: Doubled) -> None:
    plan = Plan((1,), (Ref(5),), [*map(launch, range(1, 5))], [], (), (), dict.fromkeys(range(1, 6), VECTOR))
    codegen.load(plan, {"k": KernelCode(kernel)}, checked=True)([torch.ones(4)])
    codegen.load(plan, {"k": KernelCode(kernel)}, observe=lambda k, results: None)([torch.ones(4)])
    assert not kernel.closed_with

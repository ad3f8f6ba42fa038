"""Replay of plans that hold what cannot be recorded: that is called, between pieces that are recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusewright.interface import TensorSpec
from fusewright.plan.build import Plan
from fusewright.plan.ir import Call, Ref
from fusewright.plan.replay.copies import flat
from fusewright.plan.replay.piecewise import Piecewise
from fusewright.report import recording
from tests.unit.plan.replay import test_inference
from tests.unit.plan.replay.test_inference import compiled


class Recorder(test_inference.Recorder):
    """A fake recorder of pieces, whose results are garbage until the first replay."""

    def pool(self) -> object:
        return object()

    def record(self, run: Callable[[], Any], warm: bool, shared: Any = True) -> tuple[Any, Callable[[], None]]:
        assert not warm, "a warm-up would run with garbage"
        results = run()
        for old, new in zip(results, run(), strict=True):
            if old.data_ptr() != new.data_ptr() and old.is_floating_point():  # else it is a view of an argument
                old.fill_(float("nan"))
        self.recorded += 1

        def again() -> None:
            self.replays += 1
            for old, new in zip(results, run(), strict=True):
                flat(old).copy_(flat(new))

        return results, again


class Copying(Recorder):
    """The same, which fills the inputs of a piece itself, unless the driver `refuses`."""

    refuses = False

    def record_with_copies(self, run: Any, warm: bool, shared: Any, inputs: Mapping[int, Tensor], returned: Any) -> Any:
        for buffer in inputs.values():
            buffer.zero_()  # indices must be valid here, where recording runs something
        results, again = self.record(run, warm)
        assert not returned(results)

        def call(args: list[Tensor]) -> list[Tensor] | None:
            if self.refuses:
                return None
            for k, buffer in inputs.items():
                buffer.copy_(args[k])
            again()
            return []

        return results, call


class Growing(nn.Module):
    """Layers with a cache that is concatenated."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(8, 24) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor, past: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        made = []
        for qkv, out, (k, v) in zip(self.qkv, self.out, zip(past[::2], past[1::2], strict=True), strict=True):
            q, new, value = qkv(F.gelu(x).sin()).chunk(3, -1)
            k, v = torch.cat([k, new]), torch.cat([v, value])
            made += [k, v]
            x = x + out((q @ k.t()).softmax(-1) @ v).cos().relu()
        return self.last(x).sin() * 2, made


def growing(recorder: Recorder, calls: int = 6) -> None:
    model = Growing().eval()
    fast = compiled(model, recorder)
    theirs = ours = [torch.randn(3, 8) for _ in range(4)]
    for _ in range(calls):
        x = torch.randn(1, 8)
        y, theirs = model(x, theirs)
        z, ours = fast(x, ours)
        torch.testing.assert_close(z, y)
        torch.testing.assert_close(ours, theirs)


@torch.no_grad()
@pytest.mark.parametrize("kind", [Recorder, Copying])
def test_what_has_fixed_sizes_is_recorded_around_a_cache_that_grows(kind: type[Recorder]) -> None:
    recorder = kind()
    with recording() as reports:
        growing(recorder)
    assert reports[-1].replay.startswith("replayed, ")
    assert recorder.recorded == 3
    assert recorder.replays == 9, "three calls, each of another length"


@torch.no_grad()
def test_a_driver_that_refuses_a_piece_has_it_run_by_hand() -> None:
    recorder = Copying()
    recorder.refuses = True
    growing(recorder)
    assert recorder.recorded and not recorder.replays


def same_as_eager(fn: Callable[..., Any], recorder: Recorder, *others: Tensor, calls: int = 7) -> None:
    """Compare calls with caches of several lengths, also results that were returned earlier, and see that something was replayed in
    pieces."""
    returned = []
    with recording() as reports:
        fast = compiled(fn, recorder)
        for n in range(6, 6 + calls):
            args = torch.randn(1, 8), torch.randn(n, 8), *others
            returned.append((fast(*args), fn(*args)))
    for ours, theirs in returned:
        torch.testing.assert_close(ours, theirs)
    done, _, every = (reports[-1].replay or "").removeprefix("replayed, ").split()[:3]
    assert int(done) < int(every)
    assert recorder.replays or getattr(recorder, "refuses", False)


@torch.no_grad()
@pytest.mark.parametrize("kind", [Recorder, Copying])
def test_a_view_of_what_a_recorded_piece_has_a_copy_of_is_not_overwritten(kind: type[Recorder]) -> None:
    chain = [Call(f"aten::{name}.default", (Ref(k),), (k + 1,)) for k, name in enumerate(("exp", "sin", "cos", "tanh"), 1)]
    view = Call("aten::view.default", (Ref(2), (2, 4)), (6,))
    specs = dict.fromkeys(range(1, 6), TensorSpec((8,), (1,), torch.float32)) | {6: TensorSpec((2, 4), (4, 1), torch.float32)}
    plan = Plan((1,), (Ref(6), Ref(5)), [*chain, view], [], (), (), specs)
    call = Piecewise(plan, {}, {0, 4}).record(kind(), [torch.randn(8)], (), ())
    given = [torch.randn(8) for _ in range(3)]
    made = [call([x]) for x in given]
    for x, (first, last) in zip(given, made, strict=True):
        torch.testing.assert_close(first, x.exp().view(2, 4))
        torch.testing.assert_close(last, x.exp().sin().cos().tanh())


@torch.no_grad()
@pytest.mark.parametrize("kind", [Recorder, Copying])
def test_a_view_of_a_recorded_result_that_is_made_in_a_short_run_is_not_overwritten(kind: type[Recorder]) -> None:
    def f(x: Tensor, past: Tensor, w: Tensor) -> Any:
        a = (((x @ w) @ w) @ w) @ w
        scores = a @ past.t()
        b = a.as_strided((4, 2), (1, 4))
        return b, a @ w, torch.cat([past, scores.softmax(-1) @ past]), ((x @ w).sin() @ w) @ w

    same_as_eager(f, kind(), torch.randn(8, 8) / 3)


@torch.no_grad()
@pytest.mark.parametrize("kind", [Recorder, Copying])
def test_what_reads_at_a_place_in_the_storage_of_a_called_view_is_called(kind: type[Recorder]) -> None:
    def f(x: Tensor, past: Tensor, w: Tensor) -> Any:
        last = (past * 2)[2:4]
        moved = torch.as_strided(last, (1, 8), (8, 1), 8)  # the second row of what `last` is a view of
        return ((moved @ w) @ w) @ w + x, torch.cat([past, x])

    same_as_eager(f, kind(), torch.randn(8, 8) / 3)


@torch.no_grad()
def test_an_expanded_value_of_a_piece_that_the_driver_refuses() -> None:
    def f(x: Tensor, past: Tensor, w: Tensor) -> Any:
        row = ((x @ w) @ w) @ w
        return (row.expand(4, 8) @ past.t()).softmax(-1) @ past, torch.cat([past, row])

    recorder = Copying()
    recorder.refuses = True
    same_as_eager(f, recorder, torch.randn(8, 8) / 3)


@torch.no_grad()
def test_a_number_that_is_returned_beside_a_recording() -> None:
    def f(x: Tensor, past: Tensor, w: Tensor) -> Any:
        return ((x @ w) @ w) @ w, past.shape[0], (x @ w).sin() @ w

    fast, w = compiled(f, test_inference.Recorder()), torch.randn(8, 8)
    for n in range(4, 9):
        x, past = torch.randn(1, 8), torch.randn(n, 8)
        torch.testing.assert_close(fast(x, past, w), f(x, past, w))

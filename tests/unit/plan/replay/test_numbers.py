"""Replay of plans that are given numbers which differ from call to call: a position, a step of diffusion."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from fusewright.interface import KernelCode, Number
from fusewright.plan.replay import training
from fusewright.report import recording
from fusewright.toolkit.backend.fused import InterpreterLoader
from fusewright.toolkit.ir.ir import Kernel
from tests.unit.plan.replay.test_inference import Backend, Recorder, Small, compiled

MOST = 100


class Numbers(Recorder):
    """A fake recorder that passes numbers of up to `MOST` to the launches that took them while it recorded."""

    now: ClassVar[dict[int, int]] = {}
    """The value of each `Number`, by its identity, in a replay."""

    def __init__(self) -> None:
        super().__init__()
        self.copying, self.given, self.refused = True, list[Mapping[int, Any]](), 0

    def takes_numbers(self) -> bool:
        return True

    def record(self, run: Callable[[], Any], warm: bool, shared: bool = True) -> tuple[Any, Callable[[], None]]:
        with torch.random.fork_rng(devices=()):
            results = run()
        self.recorded += 1

        def again() -> None:
            self.replays += 1
            for old, new in zip(results, run(), strict=True):
                old.copy_(new)

        return results, again

    def record_with_numbers(
        self, run: Callable[[], Any], warm: bool, shared: Any, numbers: Mapping[int, Number]
    ) -> tuple[Any, Callable[[list[Any]], bool]]:
        results, again = self.record(run, warm, shared)
        self.given.append(numbers)

        def passing(args: list[Any]) -> bool:
            if not all(0 <= args[k] <= MOST for k in numbers):
                self.refused += 1
                return False
            Numbers.now = {id(n): args[k] for k, n in numbers.items()}
            again()
            Numbers.now = {}
            return True

        return results, passing

    def record_with_copies(self, run: Any, warm: bool, shared: Any, inputs: Mapping[int, Any], returned: Any) -> Any:
        if not self.copying:
            return None
        results, again = self.record_with_numbers(run, warm, shared, {k: n for k, n in inputs.items() if isinstance(n, Number)})
        out = returned(results)

        def call(args: list[Any]) -> list[torch.Tensor] | None:
            for k, buffer in inputs.items():
                if isinstance(buffer, torch.Tensor):
                    buffer.copy_(args[k])
            return [t.clone() for t in out] if again(args) else None

        return results, call

    def record_written(self, *_: Any) -> None:
        return None


class Loader(InterpreterLoader):
    """The interpreter, whose launches take a replay's numbers."""

    def __call__(self, kernels: Mapping[str, Kernel]) -> Mapping[str, KernelCode]:
        return {h: replace(code, call=passing(code.call)) for h, code in super().__call__(kernels).items()}


def passing(launch: Callable[..., None]) -> Callable[..., None]:
    def again(tensors: Sequence[torch.Tensor], sizes: Sequence[int] = (), scalars: Sequence[Any] = ()) -> None:
        launch(tensors, tuple(Numbers.now.get(id(s), int(s)) for s in sizes), scalars)

    return again


@pytest.fixture(autouse=True)
def numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backend, "loader", Loader())
    monkeypatch.setattr(training, "FEWEST", 3)


class Decoder(torch.nn.Module):
    """A layer with learned positions and a cache, of which each call writes a row and reads those up to it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.positions = Small(), torch.nn.Embedding(64, 8)
        self.register_buffer("cache", torch.zeros(64, 8))

    def forward(self, x: torch.Tensor, p: int) -> torch.Tensor:
        x = self.layer(x + self.positions.weight[p])
        self.cache[p : p + 1] = x
        seen = torch.arange(64) <= p
        return x + (self.cache * seen[:, None]).sum(0)


def diffused(model: Callable[..., Any], x: torch.Tensor, t: int) -> torch.Tensor:
    """A step of diffusion, whose time is embedded."""
    times = torch.full((len(x),), t)
    angles = times[:, None].float() * torch.exp(-torch.arange(8) / 8.0) + 2 * t
    return x - model(x + angles.sin()) / (t + 1)


@pytest.mark.parametrize("copying", [True, False], ids=["copied by the recorder", "copied by torch"])
def test_a_position_that_grows_and_jumps_is_replayed(copying: bool) -> None:
    recorder, model, other = Numbers(), Decoder(), Decoder()
    other.load_state_dict(model.state_dict())
    recorder.copying = copying
    fast = compiled(model, recorder)
    with torch.no_grad(), recording() as reports:
        for p in (3, 4, 5, 6, 16, 40, 2, 63):
            x = torch.randn(1, 8)
            torch.testing.assert_close(fast(x, p), other(x, p))
            torch.testing.assert_close(model.cache, other.cache)
    assert recorder.recorded == 1 and recorder.replays == 5, "the first number is a constant, the next calls load and record"
    assert reports[-1].replay.startswith("replayed")


def test_a_number_that_the_recorder_refuses_runs_the_plain_plan() -> None:
    recorder, model = Numbers(), Small()
    fast = compiled(lambda x, t: diffused(model, x, t), recorder)
    with torch.no_grad():
        for t in (9, 8, 7, 6, MOST + 1, -3, 5):
            x = torch.randn(4, 8)
            torch.testing.assert_close(fast(x, t), diffused(model, x, t))
    assert recorder.refused == 2 and len(recorder.given) == 1 and recorder.replays >= 2


def test_a_number_beside_random_numbers_is_replayed() -> None:
    recorder, model = Numbers(), Small()

    def f(x: torch.Tensor, t: int) -> torch.Tensor:
        return diffused(model, x, t) + torch.randn_like(x) * t

    fast = compiled(f, recorder)
    with torch.no_grad():
        for t in range(9, 3, -1):
            x = torch.randn(4, 8)
            torch.manual_seed(t)
            wanted = f(x, t)
            torch.manual_seed(t)
            torch.testing.assert_close(fast(x, t), wanted)
    assert any(map(len, recorder.given)) and recorder.replays >= 2


def test_a_number_of_a_step_of_training_is_replayed() -> None:
    recorder, model, other = Numbers(), Small(), Small()
    other.load_state_dict(model.state_dict())

    def loss(model: Any, x: torch.Tensor, t: int) -> torch.Tensor:
        return diffused(model, x, t).square().mean() * (t + 1)

    fast, x = compiled(lambda x, t: loss(model, x, t), recorder), torch.randn(4, 8)
    with recording() as reports:
        for t in range(9, 1, -1):
            for m, f in ((model, fast), (other, lambda x, t: loss(other, x, t))):
                m.zero_grad()
                f(x, t).backward()
            for p, q in zip(model.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad)
    assert any(map(len, recorder.given)) and recorder.replays >= 2, [r.replay for r in reports]
    assert [r.replay[:8] for r in reports][-2:] == ["replayed"] * 2, [r.replay for r in reports]


@pytest.mark.parametrize(
    "used",
    [
        lambda x, n: x * min(1.0, n / 10),
        lambda x, n: torch.add(x, x, alpha=n),
        lambda x, n: (x @ x.T).repeat(n, 1),
    ],
    ids=["a float", "a call", "a size of a result"],
)
def test_other_numbers_are_not_taken(used: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    recorder, model = Numbers(), Small()

    def f(x: torch.Tensor, n: int) -> torch.Tensor:
        return used(model(x), n)

    fast = compiled(f, recorder)
    with torch.no_grad():
        for n in range(7, 13):
            x = torch.randn(4, 8)
            torch.testing.assert_close(fast(x, n), f(x, n))
    assert not any(map(len, recorder.given)), "of the first number alone, which is a constant"

"""Replay of training: results are returned without a copy, so nothing is replayed while the caller holds them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusewright import pipeline
from fusewright.capture import capture, layouts
from fusewright.plan.replay import training as replay_of_training
from fusewright.report import recording
from tests.unit.plan.replay.test_inference import OPTIONS, Backend, Recorder, Small, captured, captured_calls


@pytest.fixture(autouse=True)
def small_plans_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_of_training, "FEWEST", 3)


class Forgetful(Recorder):
    """A recorder for training that, like a device's graph, keeps no argument. Its replays compute nothing, so results remain
    those of the recorded call."""

    def record(self, run: Callable[[], Any], warm: bool, shared: bool = True) -> tuple[Any, Callable[[], None]]:
        assert not warm and not shared
        results = run()
        self.recorded += 1

        def again() -> None:
            self.replays += 1

        return results, again


def compiled(model: Any, recorder: Recorder, rewritten: Callable[[Any], Any] = lambda gm: gm) -> Any:
    backend = Backend()
    backend.made = recorder

    def dynamo(gm: Any, inputs: Any) -> Any:
        gm = rewritten(gm)
        return capture.capture(gm, inputs, lambda *a: pipeline.compile_graph(backend, OPTIONS, *a))

    torch._dynamo.reset()
    return torch.compile(model, backend=dynamo)


def step(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().sum()
    loss.backward()
    return loss


def test_forward_and_backward_are_replayed_with_the_right_gradients() -> None:
    torch.manual_seed(0)
    model, recorder, x = Small(), Forgetful(), torch.randn(64, 8)
    step(model, x)
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    fast = compiled(model, recorder)
    with recording() as reports:
        for _ in range(4):
            model.zero_grad(set_to_none=True)
            step(fast, x)
            for p, g in zip(model.parameters(), wanted, strict=True):
                torch.testing.assert_close(p.grad, g)
    assert [r.replay.partition(",")[0] for r in reports] == ["replayed", "replayed"]
    assert recorder.recorded == 2
    assert recorder.replays == 6  # three forward and three backward; the first step is checked


def test_an_operator_that_saves_other_tensors_while_it_is_recorded_is_not_replayed_in_training() -> None:
    captured_calls[:] = [0]  # the second call from here, which is the recorded one, gives another dtype
    recorder, x = Forgetful(), torch.randn(8, 8, requires_grad=True)

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (torch.nn.functional.gelu(x @ x) + x).square(), captured(x.detach() * 2)

    fast = compiled(f, recorder)
    with recording() as reports:
        for _ in range(4):
            fast(x)[0].sum().backward()
    assert reports[0].replay == "not replayed: an operator gives other tensors while it is recorded"


class Capturing(Forgetful):
    """Tells when it records."""

    now = False

    def record(self, run: Callable[[], Any], warm: bool, shared: bool = True) -> tuple[Any, Callable[[], None]]:
        Capturing.now = True
        try:
            return super().record(run, warm, shared)
        finally:
            Capturing.now = False


@torch.library.custom_op("fusewright_tests::traced_as_captured", mutates_args=())
def traced_as_captured(x: torch.Tensor) -> torch.Tensor:
    return x.double() if Capturing.now else x.clone()


@traced_as_captured.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, dtype=torch.float64)


def test_what_was_traced_is_checked_before_a_recording_though_eager_makes_all_of_it() -> None:
    x = torch.randn(8, 8, requires_grad=True)

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.special.i0(torch.special.i0e(x)), traced_as_captured(x.detach())

    fast = compiled(f, Capturing())
    with recording() as reports:
        assert [fast(x)[1].dtype for _ in range(3)] == [torch.float32] * 3
    assert reports[0].count("lowered") == 0
    assert reports[-1].replay == "not replayed: an operator gives other tensors while it is recorded"


@pytest.mark.parametrize("shape", [(64, 8), (512,)], ids=["one value", "a view of it"])
def test_gradients_that_are_equal_do_not_share_memory(shape: tuple[int, ...]) -> None:
    """Autograd takes over a gradient that nobody else holds, so a value that is two gradients must be one tensor."""
    recorder = Forgetful()
    a, b = torch.nn.Parameter(torch.ones(64, 8)), torch.nn.Parameter(torch.ones(shape))
    fast = compiled(lambda x: ((x + a + b.view(64, 8)).sin() @ x.t()).cos(), recorder)
    for _ in range(3):
        a.grad = b.grad = None
        fast(torch.ones(64, 8)).sum().backward()
        assert a.grad is not None and b.grad is not None
        wanted = b.grad.clone()
        torch.testing.assert_close(a.grad, wanted.view(64, 8))
        a.grad.mul_(0.5)  # as `clip_grad_norm_` does, to both
        assert torch.equal(b.grad, wanted)
    assert recorder.replays >= 2


def test_nothing_is_replayed_while_gradients_are_accumulated_or_two_forwards_are_open() -> None:
    torch.manual_seed(0)
    model, recorder, x = Small(), Forgetful(), torch.randn(64, 8)
    fast = compiled(model, recorder)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        step(fast, x)
    once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    step(fast, x)  # adds to gradients in the recording's memory
    for p, g in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(p.grad, 2 * g)
    model.zero_grad(set_to_none=True)
    first, second = fast(x).square().sum(), fast(2 * x).square().sum()
    before = recorder.replays
    (first + second).backward()
    assert recorder.replays >= before
    model.zero_grad(set_to_none=True)
    wanted = step(model, x), step(model, 2 * x)
    torch.testing.assert_close((first.detach(), second.detach()), tuple(w.detach() for w in wanted))


class Working(Forgetful):
    """A recorder whose forward replays compute again, into the memory of their results. To repeat backward, it would have to hold
    the values that forward saved."""

    def record(self, run: Any, warm: bool, shared: bool = True) -> tuple[Any, Callable[[], None]]:
        results, again = super().record(run, warm, shared)
        if not run.func.__self__.copies:
            return results, again
        repeats = iter([lambda: results])  # it ran during recording

        def repeat() -> None:
            again()
            for kept, new in zip(results, next(repeats, run)(), strict=True):
                kept.copy_(new)

        return results, repeat


class Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x).sigmoid())


def test_layers_that_share_a_plan_write_their_own_buffers() -> None:
    torch.manual_seed(0)
    layers, x = [Normed(), Normed()], torch.randn(64, 8)
    with torch.no_grad():
        wanted = [x.mean(0), 2 * x.mean(0)]
    recorder = Working()
    fast = compiled(lambda layer, x: layer(x), recorder)
    for calls in range(1, 6):
        for k, layer in enumerate(layers, 1):
            fast(layer, k * x).sum().backward()
        for layer, mean in zip(layers, wanted, strict=True):
            layer.zero_grad(set_to_none=True)
            torch.testing.assert_close(layer.norm.running_mean, mean * (1 - 0.9**calls))
    assert recorder.recorded > 2 and recorder.replays > 9


class Images(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            *(torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU()) for _ in range(3))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).mean((2, 3))


def test_statistics_of_channels_last_images_are_written_where_they_lie() -> None:
    """The graph rewritten for the layout still distinguishes its buffers from the caller's inputs. A replay increments their
    version, which autograd and folded weights check."""
    torch.manual_seed(0)
    recorder, model, x = Working(), Images(), torch.randn(2, 4, 16, 16)
    eager = copy.deepcopy(model)
    fast = compiled(model, recorder, rewritten=lambda gm: layouts.channels_last(gm) or gm)
    seen = dict.fromkeys(model.buffers(), -1)
    with recording() as reports:
        for _ in range(4):
            for m in (fast, eager):
                m.zero_grad(set_to_none=True)
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    y = m(x)
                y.float().sum().backward()
            for ours, theirs in zip(model.buffers(), eager.buffers(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.01)
                assert ours._version > seen[ours]
                seen[ours] = ours._version
    assert [r.replay.partition(",")[0] for r in reports if r.replay] == ["replayed", "replayed"]
    assert recorder.replays == 6


def test_what_is_no_modules_is_written_where_it_lies() -> None:
    """State held by a closure, which its owner replaces now and then."""
    torch.manual_seed(0)
    linear, recorder, x = torch.nn.Linear(8, 8), Working(), torch.randn(64, 8)

    def forward(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        y = linear(x).sigmoid()
        state.mul_(0.5).add_(y.detach().mean(0))
        return y.tanh() * x

    fast = compiled(forward, recorder)
    with recording() as reports:
        for _ in range(3):
            ours, theirs = torch.zeros(8), torch.zeros(8)
            for _ in range(4):
                linear.zero_grad(set_to_none=True)
                forward(x, theirs)
                fast(x, ours).sum().backward()
                torch.testing.assert_close(ours, theirs)
    assert [r.replay.partition(",")[0] for r in reports if r.replay] == ["replayed", "replayed"]
    assert recorder.replays > 12


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).sigmoid()).tanh() + x


def test_each_layer_of_a_shared_plan_has_its_recording() -> None:
    torch.manual_seed(0)
    layers, recorder = [Layer() for _ in range(5)], Working()
    fast, x = compiled(lambda layer, x: layer(x), recorder), torch.randn(64, 64)
    found: list[int] = []
    for _ in range(8):
        before = recorder.replays
        h = x
        for layer in layers:
            layer.zero_grad(set_to_none=True)
            h = fast(layer, h.detach().requires_grad_())
        del h  # the values saved by all layers live until here
        found.append(recorder.replays - before)
    assert found[-1] == len(layers)


@pytest.mark.parametrize("count", [6, 30])
def test_layers_that_hand_gradients_to_each_other_are_replayed(count: int) -> None:
    """A layer's incoming gradient changes its address at every call until the next layer is replayed; all else is its own."""
    torch.manual_seed(0)
    layers, recorder = [Layer() for _ in range(count)], Working()
    fast, x = compiled(lambda layer, x: layer(x), recorder), torch.randn(64, 64, requires_grad=True)
    found: list[int] = []
    for _ in range(6):
        before = recorder.replays
        h = x
        for layer in layers:
            layer.zero_grad(set_to_none=True)
            h = fast(layer, h)
        h.sum().backward()
        del h
        found.append(recorder.replays - before)
    assert found[-1] == 2 * count


def test_arguments_that_move_are_copied() -> None:
    """The caller's tensors that backward reads change their addresses at every call; all others stay."""
    torch.manual_seed(0)
    layer, recorder = Layer(), Forgetful()
    fast = compiled(lambda x: layer(x), recorder)
    given, gradient = [torch.randn(64, 64) for _ in range(6)], torch.randn(64, 64)
    with recording() as reports:
        for x in given:
            layer.zero_grad(set_to_none=True)
            fast(x).backward(gradient)
    assert [r.replay.partition(",")[0] for r in reports] == ["replayed", "replayed"]
    assert recorder.recorded == 3 and recorder.replays == 2 * (len(given) - 1)


def test_what_the_caller_gets_may_be_written_in_place() -> None:
    torch.manual_seed(0)
    model, x = Normed(), torch.randn(64, 8)
    fast = compiled(model, Working())
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        y = fast(x)
        y[:2] = 0.0
        y.sum().backward()


def test_short_plans_are_not_worth_the_hosts_part_of_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_of_training, "FEWEST", 24)
    recorder, model = Forgetful(), Small()
    with recording() as reports:
        step(compiled(model, recorder), torch.randn(8, 8))
    assert {r.replay for r in reports} == {"not replayed: too few instructions"}


def test_weights_that_move_now_and_then_are_replayed_once_they_stay() -> None:
    """As FSDP2's do while the allocator still gives its gathered weights other memory."""
    torch.manual_seed(0)
    layers, recorder = [Layer() for _ in range(5)], Working()
    fast, x = compiled(lambda layer, x: layer(x), recorder), torch.randn(64, 64)
    found: list[int] = []
    for number in range(24):
        before, h = recorder.replays, x
        for layer in layers:
            layer.zero_grad(set_to_none=True)
            if number in (4, 8):
                for p in layer.parameters():
                    p.data = p.data.clone()
            h = fast(layer, h.detach().requires_grad_())
        del h
        found.append(recorder.replays - before)
    assert found[3] == found[-1] == len(layers)


def test_recordings_that_nobody_uses_become_rare() -> None:
    torch.manual_seed(0)
    layers, recorder = [Layer() for _ in range(2)], Working()
    fast, x = compiled(lambda layer, x: layer(x), recorder), torch.randn(64, 64)
    held: list[torch.Tensor] = []  # so that no address comes again
    for number in range(60):
        for layer in layers:
            if number % 3 == 2:
                for p in layer.parameters():
                    held.append(p.data)
                    p.data = p.data.clone()
            fast(layer, x)
    assert 2 < recorder.recorded < 8

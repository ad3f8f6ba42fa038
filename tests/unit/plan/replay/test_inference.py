"""Memory ownership in replay; a fake recorder replaces a device's graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from fusewright import pipeline
from fusewright.capture import capture
from fusewright.config import Options
from fusewright.interface import Device, TensorSpec
from fusewright.plan.build import Plan
from fusewright.plan.execute import codegen
from fusewright.plan.ir import Call, Instruction, Launch, Ref
from fusewright.plan.replay import copies, inference, obstacles
from fusewright.report import recording
from fusewright.toolkit.backend.fused import FusedBackend, interpreter_loader

OPTIONS = Options.parse({"cache": False, "fallback": "allow"})


class Recorder:
    """A fake recorder that runs the recorded function again, into the results of the first run. `held` and the random generator
    are restored after recording, since a device computes nothing then."""

    device_type = "cpu"

    def __init__(self, held: Sequence[torch.Tensor] = (), times: Sequence[float] = ()) -> None:
        self.current: int | None = 0
        self.recorded = self.replays = 0
        self.held, self.times = held, iter(times)
        self.fault, self.draws = "", False

    def stream(self, device: str) -> int | None:
        return self.current

    def record(self, run: Callable[[], Any], warm: bool) -> tuple[Any, Callable[[], None]]:
        if self.fault:
            raise RuntimeError(self.fault)
        assert warm == (not self.held and not self.draws)
        before = [t.clone() for t in self.held]
        with torch.random.fork_rng(devices=()):
            results = run()
        for t, content in zip(self.held, before, strict=True):
            t.copy_(content)
        self.recorded += 1

        def again() -> None:
            self.replays += 1
            for old, new in zip(results, run(), strict=True):
                copies.flat(old).copy_(copies.flat(new))

        return results, again

    def seconds(self, run: Callable[[], Any]) -> float:
        return next(self.times, 1.0)


class Backend(FusedBackend):
    name, device_type, loader = "replaying", "cpu", interpreter_loader
    made: Recorder

    @classmethod
    def probe(cls) -> Device:
        return Device("cpu", "test")

    def recorder(self) -> Recorder:
        return self.made


def compiled(fn: Any, recorder: Recorder) -> Any:
    backend = Backend()
    backend.made = recorder

    def dynamo(gm: Any, inputs: Any) -> Any:
        return capture.capture(gm, inputs, lambda *a: pipeline.compile_graph(backend, OPTIONS, *a))

    torch._dynamo.reset()
    return torch.compile(fn, backend=dynamo)


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x)) + x
        return x


class Writing(Recorder):
    """A fake recorder that also writes results where a call allocates them, unless it `refuses`."""

    refuses = False

    def record_with_copies(self, *_: Any) -> None:
        return None

    def record_written(self, run: Any, warm: bool, shared: Any, inputs: Any, returned: Any, written: Any) -> Any:
        if self.refuses:
            return None
        results, again = self.record(run, warm)
        small, large = returned(results), written(results)

        def call(args: list[Any]) -> list[torch.Tensor]:
            for k, buffer in inputs.items():
                buffer.copy_(args[k])
            again()
            return [*written(results), *(t.clone() for t in small)]

        return (results, call) if large else None


class Running(Recorder):
    """Like a real recorder, it runs what it measures."""

    def seconds(self, run: Callable[[], Any]) -> float:
        run()
        return 1.0


@torch.library.custom_op("fusewright_tests::captured", mutates_args=())
def captured(x: torch.Tensor) -> torch.Tensor:
    captured_calls.append(0)
    return x.double() if len(captured_calls) > 2 else x.clone()  # first checked, then recorded, then measured unrecorded


captured_calls: list[int] = []


@captured.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.no_grad()
def test_an_operator_that_gives_other_tensors_while_it_is_recorded_is_not_replayed() -> None:
    captured_calls.clear()
    recorder = Running()

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.nn.functional.gelu(x @ x) + x
        return y @ y, captured(x)

    fast, x = compiled(f, recorder), torch.randn(8, 8)
    with recording() as reports:
        fast(x)
        fast(x)
    assert [r.replay for r in reports] == ["not replayed: an operator gives other tensors while it is recorded"]


@torch.no_grad()
def test_results_that_are_kept_are_never_overwritten() -> None:
    model, recorder = Small().eval(), Recorder()
    fast = compiled(model, recorder)
    inputs = [torch.randn(4, 8) for _ in range(5)]
    results = [fast(x) for x in inputs]
    for x, y in zip(inputs, results, strict=True):
        torch.testing.assert_close(y, model(x))
    assert recorder.recorded == 1  # at the second call: the first one is checked
    assert recorder.replays == 4


@torch.no_grad()
def test_large_results_are_made_after_the_replay_in_fresh_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "LARGE", 64)
    model, recorder = Small().eval(), Recorder()
    fast = compiled(model, recorder)
    with recording() as reports:
        results = [fast(torch.full((4, 8), float(k))) for k in range(4)]
    for k, y in enumerate(results):
        torch.testing.assert_close(y, model(torch.full((4, 8), float(k))))
    assert len({y.data_ptr() for y in results}) == 4
    done, _, total = reports[0].replay.removeprefix("replayed, ").split()[:3]
    assert int(done) < int(total)


@torch.no_grad()
def test_weights_are_read_where_they_lie() -> None:
    model, recorder = Small().eval(), Recorder()
    fast, x = compiled(model, recorder), torch.randn(4, 8)
    fast(x), fast(x)
    model.layers[0].weight.mul_(2)
    torch.testing.assert_close(fast(x), model(x))
    assert recorder.recorded == 1
    model.layers[0].weight.data = torch.randn(8, 8)
    torch.testing.assert_close(fast(x), model(x))
    assert recorder.recorded == 2


class Prepares(torch.nn.Module):
    """Constants are prepared from `packed`; `read` is read in place."""

    def __init__(self) -> None:
        super().__init__()
        self.packed, self.read = (torch.nn.Parameter(torch.randn(8, 8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (((x @ (self.packed * 2)).relu() @ self.read).relu() @ self.read).relu() @ self.read


CHANGES: dict[str, Callable[[torch.nn.Module, str], Any]] = {
    "in place": lambda m, name: m.get_parameter(name).add_(1),
    "other data": lambda m, name: setattr(m.get_parameter(name), "data", torch.randn(8, 8)),
    "another parameter": lambda m, name: setattr(m, name, torch.nn.Parameter(torch.randn(8, 8))),
    "load_state_dict": lambda m, name: m.load_state_dict(Prepares().state_dict()),
    "through data": lambda m, name: m.get_parameter(name).data.mul_(3),
}


@pytest.mark.parametrize("name", ["packed", "read"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@torch.no_grad()
def test_the_next_call_sees_a_changed_weight(change: Callable[[torch.nn.Module, str], Any], name: str) -> None:
    model, recorder = Prepares().eval(), Recorder()
    fast, x = compiled(model, recorder), torch.randn(4, 8)
    for _ in range(3):
        torch.testing.assert_close(fast(x), model(x))
    before = recorder.replays
    change(model, name)
    for _ in range(2):
        torch.testing.assert_close(fast(x), model(x))
    assert recorder.replays >= before + 2


@torch.no_grad()
def test_the_next_call_sees_a_weight_that_was_moved_away_and_back() -> None:
    """It has its old address and version, and changed only in elements that are not sampled."""
    model, recorder, memory = Prepares().eval(), Recorder(), bytearray(256)
    model.packed.data = torch.frombuffer(memory, dtype=torch.float32).view(8, 8)
    fast, x = compiled(model, recorder), torch.randn(4, 8)
    for _ in range(3):
        torch.testing.assert_close(fast(x), model(x))
    model.packed.data = torch.ones(8, 8)
    torch.frombuffer(memory, dtype=torch.float32)[1] = 7.0
    model.packed.data = torch.frombuffer(memory, dtype=torch.float32).view(8, 8)
    for _ in range(2):
        torch.testing.assert_close(fast(x), model(x))
    assert recorder.recorded == 2


@torch.no_grad()
def test_layers_that_share_a_plan_each_have_a_recording() -> None:
    recorder = Recorder()
    layers = [Prepares().eval() for _ in range(3)]
    fast, x = compiled(lambda layer, x: layer(x), recorder), torch.randn(4, 8)
    for _ in range(4):
        for layer in layers:
            torch.testing.assert_close(fast(layer, x), layer(x))
    assert recorder.recorded == 3
    layers[1].packed.mul_(2)
    for layer in layers:
        torch.testing.assert_close(fast(layer, x), layer(x))
    assert recorder.recorded == 4


@pytest.mark.parametrize(
    "view",
    [lambda t: t[:, :8], lambda t: t[:8, :8].t(), lambda t: t[0, :8].expand(8, 8), lambda t: t[::2, ::2]],
    ids=["gaps", "transposed", "overlap", "steps"],
)
@torch.no_grad()
def test_inputs_lie_anywhere_in_any_layout(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    recorder = Recorder()

    def f(x: torch.Tensor, scale: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        return ((x @ x.t()).relu() @ x.t()).index_select(0, order).relu() * scale

    fast = compiled(f, recorder)
    for _ in range(4):
        x, scale, order = view(torch.randn(16, 16)), torch.randn(8), torch.randperm(8)
        x = x[:8]
        torch.testing.assert_close(fast(x, scale, order), f(x, scale, order))
    assert recorder.recorded == 1 and recorder.replays == 3


@pytest.mark.parametrize("kind", [Recorder, Running])
@torch.no_grad()
def test_prepared_constants_that_change_are_recorded_anew_and_given_up_when_that_goes_on(kind: type[Recorder]) -> None:
    weight = torch.nn.Parameter(torch.randn(8, 8))
    recorder = kind()

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.mm(torch.mm(torch.mm(x, weight * 2).relu(), weight * 2), weight)

    fast, x = compiled(f, recorder), torch.randn(8, 8)
    for _ in range(8):
        torch.testing.assert_close(fast(x), f(x))
        weight.mul_(1.01)
    assert 1 < recorder.recorded <= 1 + inference.MOST_UNUSED


@torch.no_grad()
def test_inputs_that_are_written_keep_their_addresses() -> None:
    cache = torch.zeros(4, 8)
    recorder = Recorder(held=[cache])

    def f(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        cache.add_(x)
        return (cache.relu() @ cache.T.relu()).relu() @ x

    fast, expected = compiled(f, recorder), torch.zeros(4, 8)
    for k in range(5):
        x = torch.full((4, 8), float(k))
        torch.testing.assert_close(fast(cache, x), f(expected, x))
        torch.testing.assert_close(cache, expected)
    assert recorder.recorded == 1


@torch.no_grad()
def test_results_that_share_memory_still_do() -> None:
    recorder = Recorder()

    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = ((x @ w).relu() @ w).relu() @ w
        return y, y.transpose(0, 1)

    fast = compiled(f, recorder)
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    for _ in range(3):
        y, t = fast(x, w)
        torch.testing.assert_close(y, f(x, w)[0])
        assert t.stride() == (1, 8)
        y.zero_()
        assert not t.any()
    assert recorder.recorded == 1


class Crossing(Recorder):
    """Another thread calls `other` during each replay by the thread that made this, on the stream `then`; `waited` tells whether
    it had to wait for the end of the call."""

    def __init__(self) -> None:
        super().__init__()
        self.other: Callable[[], Any] = lambda: None
        self.then, self.main = 0, threading.get_ident()
        self.threads: list[threading.Thread] = []
        self.waited: list[bool] = []

    def stream(self, device: str) -> int | None:
        return self.current if threading.get_ident() == self.main else self.then

    def record(self, run: Callable[[], Any], warm: bool) -> tuple[Any, Callable[[], None]]:
        results, replay = super().record(run, warm)

        def again() -> None:
            replay()
            if threading.get_ident() == self.main:
                self.threads.append(threading.Thread(target=torch.no_grad()(self.other)))
                self.threads[-1].start()
                self.threads[-1].join(0.2)
                self.waited.append(self.threads[-1].is_alive())

        return results, again


@pytest.mark.parametrize("stream", [0, 1])
@torch.no_grad()
def test_what_a_replay_leaves_for_the_rest_of_its_call_is_read_before_another_thread_replays_on_the_stream(stream: int) -> None:
    recorder, x = Crossing(), torch.randn(4, 8)
    fast, other = compiled(Small().eval(), recorder), compiled(_long, recorder)
    for recorder.current in (0, stream):
        fast(x), fast(x), other(x @ x.T), other(x @ x.T)
    recorder.current, recorder.then, recorder.waited = 0, stream, []
    recorder.other = lambda: other(x @ x.T)
    fast(x)
    for thread in recorder.threads:
        thread.join()
    assert recorder.waited == [stream == 0]


def _reason(fn: Any, *args: Any, recorder: Recorder | None = None) -> str:
    fast = compiled(fn, recorder or Recorder())
    with torch.no_grad(), recording() as reports:
        for _ in range(3):
            fast(*args)
    return reports[0].replay


def _long(x: torch.Tensor) -> torch.Tensor:
    return ((x @ x).relu() @ x).relu() @ x


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda x: (x.t(), _long(x)), "a result may share memory with an input"),
        (lambda x: x @ x, "too few instructions"),
    ],
)
def test_what_stands_in_the_way_is_reported(fn: Any, reason: str) -> None:
    assert reason in _reason(fn, torch.randn(4, 4))


def test_every_replay_draws_what_eager_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, so a large result that is drawn is not moved behind the recording; and once a call, so nothing is measured."""
    monkeypatch.setattr(inference, "LARGE", 64)
    recorder = Running()
    recorder.draws = True
    monkeypatch.setattr(recorder, "seconds", lambda run: pytest.fail("measuring draws"))

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.rand_like(x)
        return noise, torch.nn.functional.dropout(_long(x), 0.5)

    fast, x = compiled(f, recorder), torch.randn(4, 4)
    for seed in range(4):
        torch.manual_seed(seed)
        wanted = f(x), torch.rand(())
        torch.manual_seed(seed)
        torch.testing.assert_close((fast(x), torch.rand(())), wanted)
    assert recorder.recorded == 1 and recorder.replays >= 2


def test_an_index_by_positions_is_recorded_and_one_by_a_mask_is_not() -> None:
    index = Call("aten::index.Tensor", (Ref(1), (None, Ref(2))), (3,))
    assert obstacles._varying(index, {2: TensorSpec((4,), (1,), torch.int64)}) is None
    assert "depends on data" in str(obstacles._varying(index, {2: TensorSpec((4,), (1,), torch.bool)}))


@torch.library.custom_op("other_tests::unsafe", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def unsafe(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@unsafe.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_what_runs_others_code_may_draw_and_is_not_called_after_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may draw without a tag that says so, or call what replays recordings that share memory."""
    monkeypatch.setattr(inference, "LARGE", 0)
    first = [Call("aten::relu.default", (Ref(1),), (2,)), Call("aten::neg.default", (Ref(2),), (3,))]
    specs = dict.fromkeys(range(1, 6), TensorSpec((4,), (1,), torch.float32))

    def ending(target: str) -> Plan:
        rest = [Call("aten::exp.default", (Ref(3),), (4,)), Call(target, (Ref(4),), (5,))]
        return Plan((1,), (Ref(5),), [*first, *rest], [], (), (), specs)

    for target, draws, late in (("aten::abs.default", False, {3}), ("other_tests::unsafe.default", True, set())):
        assert (obstacles.draws(ending(target)), inference._late(ending(target))) == (draws, late)


def test_what_is_tagged_as_unsafe_to_record_is_not() -> None:
    reason = "not replayed: other_tests::unsafe.default is tagged as unsafe to record"
    assert _reason(lambda x: _long(x) + unsafe(x), torch.randn(4, 4)) == reason


def test_what_waits_for_the_device_is_known_by_torch_s_tags() -> None:
    assert "depends on data" in str(obstacles._varying(Call("aten::nonzero.default", (Ref(1),), (2,)), {}))
    assert "depends on data" in str(obstacles._varying(Call("aten::_local_scalar_dense.default", (Ref(1),), (2,)), {}))
    assert "wait" in str(obstacles._varying(Call("aten::_linalg_eigh.default", (Ref(1),), (2, 3), packed=True), {}))
    assert "wait" in str(obstacles._varying(Call("aten::linalg_pinv.atol_rtol_tensor", (Ref(1),), (2,)), {}))
    assert obstacles._varying(Call("aten::linalg_vector_norm.default", (Ref(1),), (2,)), {}) is None
    assert obstacles._varying(Call("aten::relu.default", (Ref(1),), (2,)), {}) is None


def test_attention_that_drops_nothing_draws_nothing() -> None:
    flash = "aten::_scaled_dot_product_flash_attention.default"
    for dropout, draws in (((), False), ((0.0, True), False), ((0.5,), True)):
        assert obstacles.says_it_draws(Call(flash, (Ref(1), Ref(1), Ref(1), *dropout), (2,))) == draws


def test_a_recording_that_fails_or_is_slower_leaves_the_plain_plan() -> None:
    broken = Recorder()
    broken.fault = "operation not permitted when stream is capturing\nmore"
    assert _reason(_long, torch.randn(4, 4), recorder=broken).endswith("not permitted when stream is capturing")
    assert "it is slower" in _reason(_long, torch.randn(4, 4), recorder=Recorder(times=[1.0, 2.0]))


@torch.no_grad()
def test_inside_another_recording_the_plain_plan_runs() -> None:
    recorder = Recorder()
    fast, x = compiled(_long, recorder), torch.randn(4, 4)
    fast(x)
    recorder.current = None
    torch.testing.assert_close(fast(x), _long(x))
    assert recorder.recorded == 0
    for recorder.current in (1, 2, 1):  # each stream has its own recording
        torch.testing.assert_close(fast(x), _long(x))
    assert recorder.recorded == 2


def _on_a_device(*instructions: Instruction, given: int | None = None, outputs: tuple[int, ...] = (9,)) -> Plan:
    """A plan on a GPU: value 1 is its input, 2 a constant on the host, 3 to 5 single elements on the host, 7 and up on the GPU."""
    host, gpu = TensorSpec((), (), torch.float32), TensorSpec((4,), (1,), torch.float32, "cuda:0")
    specs = dict.fromkeys((2, 3, 4, 5), host) | dict.fromkeys((1, 7, 8, 9), gpu)
    inputs = (1,) if given is None else (1, given)
    return Plan(inputs, tuple(map(Ref, outputs)), list(instructions), [], (), (2,) if given != 2 else (), specs)


_SCALE = Call("aten::div.Tensor", (Ref(1), Ref(3)), (7,))
_REST = (Call("aten::relu.default", (Ref(7),), (8,)), Call("aten::neg.default", (Ref(8),), (9,)))
_ROOT = Call("aten::sqrt.default", (Ref(2),), (3,))


def test_scalars_on_the_host_that_are_constant_do_not_stand_in_the_way() -> None:
    made = Call("aten::scalar_tensor.default", (8.0,), (3,), kwargs=(("dtype", torch.float32),))
    for first in (_ROOT, made):
        plan = _on_a_device(first, _SCALE, *_REST)
        assert obstacles.obstacle(plan, "cuda") is None
        assert obstacles.obstacle(plan, "cuda", training=True) is None
        assert obstacles.host_scalars(plan) == {2, 3}


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (_on_a_device(_ROOT, _SCALE, *_REST, given=2), "an input may change"),
        (_on_a_device(_ROOT, _SCALE, *_REST, outputs=(9, 3)), "a result is the caller's"),
        (_on_a_device(_ROOT, Launch("k", (Ref(1), Ref(3)), (7,)), *_REST), "a kernel takes addresses"),
        (_on_a_device(_ROOT, Call("aten::_to_copy.default", (Ref(3),), (7,)), *_REST), "a copy takes an address"),
        (_on_a_device(Call("aten::rand.default", ([],), (3,)), _SCALE, *_REST), "chance is drawn once"),
        (_on_a_device(_ROOT, Call("aten::add_.Scalar", (Ref(3), 1.0), (4,)), _SCALE, *_REST), "what is written is no constant"),
        (_on_a_device(Call("aten::_to_copy.default", (Ref(1),), (3,)), _SCALE, *_REST), "it is made of what is on the device"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_other_values_on_the_host_do(plan: Plan, why: str) -> None:
    assert obstacles.obstacle(plan, "cuda", training=True) == "a tensor is on cpu", why


_DRAWN = (Call("aten::rand.default", ([],), (3,)), Call("aten::lt.Scalar", (Ref(3), 0.1), (4,)))


@pytest.mark.parametrize("outputs", [(9,), (9, 3), (4, 9)])
def test_numbers_drawn_on_the_host_are_drawn_beside_a_recording(outputs: tuple[int, ...]) -> None:
    """As LayerDrop does where nothing is dropped. Measuring and recording draw nothing."""
    plan = _on_a_device(_DRAWN[0], Call("aten::exp.default", (Ref(1),), (7,)), _DRAWN[1], *_REST, outputs=outputs)
    device = {v: replace(s, device="meta") if s.device != "cpu" else s for v, s in plan.specs.items()}
    plan, recorder = replace(plan, specs=device, prepare_outputs=()), Running()
    recorder.device_type = "meta"
    fast = inference.replayed(plan, {}, codegen.load(plan, {}), recorder, lambda said: None)
    assert isinstance(fast, inference.Replayed)
    torch.manual_seed(0)
    results = [fast([torch.empty(4, device="meta")]) for _ in range(3)]
    after = torch.rand(())
    torch.manual_seed(0)
    drawn = [torch.rand(()) for _ in results]
    torch.testing.assert_close(after, torch.rand(()))
    assert recorder.recorded == 1 and not fast.given_up
    for made, number in zip(results, drawn, strict=True):
        expected = {3: number, 4: number < 0.1}
        for value, result in zip(outputs, made, strict=True):
            assert result.is_meta if value == 9 else torch.equal(result, expected[value])


def test_what_a_device_reads_is_not_drawn_beside_it() -> None:
    assert obstacles.drawn_on_host(_on_a_device(_DRAWN[0], _SCALE, *_REST), "cuda") == set()
    assert obstacles.drawn_on_host(_on_a_device(_DRAWN[0], *_REST), "cpu") == set(), "it is the device itself"
    assert obstacles.drawn_on_host(_on_a_device(_ROOT, *_REST), "cuda") == set(), "nothing is drawn"


def counting(used: Callable[[torch.Tensor, int], torch.Tensor]) -> tuple[Recorder, Any]:
    """Call a model six times with a number that grows, as the caches of sliding windows count tokens."""
    model, recorder = Small(), Recorder()

    def f(x: torch.Tensor, n: int) -> tuple[Any, ...]:
        return model(x), n, used(x, n).relu(), 2 * n + 1

    fast = compiled(f, recorder)
    with torch.no_grad(), recording() as reports:
        for n in range(7, 13):
            x = torch.randn(4, 8)
            torch.testing.assert_close(fast(x, n), f(x, n))
    return recorder, reports[-1].replay


def test_numbers_that_only_numbers_are_made_of_are_computed_beside_a_recording() -> None:
    recorder, said = counting(lambda x, n: x @ x.T)
    assert recorder.recorded == 1 and recorder.replays >= 2 and said.startswith("replayed"), said


@pytest.mark.parametrize(
    "used",
    [lambda x, n: x * n, lambda x, n: x + torch.arange(8) * (2 * n + 1), lambda x, n: torch.add(x, x, alpha=n)],
    ids=["a kernel", "what is made of it", "a call"],
)
def test_what_reads_a_number_that_varies_is_not_recorded(used: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    recorder, said = counting(used)
    assert not recorder.replays and said == "not replayed: an input is a number", said


def test_a_constant_scalar_that_changes_is_recorded_anew() -> None:
    module, recorder = torch.nn.Module(), Recorder()
    module.scale = torch.nn.Parameter(torch.tensor(4.0), requires_grad=False)
    module.forward = lambda x: torch.relu(x @ x / torch.sqrt(module.scale)) @ x
    fast, x = compiled(module, recorder), torch.randn(4, 4)
    with torch.no_grad():
        for call in range(6):
            if call == 3:
                module.scale.fill_(9.0)
            torch.testing.assert_close(fast(x), module(x))
    assert recorder.recorded == 2 and recorder.replays >= 2


@pytest.mark.parametrize("refuses", [False, True])
@torch.no_grad()
def test_large_results_are_written_by_the_recording_beside_small_ones(refuses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the plan's results, of which the middle one is small. The last input is read by the tail alone."""
    monkeypatch.setattr(inference, "LARGE", 1 << 12)
    made = Writing()
    made.refuses = refuses
    model = Small()

    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        small = model(x)
        large = small.sum() + y
        return large.sin(), small, large @ y

    fast, kept = compiled(f, made), []
    with recording() as reports:
        for _ in range(4):
            x, y = torch.randn(4, 8), torch.randn(64, 64)
            kept.append((fast(x, y), f(x, y)))
    for found, wanted in kept:
        torch.testing.assert_close(found, wanted)
    assert made.recorded == 1 and made.replays >= 3
    said = reports[0].replay.split()
    assert (said[1] == said[3]) is not refuses, reports[0].replay


@pytest.mark.parametrize(
    ("limit", "most"), [("MOST_WRITTEN", 1 << 13), ("MOST_COPIED", 1 << 12)],
    ids=["too large to record twice", "of a large input that only they read"],
)  # fmt: skip
@torch.no_grad()
def test_some_large_results_are_made_after_the_replay(monkeypatch: pytest.MonkeyPatch, limit: str, most: int) -> None:
    monkeypatch.setattr(inference, "LARGE", 1 << 12)
    monkeypatch.setattr(inference, limit, most)
    made, model = Writing(), Small()
    fast = compiled(lambda x, y: model(x).sum() + y, made)
    with recording() as reports:
        for _ in range(3):
            x, y = torch.randn(4, 8), torch.randn(64, 64)
            torch.testing.assert_close(fast(x, y), model(x).sum() + y)
    said = reports[0].replay.split()
    assert said[0] == "replayed," and said[1] != said[3]

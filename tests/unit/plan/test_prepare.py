"""Prepacked constants follow their weights: packed once, again after any change that torch notices, freed with them."""

from __future__ import annotations

import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusewright import report
from fusewright.plan import execute
from fusewright.plan.execute.prepare import LIMIT, PreparedCache


def doubled(*weights: Tensor) -> tuple[Tensor, ...]:
    return tuple(w * 2 for w in weights)


def test_packs_once() -> None:
    w = torch.ones(3)
    cache = PreparedCache(doubled)
    first = cache(w)
    assert cache(w) is first
    assert cache.runs == 1


def test_changes_are_seen() -> None:
    layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
    cache = PreparedCache(doubled)

    def change_in_place() -> None:
        with torch.no_grad():
            layer.weight.add_(1)

    def set_data() -> None:
        layer.weight.data = torch.full((2, 2), 5.0)

    for change in (
        change_in_place,
        lambda: layer.load_state_dict(other.state_dict()),
        set_data,
        lambda: nn.init.zeros_(layer.weight),
        lambda: layer.weight.data.mul_(2).add_(1),
        lambda: layer.weight.data.copy_(other.weight.data + 3),
        lambda: torch.optim.SGD(layer.parameters(), lr=1.0).step(),
    ):
        layer.weight.grad = torch.ones(2, 2)
        cache(layer.weight)
        change()
        assert torch.equal(cache(layer.weight)[0], layer.weight * 2)


def at(memory: bytearray) -> Tensor:
    """Make a new 3x3 tensor in this memory, at the same address each time."""
    return torch.frombuffer(memory, dtype=torch.float32).view(3, 3)


def test_memory_that_gets_the_address_of_what_was_freed_is_seen() -> None:
    memory = bytearray(36)
    w = nn.Parameter(at(memory))
    cache = PreparedCache(doubled)
    before, address, version = cache.prepared([w]), w.data_ptr(), w._version
    w.data = torch.ones(3, 3)
    memory[4:8] = b"\0\0\x80\x3f"  # 1.0, in an element that is not sampled
    w.data = at(memory)
    assert (w.data_ptr(), w._version) == (address, version) and w[0, 1] == 1
    assert not before.holds([w])
    assert torch.equal(cache(w)[0], w * 2)


def test_what_was_made_of_a_weight_is_freed_when_its_memory_is() -> None:
    """For example, `model.cpu()` frees a GPU's weights."""
    layer = nn.Linear(3, 3)
    cache = PreparedCache(doubled)
    packed = weakref.ref(cache(layer.weight)[0])
    layer.to(torch.float64)
    assert packed() is None


def test_the_end_of_older_memory_leaves_what_was_made_since() -> None:
    w = nn.Parameter(torch.ones(3))
    cache, older = PreparedCache(doubled), w.data
    first = cache.prepared([w])  # kept as by a recording
    w.data = torch.zeros(3)
    packed = cache(w)
    del older
    assert cache(w) is packed and not first.alive


def test_each_instance_has_its_own() -> None:
    a, b = torch.ones(3), torch.zeros(3)
    cache = PreparedCache(doubled)
    for _ in range(3):
        assert cache(a)[0].tolist() == [2, 2, 2]
        assert cache(b)[0].tolist() == [0, 0, 0]
    assert cache.runs == 2


def test_one_change_packs_one_instance_again() -> None:
    a, b = torch.ones(3), torch.zeros(3)
    cache = PreparedCache(doubled)
    kept = cache(b)
    cache(a)
    a.add_(1)
    assert cache(a)[0].tolist() == [4, 4, 4]
    assert cache(b) is kept
    assert cache.runs == 3


@pytest.mark.parametrize(
    "prepare",
    [doubled, lambda w: (w.t(),), lambda w: (w.view(-1), w.detach())],
    ids=["copy", "view", "views"],
)
def test_dies_with_its_weights(prepare: Any) -> None:
    w = torch.ones(3, 3)
    cache = PreparedCache(prepare)
    packed = [weakref.ref(t) for t in cache(w)]
    weight = weakref.ref(w)
    del w
    gc.collect()
    assert weight() is None, "what was packed keeps its weight alive"
    assert [p() for p in packed] == [None] * len(packed)


def test_what_was_made_of_a_dead_weight_holds_for_nobody() -> None:
    w = torch.ones(3)
    found = PreparedCache(doubled).prepared([w])
    assert found.holds([w])
    w.add_(1)
    assert not found.holds([w])
    found = PreparedCache(doubled).prepared([w])
    del w
    assert not found.alive, "a new tensor may get the id of the dead one"


def test_nothing_that_a_capture_computes_later_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a user captures a model, its constants become part of the capture, which follows the weights as eager's does."""
    now = [True]
    monkeypatch.setattr(execute.prepare, "_capturing", lambda weights: lambda: now[0])
    w = torch.ones(3)
    cache = PreparedCache(doubled)
    assert cache(w) is not cache(w), "the first calls are captured"
    now[0] = False
    kept = cache.prepared([w])
    assert cache.prepared([w]) is kept
    now[0] = True
    assert cache.prepared([w]) is not kept, "its memory is freed with the weights, the capture is not"
    now[0] = False
    assert cache.prepared([w]) is kept


def test_constants_are_computed_before_another_stream_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    module = SimpleNamespace(current_stream=lambda d: SimpleNamespace(synchronize=lambda: waited.append(d)))
    monkeypatch.setattr(torch, "meta", module, raising=False)
    w = torch.ones(3)
    cache = PreparedCache(lambda w: (w.to("meta"), w * 2, 3))
    cache(w), cache(w)
    assert waited == [torch.device("meta")]


def test_packing_is_not_recorded_by_autograd() -> None:
    w = torch.ones(3, requires_grad=True)
    assert not PreparedCache(doubled)(w)[0].requires_grad


def test_old_sets_are_dropped() -> None:
    weights = [torch.full((1,), float(i)) for i in range(LIMIT + 5)]
    cache = PreparedCache(doubled)
    for w in weights:
        cache(w)
    assert cache(weights[-1])[0].item() == 2 * (LIMIT + 4)
    assert cache.runs == LIMIT + 5
    assert cache(weights[0])[0].item() == 0
    assert cache.runs == LIMIT + 6


def test_a_failed_packing_is_tried_again() -> None:
    broken = True

    def prepare(w: Tensor) -> tuple[Tensor, ...]:
        if broken:
            raise MemoryError
        return (w + 1,)

    w = torch.zeros(1)
    cache = PreparedCache(prepare)
    with pytest.raises(MemoryError):
        cache(w)
    broken = False
    assert cache(w)[0].item() == 1


def test_threads_get_right_values() -> None:
    weights = [torch.full((4,), float(i)) for i in range(4)]
    cache = PreparedCache(doubled)
    wrong: list[int] = []

    def work(k: int) -> None:
        for n in range(50):
            i = (k + n) % 4
            if cache(weights[i])[0][0].item() != 2 * i:
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


# ---------------------------------------------------------------- through torch.compile


class _Scaled(nn.Module):
    """`weight * 2 + 1` depends only on the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight * 2 + 1).t() + self.shift.exp()


@pytest.fixture
def compiled(fresh_dynamo: None) -> tuple[_Scaled, Any]:
    model = _Scaled()
    return model, torch.compile(model, backend="fusewright_null")


X = torch.arange(6.0).view(2, 3)


def test_the_plan_prepares_what_depends_on_weights_only(compiled: tuple[_Scaled, Any]) -> None:
    _, fn = compiled
    with torch.no_grad(), report.recording() as reports:
        fn(X)
    prepare, run = reports[0].texts["plan"].split("def run")
    assert prepare.count("aten_mul") == 1 and prepare.count("aten_exp") == 1
    assert "aten_mul" not in run and "aten_exp" not in run


def test_the_next_call_sees_changed_weights(compiled: tuple[_Scaled, Any]) -> None:
    model, fn = compiled
    other = _Scaled()
    with torch.no_grad():
        for change in (
            lambda: model.weight.mul_(3),
            lambda: model.shift.add_(1),
            lambda: model.load_state_dict(other.state_dict()),
            lambda: setattr(model.weight, "data", torch.eye(3)),
            lambda: model.weight.data.mul_(2),
            lambda: setattr(model, "weight", nn.Parameter(torch.eye(3) * 4)),
        ):
            torch.testing.assert_close(fn(X), model(X), rtol=0, atol=0)
            change()
            torch.testing.assert_close(fn(X), model(X), rtol=0, atol=0)


def test_changed_weights_are_seen_where_the_user_skips_guards_of_modules(fresh_dynamo: None) -> None:
    model, other = _Scaled(), _Scaled()
    skip = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
    fn = torch.compile(model, backend="fusewright_null", options=skip)
    with torch.no_grad():
        for change in (
            lambda: model.weight.mul_(3),
            lambda: model.load_state_dict(other.state_dict()),
            lambda: setattr(model.weight, "data", torch.eye(3)),
            lambda: setattr(model, "weight", nn.Parameter(torch.eye(3) * 4)),
        ):
            torch.testing.assert_close(fn(X), model(X), rtol=0, atol=0)
            change()
            torch.testing.assert_close(fn(X), model(X), rtol=0, atol=0)


def test_training_steps_between_evaluations(compiled: tuple[_Scaled, Any]) -> None:
    model, fn = compiled
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        with torch.no_grad():
            torch.testing.assert_close(fn(X), model(X), rtol=0, atol=0)
        fn(X).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_constant_that_is_returned_is_not_shared_between_calls(fresh_dynamo: None) -> None:
    w = nn.Parameter(torch.ones(3))

    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = w

        def forward(self, x: Tensor) -> Any:
            doubled = self.w * 2
            return doubled, doubled.view(3, 1), torch.arange(3), torch.ones(3).view(3, 1), x + torch.arange(3)

    fn = torch.compile(Returns(), backend="fusewright_null")
    with torch.no_grad():
        wanted = [t.clone() for t in fn(torch.zeros(3))]
        for t in fn(torch.zeros(3)):
            t.add_(100)
        for again, first in zip(fn(torch.zeros(3)), wanted, strict=True):
            assert torch.equal(again, first)

"""Eager beside a plan leaves no trace: copies of what it writes, generators put back, memory asked for."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fusewright import machine
from fusewright.plan.execute import shadow
from fusewright.plan.execute.shadow import Eager, TooLong, Unfit, peak_bytes, why_not

aten = torch.ops.aten


def traced(f: Any, *args: Any) -> GraphModule:
    return make_fx(f, tracing_mode="fake")(*args)


def nothing() -> None:
    pass


def test_what_it_writes_is_a_copy_with_the_same_memory() -> None:
    whole = torch.arange(24.0).view(4, 6)
    part, same = whole[1:, ::2], whole[1:, ::2].t()
    seen: list[Any] = []

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x[0].add_(1)
        y.mul_(2)
        return x + y.t()

    eager = Eager(traced(f, part.clone(), same.clone()))
    before = whole.clone()
    given = eager._with_copies([part, same])
    seen += given
    assert [t.stride() for t in seen] == [part.stride(), same.stride()]
    assert [t.storage_offset() for t in seen] == [part.storage_offset(), same.storage_offset()]
    assert seen[0].data_ptr() == seen[1].data_ptr() != part.data_ptr(), "inputs that share memory still do"
    args = [part, same]
    assert eager.seconds(args, math.inf, nothing) > 0
    assert torch.equal(whole, before) and len(args) == 2 and part._version == whole._version == 0


def test_generators_of_devices_that_no_argument_is_on_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[set[str]] = []
    monkeypatch.setattr(shadow, "generators", lambda devices: asked.append(devices) or nothing)
    eager = Eager(traced(lambda x: (x + 1, torch.rand(3, device="meta")), torch.ones(3)))
    eager.seconds([torch.ones(3)], math.inf, nothing)
    assert asked == [{"meta"}]


def test_random_numbers_are_put_back_even_if_it_is_stopped() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = x + torch.rand_like(x)
        return x

    eager, state = Eager(traced(f, torch.zeros(3))), torch.get_rng_state()
    assert eager.seconds([torch.zeros(3)], math.inf, nothing) > 0
    assert torch.equal(state, torch.get_rng_state())
    with pytest.raises(TooLong):
        eager.seconds([torch.zeros(3)], -1.0, nothing)
    assert torch.equal(state, torch.get_rng_state())
    args = [torch.zeros(3)]
    assert eager.run(args)[0].shape == () and not args
    assert not torch.equal(state, torch.get_rng_state()), "the caller's own run draws"


def test_what_is_stopped_says_how_far_it_came_and_how_long_the_part_took_that_had_run_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 1
        return now[0]

    def f(x: torch.Tensor) -> torch.Tensor:
        for _ in range(32):
            x = x.sin()
        return x

    monkeypatch.setattr(shadow, "clock", clock)
    eager, stopped = Eager(traced(f, torch.zeros(3))), list[tuple[float, float]]()
    for limit, before in ((1.5, 0.0), (2.5, 4 / 32), (2.5, 8 / 32)):
        with pytest.raises(TooLong) as error:
            eager.seconds([torch.zeros(3)], limit, nothing, before)
        stopped.append((error.value.done * 32, error.value.warm))
    assert stopped == [(4, 0.0), (8, 2.0), (8, 3.0)], "there are looks after 2, 4, 8, 16 and 24 calls, a second apart"


def test_a_graph_that_needs_much_memory_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = traced(lambda x: (x * 2).relu().sum(), torch.zeros(1 << 16))
    assert peak_bytes(gm.graph) == 2 * 4 * (1 << 16)
    monkeypatch.setattr(shadow, "LITTLE", 0)
    monkeypatch.setattr(shadow, "free_bytes", lambda device: 3 * peak_bytes(gm.graph) // 2)
    with pytest.raises(Unfit):
        Eager(gm).seconds([torch.zeros(1 << 16)], math.inf, nothing)
    monkeypatch.setattr(shadow, "free_bytes", lambda device: 2 * peak_bytes(gm.graph))
    assert Eager(gm).seconds([torch.zeros(1 << 16)], math.inf, nothing) > 0


def test_freed_memory_is_not_read() -> None:
    """Eager's kernels would crash; the plan says so."""
    gm, freed = traced(lambda x: x.exp() + 1, torch.zeros(3)), torch.zeros(3)
    freed.untyped_storage().resize_(0)
    with pytest.raises(Unfit, match="no memory"):
        Eager(gm).seconds([freed], math.inf, nothing)
    gm.register_buffer("held", freed)
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.call_function(aten.exp.default, (gm.graph.get_attr("held"),))
    with pytest.raises(Unfit, match="no memory"):
        Eager(gm).seconds([torch.zeros(3)], math.inf, nothing)


def test_free_memory_is_limited_by_the_control_group(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable:   8000 kB\n")
    assert machine.free_memory(meminfo, tmp_path) == 8000 << 10
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.free_memory(meminfo, tmp_path) == 8000 << 10
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("4000\n")
    (tmp_path / "memory.stat").write_text("anon 3500\nfile 500\nfile_mapped 7\n")
    assert machine.free_memory(meminfo, tmp_path) == 1500
    meminfo.write_text("nothing\n")
    assert machine.free_memory(meminfo, tmp_path) == 0
    assert machine.free_memory() > 0


def test_graphs_with_other_effects_have_no_shadow() -> None:
    x = torch.zeros(3)
    assert why_not(traced(lambda x: torch.dropout(x, 0.5, True).add_(1), x).graph) == ""
    held = torch.zeros(3)
    gm = traced(lambda x: x + 1, x)
    gm.register_buffer("held", held)
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.call_function(aten.add_.Tensor, (gm.graph.get_attr("held"), 1))
    assert "holds" in why_not(gm.graph)
    assert "effects" in why_not(_calling(torch.manual_seed))
    assert "effects" in why_not(_calling(torch.ops.higher_order.cond))
    with torch.library._scoped_library("shadow_test", "DEF") as lib:
        lib.define("f(Tensor x) -> Tensor")
        assert "effects" in why_not(_calling(torch.ops.shadow_test.f.default))
    assert "calls" in why_not(_calling(torch.ops._c10d_functional.wait_tensor.default))


def _calling(target: Any) -> Graph:
    graph = Graph()
    graph.output(graph.call_function(target, (graph.placeholder("x"),)))
    return graph


def test_eager_has_room_if_twice_of_what_was_ever_used_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not shadow.has_room("cpu") or machine.most_memory() > 0
    monkeypatch.setattr(machine, "free_memory", lambda: 200)
    monkeypatch.setattr(machine, "most_memory", lambda: 100)
    assert shadow.has_room("cpu")
    monkeypatch.setattr(machine, "most_memory", lambda: 101)
    assert not shadow.has_room("cpu")
    device = SimpleNamespace(max_memory_allocated=lambda d: 60, mem_get_info=lambda d: (90, 300))
    device.memory_reserved, device.memory_allocated = lambda d: 50, lambda d: 20
    monkeypatch.setattr(torch, "get_device_module", lambda d: device)
    assert shadow.has_room("cuda:0"), "90 free and 30 kept by torch"
    device.max_memory_allocated = lambda d: 61
    assert not shadow.has_room("cuda:0")
    device = SimpleNamespace(synchronize=lambda: None)  # it uses the host's memory, of which nobody counts its own
    assert not shadow.has_room("mps")

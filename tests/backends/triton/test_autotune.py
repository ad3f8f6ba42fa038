"""`options={"autotune": True}`: what is measured, what is remembered, and what happens when memory runs out.

No device is needed: candidates take the time that a test sets, on the clock of `fusewright.cache.tune`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch

from fusewright.cache import tune as measuring
from fusewright.cache.tune import Tuner
from fusewright.errors import OptionError
from fusewright.interface import Device
from fusewright.toolkit.ir import Builder, Kernel, interpret, structural_hash
from fusewright_triton import autotune
from fusewright_triton.autotune import Stopped, candidates, name_of, stand_ins, tune
from fusewright_triton.backend import NvidiaTriton, RocmTriton, TritonLoader
from fusewright_triton.emit import schedule
from fusewright_triton.emit.schedule import Config
from fusewright_triton.runtime import compile_kernels
from fusewright_triton.target import AMD, NVIDIA, Target
from tests.backends.triton import kernels
from tests.kernels import cumsum, layer_norm

H100 = NVIDIA["sm_90"]
SHAPES = {
    "pointwise": kernels.add_gelu(1 << 24),
    "row in registers": kernels.layer_norm(8192, 1024),
    "long row": kernels.softmax(64, 1 << 20),
    "columns": kernels.column_sum(),
    "transpose": kernels.transpose(),
    "symbolic": kernels.softmax(4096, kernels.symbol("n")),
}


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Replace the clock by a list of one element, which candidates advance."""
    now = [0.0]
    monkeypatch.setattr(measuring, "clock", lambda: now[0])
    monkeypatch.setattr(measuring, "_doubtful", {})
    yield now


@pytest.fixture
def tuner(request: pytest.FixtureRequest) -> Tuner:
    return Tuner(request.node.name)


def trials(clock: list[float], seconds: Callable[[Config], float]) -> Any:
    """Return a class of trials whose runs take `seconds`; its exceptions are raised when a candidate is made."""

    class Fake:
        made: ClassVar[list[str]] = []

        def __init__(self, kernel: Kernel, configs: Sequence[Config], target: Target) -> None:
            self.configs = configs

        def maker(self, k: int) -> Callable[[], Callable[[], None]]:
            def make() -> Callable[[], None]:
                took = seconds(self.configs[k])
                self.made.append(name_of(self.configs[k]))

                def run() -> None:
                    clock[0] += took

                return run

            return make

    return Fake


def by_hash(kernel: Kernel) -> Mapping[str, Kernel]:
    return {structural_hash(kernel): kernel}


def tuned(kernel: Kernel, tuner: Tuner, fake: Any) -> tuple[Config, str]:
    found = tune(by_hash(kernel), H100, tuner.choose, fake)
    (how,), (note,) = found.configs.values(), found.notes.values()
    return how, note


# ---------------------------------------------------------------- the list


@pytest.mark.parametrize("target", [H100, AMD["gfx942"]], ids=lambda t: t.arch)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_list_is_short_and_begins_with_the_formula(shape: str, target: Target) -> None:
    formula = schedule.choose(SHAPES[shape], target)
    found = candidates(SHAPES[shape], formula, target)
    assert found[0] == formula
    assert 4 <= len(set(found)) == len(found) <= autotune.MOST
    assert len({name_of(c) for c in found}) == len(found)
    assert all(c.warps * target.lanes <= 1024 for c in found)


def test_long_rows_vary_in_what_is_shared_and_in_what_is_held() -> None:
    """Rows of 50257 are neither short nor long: holding them and reading them in steps are both tried."""
    found = candidates(kernels.softmax(64, 50257), schedule.choose(kernels.softmax(64, 50257), H100), H100)
    assert {c.persistent for c in found} == {True, False}
    found = candidates(SHAPES["long row"], schedule.choose(SHAPES["long row"], H100), H100)
    assert len({c.split for c in found}) > 1


@pytest.mark.parametrize("target", [H100, AMD["gfx942"]], ids=lambda t: t.arch)
@pytest.mark.parametrize(
    "kernel",
    [SHAPES["long row"], SHAPES["symbolic"], kernels.softmax(64, 32000), layer_norm(4096, 70000, "bf16")],
    ids=["long row", "symbolic", "held", "moments"],
)
def test_lanes_combine_what_they_hold_in_every_candidate(kernel: Kernel, target: Target) -> None:
    """With more, lanes would exchange elements in each step; with less, they would rescale more often."""
    found = candidates(kernel, schedule.choose(kernel, target), target)
    stepping = [c for c in found if not c.persistent and all(t.block == 1 for t in c.tiles)]
    assert len({c.warps for c in stepping}) > 1
    assert all(c.each == max(1, c.row // (c.warps * target.lanes)) for c in stepping)
    assert all(c.each == 1 for c in found if c not in stepping)


def test_lanes_scan_no_more_than_they_hold_in_any_candidate() -> None:
    kernel = cumsum(4096, 32768)
    formula = schedule.choose(kernel, H100)
    found = [c for c in candidates(kernel, formula, H100) if not c.persistent and all(t.block == 1 for t in c.tiles)]
    assert formula.each > 1 and len(found) > 3 and all(c.each == max(1, min(formula.each, c.row // (c.warps * 32))) for c in found)


@pytest.mark.parametrize("shape", ["pointwise", "row in registers", "columns"])
def test_every_candidate_computes_the_same(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpret a small kernel of the shape in each configuration."""
    small = {
        "pointwise": kernels.add_gelu(3000),
        "row in registers": kernels.layer_norm(5, 300),
        "columns": kernels.column_sum(70, 40),
    }[shape]
    tensors = stand_ins(small, "cpu")
    expected = [t.clone() for t in tensors]
    interpret(small, expected)
    for how in candidates(small, schedule.choose(small, H100), H100)[:6]:
        monkeypatch.setattr(schedule, "choose", lambda k, t, how=how: how)
        got = [t.clone() for t in tensors]
        kernels.simulate(small, got, target=H100)
        torch.testing.assert_close(got, expected)


# ---------------------------------------------------------------- the choice


def test_the_fastest_is_taken_and_remembered(clock: list[float], tuner: Tuner) -> None:
    kernel = SHAPES["row in registers"]
    fast = candidates(kernel, schedule.choose(kernel, H100), H100)[3]
    fake = trials(clock, lambda c: 1e-3 if c == fast else 2e-3)
    assert tuned(kernel, tuner, fake) == (fast, f"tuned: {name_of(fast)}")
    tuner.save()
    again = Tuner(tuner.scope.partition("|")[0])
    assert tuned(kernel, again, trials(clock, pytest.fail))[0] == fast  # another process measures nothing


def test_the_formula_is_named_where_it_wins(clock: list[float], tuner: Tuner) -> None:
    kernel = SHAPES["pointwise"]
    formula = schedule.choose(kernel, H100)
    how, note = tuned(kernel, tuner, trials(clock, lambda c: 1e-3 if c == formula else 2e-3))
    assert (how, note) == (formula, "tuned: as the formula")


def test_another_device_target_or_triton_is_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = SHAPES["pointwise"]
    keys = {autotune._key("hash", kernel, t) for t in (H100, NVIDIA["sm_80"])}
    monkeypatch.setattr("triton.__version__", "99.0")
    keys.add(autotune._key("hash", kernel, H100))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    keys.add(autotune._key("hash", kernel, H100))
    assert len(keys) == 4


def test_two_configurations_of_a_kernel_live_side_by_side() -> None:
    """An untuned graph keeps the formula's code beside a tuned one."""
    kernel = kernels.add_gelu(1 << 14)
    formula = schedule.choose(kernel, H100)
    other = replace(formula, warps=formula.warps * 2)
    key = structural_hash(kernel)
    first, second = compile_kernels([kernel], H100), compile_kernels([kernel], H100, configs={key: other})
    assert (first.sources[key].warps, second.sources[key].warps) == (formula.warps, other.warps)
    assert compile_kernels([kernel], H100).sources[key].warps == formula.warps


# ---------------------------------------------------------------- when it cannot be done


def test_a_candidate_without_memory_is_dropped(clock: list[float], tuner: Tuner, caplog: Any) -> None:
    kernel = SHAPES["row in registers"]
    formula, second, *_ = candidates(kernel, schedule.choose(kernel, H100), H100)

    def seconds(c: Config) -> float:
        if c == second:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 1e-3 if c == formula else 2e-3

    with caplog.at_level(logging.WARNING):
        how, note = tuned(kernel, tuner, trials(clock, seconds))
    assert how == formula
    assert note == f"tuned: as the formula; {name_of(second)} is out: out of memory"
    assert f"autotune drops {name_of(second)}: out of memory" in caplog.text


def test_without_memory_for_the_formula_its_choice_stays(clock: list[float], tuner: Tuner, caplog: Any) -> None:
    kernel = SHAPES["pointwise"]
    formula = schedule.choose(kernel, H100)

    def seconds(c: Config) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with caplog.at_level(logging.WARNING):
        how, note = tuned(kernel, tuner, trials(clock, seconds))
    assert how == formula and note.startswith("not tuned: out of memory")
    assert "add_gelu is not tuned: out of memory" in caplog.text
    # the next process has memory again, and no stale result stops it
    assert tuned(kernel, tuner, trials(clock, lambda c: 2e-3 if c == formula else 1e-3))[0] != formula


def test_without_memory_for_the_tensors_the_formula_stays(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(autotune, "stand_ins", full)
    trial = autotune.OnDevice(SHAPES["pointwise"], [], H100)
    with pytest.raises(Stopped, match="out of memory for tensors"):
        trial._tensors  # noqa: B018


def test_when_nothing_runs_the_formula_stays(clock: list[float], tuner: Tuner) -> None:
    def seconds(c: Config) -> float:
        raise RuntimeError("no kernel image")

    how, note = tuned(SHAPES["pointwise"], tuner, trials(clock, seconds))
    assert how == schedule.choose(SHAPES["pointwise"], H100)
    assert note.startswith("not tuned: no candidate") and "no kernel image" in note


def test_positions_that_are_not_checked_are_not_tried() -> None:
    b = Builder("gather", p=[64])
    ids, x, out = b.input("ids", "i64"), b.input("x", "f32"), b.output("out", "f32")
    (i,) = b.axes
    b.store(out, i, b.load(x, b.indirect(b.load(ids, i))))
    with pytest.raises(Stopped, match="does not check"):
        stand_ins(b.build(), "cpu")


def test_stand_ins_reach_as_far_as_the_kernel_does() -> None:
    ids, table, out = stand_ins(kernels.embedding(128, 8, 100), "cpu")
    assert (ids.numel(), table.numel(), out.numel()) == (128, 800, 1024)
    assert 0 <= int(ids.min()) and int(ids.max()) < 100


@pytest.mark.parametrize("backend", [NvidiaTriton, RocmTriton])
def test_a_simulated_device_refuses(backend: type[NvidiaTriton]) -> None:
    device = backend.simulated({"target": ""})
    with pytest.raises(OptionError, match="'autotune' measures on a device"):
        backend(device, {"target": "", "graphs": True, "autotune": True})  # type: ignore[arg-type]


def test_compile_refuses_too() -> None:
    fn = torch.compile(torch.exp, backend="nvidia_triton", options={"simulate": True, "autotune": True})
    with pytest.raises(Exception, match="a simulated one has no speed"):
        fn(torch.ones(4))


def test_what_was_tuned_is_what_is_built(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """From the option to the loaded code, on a device that only compiles."""
    kernel = SHAPES["row in registers"]
    key, wanted = structural_hash(kernel), candidates(kernel, schedule.choose(kernel, H100), H100)[1]
    backend = NvidiaTriton(Device("cuda", "sm_90"), {"target": "", "graphs": True, "autotune": True})
    backend._tuned[key] = wanted
    built: list[Config] = []
    real = compile_kernels
    monkeypatch.setattr(
        "fusewright_triton.runtime.compile_kernels",
        lambda k, t, configs: built.extend(configs.values()) or real(k, t, configs=configs),
    )
    loader = backend._loader()
    assert isinstance(loader, TritonLoader)
    loader({key: kernel})
    assert built == [wanted]

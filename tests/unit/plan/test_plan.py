# ruff: noqa: E501 (one line of text per node)
"""Plans: the generated code as text, lifetimes, the order of side effects, memory."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node

from fusewright import _torch_compat as compat
from fusewright import pipeline
from fusewright.bench import suite
from fusewright.capture import capture
from fusewright.config import Options
from fusewright.graph.constants import find
from fusewright.graph.parser import parse
from fusewright.interface import YES, CompileContext, Compiled, Device, Opaque, OpView, Region, Verdict
from fusewright.partition.partition import partition
from fusewright.plan.build import Plan, build
from fusewright.plan.execute import codegen
from fusewright.reference import Interp, Null
from tests import golden

X = "%0: f32[2,3] = input('x')\n"


def planned(text: str, const: Sequence[str] = ()) -> Plan:
    """Plan a printed graph without any claims. `const`: names of inputs that are weights."""
    graph = parse(text)
    weights = frozenset(n for n in graph.find_nodes(op="placeholder") if n.target in const)
    index = find(graph, weights, "infer").index(graph, "infer")
    return build(index, partition(Null(), index, {}).members, [])


def source(text: str, *const: str) -> str:
    return codegen.to_text(planned(text, const))


@pytest.mark.parametrize("name", golden.names("plan"))
def test_golden(name: str, goldens: golden.Goldens) -> None:
    """A graph as text, and its plan. Inputs named w... are weights."""
    graph = golden.read(name)[0]
    names = [str(n.target) for n in parse(graph).find_nodes(op="placeholder")]
    goldens.check(name, graph, source(graph, *(n for n in names if n.startswith("w"))))


def call(text: str, *inputs: Tensor, const: Sequence[str] = ()) -> tuple[Any, ...]:
    run = codegen.load(planned(text, const))
    return run(list(inputs))


ONE = torch.tensor([[1.0, -0.0, 2.0], [0.5, -1.0, 3.0]])


def test_literals_of_every_kind() -> None:
    text = X + (
        "%1: f32[2,3] = clamp(%0, -inf, inf)\n%2: bool[2,3] = isnan(%1)\n%3: f32[2,3] = masked_fill(%1, %2, nan)\n"
        "%4: f32[2,5] = constant_pad_nd(%3, [1, 1], -0.0)\n%5: f64[2,5] = cast(%4, dtype=torch.float64)\n"
        "%6: f32[2,2] = aten.full.default([2, 2], 1e-07, dtype=torch.float32, device=cpu, pin_memory=False)\n"
        "%7: c64[2,3] = aten.mul.Scalar(%0, (nan+infj))\nreturn [%5, %6, %7, None, 3]\n"
    )  # fmt: skip
    wide, small, complex_, none, three = call(text, ONE)
    assert wide.dtype == torch.float64 and math.copysign(1, wide[0, 0].item()) == -1
    assert small.tolist() == [[pytest.approx(1e-7)] * 2] * 2
    assert complex_.dtype == torch.complex64
    assert (none, three) == (None, 3)


def test_results_of_many_and_python_numbers() -> None:
    text = (
        "%0: f32[s0,3] = input('x')\n%1: sym(s0) = input('n')\n%2: sym(s0 + 1) = py.add(%1, 1)\n"
        "%3: (f32[s0], i64[s0]) = aten.max.dim(%0, 1)\n%4: f32[s0] = py.getitem(%3, 0)\n%5: i64[s0] = py.getitem(%3, 1)\n"
        "return [%4, %5, %2]\n"
    )  # fmt: skip
    values, where, n = call(text, ONE, 2)  # type: ignore[arg-type]
    assert values.tolist() == [2.0, 3.0] and where.tolist() == [2, 2] and n == 3


def test_defaults_are_left_out_only_where_they_mean_the_same() -> None:
    text = (
        X
        + "%1: f32[2,3] = aten.add.Tensor(%0, %0, alpha=1)\n%2: f32[2,5] = aten.constant_pad_nd.default(%1, [1, 1], -0.0)\nreturn [%2]\n"
    )
    assert ", -0.0)" in source(text)


# ---------------------------------------------------------------- effects


def test_effects_keep_their_order() -> None:
    text = X + (
        "%1: f32[2,3] = exp(%0)\n%2: f32[2,3] = aten.mul_.Tensor(%0, 2)\n%3: f32[2,3] = exp(%0)\n"
        "%4: f32[2,3] = aten.add_.Tensor(%0, 1)\n%5: f32[2,3] = sub(%1, %3, alpha=1)\nreturn [%5, %4]\n"
    )  # fmt: skip
    x = ONE.clone()
    difference, written = call(text, x)
    assert torch.equal(difference, ONE.exp() - (ONE * 2).exp())
    assert written is x and torch.equal(x, ONE * 2 + 1)


def test_random_ops_keep_their_order() -> None:
    text = X + (
        "%1: f32[2,3] = rand_like(%0)\n%2: f32[2,3] = aten.randn_like.default(%0)\n%3: f32[2,3] = rand_like(%0)\n"
        "return [%3, %2, %1]\n"
    )  # fmt: skip
    torch.manual_seed(0)
    wanted = [torch.rand(2, 3), torch.randn(2, 3), torch.rand(2, 3)]
    torch.manual_seed(0)
    assert all(torch.equal(a, b) for a, b in zip(reversed(call(text, ONE)), wanted, strict=True))


def test_a_shared_constant_is_never_written() -> None:
    """A copy of a weight that is later written in place is made in every call."""
    text = "%0: f32[3] = input('w')\n%1: f32[3] = exp(%0)\n%2: f32[3] = aten.add_.Tensor(%1, 1)\n%3: f32[3] = relu(%2)\nreturn [%3]\n"
    made = planned(text, ["w"])
    run, plan = codegen.load(made), codegen.to_text(made)
    assert "def prepare" not in plan
    w = torch.zeros(3)
    assert [run([w])[0].tolist() for _ in range(2)] == [[2.0] * 3] * 2


def test_the_text_is_written_once_a_callable_and_shown_to_who_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bool] = []
    source = codegen.source
    monkeypatch.setattr(codegen, "source", lambda *args, **kwargs: written.append(True) or source(*args, **kwargs))
    plan = planned(X + "%1: f32[2,3] = exp(%0)\nreturn [%1]\n")
    codegen.load(plan)
    assert len(written) == 1
    assert "exp" in codegen.to_text(plan) and len(written) == 2


# ---------------------------------------------------------------- lifetimes


class Each(Interp):
    """Every op is a region of its own; `seen` receives the inputs and results of each call."""

    name = "each"
    seen: Callable[[str, Sequence[Any], Sequence[Any]], None]

    def supports(self, op: OpView) -> Verdict:
        return YES

    def group(self, graph: Any, claimed: frozenset[int]) -> list[frozenset[int]]:
        return [frozenset((i,)) for i in claimed]

    def compile(self, region: Region, ctx: CompileContext) -> Compiled:
        inner = super().compile(region, ctx)
        assert isinstance(inner, Opaque)
        name = region.ops[0].op

        def run(*args: Any) -> Any:
            results = inner.fn(*args)
            self.seen(name, args, results)
            return results

        return Opaque(run)


def compile_text(backend: Any, text: str) -> Callable[[list[Any]], Any]:
    gm = torch.fx.GraphModule({}, parse(text))
    return pipeline.compile_graph(backend, Options(cache=False, fallback="allow"), gm, "infer", frozenset(), "direct")


def test_intermediates_die_with_their_last_reader() -> None:
    text = (
        X
        + "%1: f32[2,3] = exp(%0)\n%2: f32[2,3] = sin(%1)\n%3: f32[2,3] = cos(%2)\n%4: f32[2,3] = relu(%3)\nreturn [%4]\n"
    )
    made: list[tuple[str, weakref.ref[Tensor]]] = []
    alive: dict[str, list[str]] = {}

    def seen(name: str, args: Sequence[Any], results: Sequence[Any]) -> None:
        alive[name] = [n for n, r in made if r() is not None]
        made.extend((name, weakref.ref(r)) for r in results)

    backend = Each(Device("cpu", "any"))
    backend.seen = seen
    run = compile_text(backend, text)
    for _ in range(2):  # the first run is checked, the second is not
        made.clear()
        run([ONE.clone()])
        assert alive == {"exp": [], "sin": ["exp"], "cos": ["sin"], "relu": ["cos"]}


def test_inputs_are_let_go() -> None:
    """Activations that only the plan references are freed after their last use."""
    text = X + "%1: f32[2,3] = exp(%0)\n%2: f32[2,3] = sin(%1)\nreturn [%2]\n"
    alive: list[bool] = []
    backend = Each(Device("cpu", "any"))
    x = ONE.clone()
    watch = weakref.ref(x)
    backend.seen = lambda name, args, results: alive.append(watch() is not None)
    run = compile_text(backend, text)
    run([ONE.clone()])
    alive.clear()
    args = [x]
    del x
    run(args)
    assert args == [] and alive == [True, False]


class _Peak:
    """Measures the peak bytes of live storages created within it."""

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        self.peak = 0

    def handler(self, op: Any, args: Any, kwargs: Any) -> Any:
        out = op(*args, **kwargs)
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, Tensor):
                self._watch(t.untyped_storage())
        self.peak = max(self.peak, sum(self.live.values()))
        return out

    def _watch(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self.live:
            self.live[key] = storage.nbytes()
            weakref.finalize(storage, self.live.pop, key, None)


def peak_bytes(fn: Callable[[], Any]) -> int:
    counter = _Peak()
    with torch.no_grad(), compat.dispatch_mode(counter.handler):
        fn()
    return counter.peak


def runs_of(fn: Any, call: Callable[[Any], Any], backend: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Collect (plan, arguments) for every graph that Dynamo makes of `fn`."""
    found: list[tuple[Any, list[Any]]] = []

    def compile_it(gm: Any, examples: Any) -> Any:
        def compile_aten(aten: Any, phase: Any, const: frozenset[Node], mode: str) -> Any:
            run = pipeline.compile_graph(backend, Options(cache=False, fallback="allow"), aten, phase, const, mode)

            def noted(args: list[Any]) -> Any:
                found.append((run, list(args)))
                return run(args)

            return noted

        return capture.capture(gm, examples, compile_aten)

    with torch.no_grad():
        call(torch.compile(fn, backend=compile_it))
    yield from found


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("model", ["bert", "resnet50"])
def test_peak_memory_is_at_most_a_tenth_above_eagers(model: str) -> None:
    built = suite.build(model, "small")
    ((run, args),) = runs_of(built.fn, built.run, Null())
    ours = peak_bytes(lambda: run(list(args)))
    eager = peak_bytes(built.run)
    assert 0 < ours <= 1.1 * eager

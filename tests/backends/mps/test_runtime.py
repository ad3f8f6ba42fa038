"""The calls to `torch.mps`: what is compiled, dispatched and waited for, on a device that only records.

Sources here are written for the test; the emitter's output has its own tests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fusewright.toolkit.ir import Builder, Kernel, structural_hash, symbol
from fusewright.toolkit.ir.extent import Extent, atoms
from fusewright_mps import runtime
from fusewright_mps.device import Fetched
from fusewright_mps.emit.source import Argument, Dispatch, Source, Variant
from fusewright_mps.recorded import Buffer, Recorded, Waited
from fusewright_mps.recorded import Dispatch as Dispatched
from fusewright_mps.runtime import MetalLoader
from fusewright_mps.target import TARGETS

LARGE = 4096
"""The element count from which the test's sources use the variant for wide offsets."""


def scaled(name: str = "scaled", n: Extent = 8) -> Kernel:
    """out = x * factor."""
    b = Builder(name, p=[n], symbols=dict.fromkeys(atoms(n), 8))
    x, out = b.input("x", "f32"), b.output("out", "f32")
    (i,) = b.axes
    b.store(out, i, b.load(x, i) * b.scalar("factor", "f32"))
    return b.build()


def looked_up() -> Kernel:
    """out[i] = x[at[i]], where an index may be out of bounds."""
    b = Builder("looked_up", p=[4])
    x, at, out = b.input("x", "f32"), b.input("at", "i64"), b.output("out", "f32")
    (i,) = b.axes
    b.store(out, i, b.load(x, b.indirect(b.bound(b.load(at, i), 10))))
    return b.build()


def printed(kernel: Kernel, variant: Variant, target: object) -> Source:
    """A source with two dispatches: out and x, then only x with the numbers. Kernels with checks take error words."""
    checks = any(n.op == "bound" for n in kernel.nodes())
    name = f"{kernel.name}_{'wide' if variant.wide else 'narrow'}_{'aligned' if variant.aligned else 'any'}"
    numbers = (Argument("reals"),) * bool(kernel.scalars) + (Argument("sizes"),) * bool(kernel.symbols)
    first = (Argument("buffer", len(kernel.buffers) - 1), Argument("buffer", 0), *((Argument("errors"),) * checks))
    dispatches = (
        Dispatch(f"{name}_a", first, (kernel.p[0], 1, 1), (32, 1, 1)),
        Dispatch(f"{name}_b", (Argument("buffer", 0), *numbers), (kernel.p[0], 2, 1), (32, 2, 1)),
    )
    alignment = tuple(16 if variant.aligned else 1 for _ in kernel.buffers)
    return Source(kernel, variant, f"// {name}", dispatches, alignment, errors=8 * checks)


@pytest.fixture(autouse=True)
def emitter(monkeypatch: pytest.MonkeyPatch) -> None:
    def variant_for(kernel: Kernel, sizes: Sequence[int], aligned: bool = True, check: bool = False) -> Variant:
        return Variant(aligned, math.prod(sizes) >= LARGE, check)

    monkeypatch.setattr(runtime, "emit", printed)
    monkeypatch.setattr(runtime, "variant_for", variant_for)
    monkeypatch.setattr(runtime, "library", lambda sources: "\n".join(s.text for s in sources))


def loaded(metal: Recorded, *kernels: Kernel) -> list[Any]:
    by_hash = {structural_hash(k): k for k in kernels}
    code = MetalLoader(metal, TARGETS["M3 Pro"])(by_hash)
    return [code[h].call for h in by_hash]


def buffer(t: torch.Tensor, offset: int = 0) -> Buffer:
    return Buffer(t.untyped_storage().data_ptr(), offset, t.dtype)


# ---------------------------------------------------------------- what is called


def test_a_plan_has_one_library() -> None:
    metal = Recorded()
    loaded(metal, scaled(), looked_up())
    assert [c.source for c in metal.compiled] == ["// scaled_narrow_aligned\n// looked_up_narrow_aligned"]


def test_a_launch_is_its_dispatches_in_order_and_nothing_else() -> None:
    metal = Recorded()
    (launch,) = loaded(metal, scaled())
    x, out = torch.ones(8), torch.empty(8)
    metal.events.clear()
    launch((x, out), (), (3.0,))
    assert metal.events == [
        Dispatched("scaled_narrow_aligned_a", (buffer(out), buffer(x)), (8, 1, 1), (32, 1, 1)),
        Dispatched("scaled_narrow_aligned_b", (buffer(x), (3.0,)), (8, 2, 1), (32, 2, 1)),
    ]
    assert metal.encoded == 2


def test_sizes_are_arguments_and_choose_the_variant() -> None:
    metal = Recorded()
    (launch,) = loaded(metal, scaled(n=symbol("n")))
    for n in (8, LARGE, 16, LARGE):
        launch((torch.ones(n), torch.empty(n)), (n,), (1.0,))
    assert [c.source for c in metal.compiled] == ["// scaled_narrow_aligned", "// scaled_wide_aligned"]
    assert [(d.entry[7:11], d.threads[0]) for d in metal.dispatches[::2]] == [
        ("narr", 8), ("wide", LARGE), ("narr", 16), ("wide", LARGE),
    ]  # fmt: skip
    assert metal.dispatches[1].args[-1] == (8,)


def test_buffers_that_begin_elsewhere_have_a_variant_of_their_own() -> None:
    """A view is passed as its storage with an offset; the variant is compiled once."""
    metal = Recorded()
    (launch,) = loaded(metal, scaled())
    base, out = torch.ones(64), torch.empty(8)
    for start in (1, 4, 1):
        launch((base[start : start + 8], out), (), (1.0,))
    assert [c.source[3:] for c in metal.compiled] == ["scaled_narrow_aligned", "scaled_narrow_any"]
    assert [d.args[1] for d in metal.dispatches[::2]] == [buffer(base, 4), buffer(base, 16), buffer(base, 4)]
    assert [d.entry.split("_")[2] for d in metal.dispatches[::2]] == ["any", "aligned", "any"]


def test_nothing_is_dispatched_for_no_points() -> None:
    metal = Recorded()
    (launch,) = loaded(metal, scaled(n=symbol("n")))
    launch((torch.ones(0), torch.empty(0)), (0,), (1.0,))
    assert not metal.dispatches and metal.encoded == 0


# ---------------------------------------------------------------- errors


class Late(Recorded):
    """A device whose error words reach the host once `arrived` is set."""

    device = "meta"
    arrived = False

    def fetch(self, words: torch.Tensor) -> Fetched:
        super().fetch(words)
        return Fetched(torch.tensor([0, 0, 0, 0, 1, 12, 0, 0], dtype=torch.int32), lambda: self.arrived)


def test_an_error_is_raised_by_the_launch_after_its_words_have_come() -> None:
    metal = Late()
    (launch,) = loaded(metal, looked_up())
    given = (torch.ones(10), torch.zeros(4, dtype=torch.int64), torch.empty(4))
    launch(given)
    launch(given)
    assert not any(e == Waited("synchronize") for e in metal.events), "nobody waits"
    metal.arrived = True
    with pytest.raises(IndexError, match="index 12 is out of bounds for size 10"):
        launch(given)


def test_who_waits_for_the_device_can_ask_for_errors() -> None:
    metal = Late()
    (launch,) = loaded(metal, looked_up())
    launch((torch.ones(10), torch.zeros(4, dtype=torch.int64), torch.empty(4)))
    metal.arrived = True
    with pytest.raises(IndexError, match="index 12"):
        runtime.raise_errors(metal)
    runtime.raise_errors(metal)


# ---------------------------------------------------------------- the plan cache


def test_a_stored_kernel_is_compiled_and_launched_again() -> None:
    kernel = scaled()
    loader = MetalLoader(Recorded(), TARGETS["M3 Pro"])
    data = loader.pack({structural_hash(kernel): kernel})
    assert data is not None
    metal = Recorded()
    (code,) = MetalLoader(metal, TARGETS["M3 Pro"]).unpack(data).values()
    code.call((torch.ones(8), torch.empty(8)), (), (1.0,))
    assert len(metal.compiled) == 1 and metal.encoded == 2


def test_a_kernel_under_the_hash_of_another_is_refused() -> None:
    loader = MetalLoader(Recorded(), TARGETS["M3 Pro"])
    data = loader.pack({structural_hash(scaled()): looked_up()})
    assert data is not None
    with pytest.raises(ValueError, match="looked_up under the hash of another kernel"):
        loader.unpack(data)


# ---------------------------------------------------------------- what the record refuses, as torch and Metal would


@pytest.mark.parametrize(
    ("args", "threads", "group", "message"),
    [
        ([1] * 32, (8,), (8,), "32 arguments; Metal's buffer table has 31"),
        ([1], (8, 1), (8,), "as many axes"),
        ([1], (0,), (8,), "no empty grid"),
        ([1], (2048,), (2048,), "more than 1024 threads"),
        ([[]], (8,), (8,), "argument 0 of f is an empty list"),
        (["x"], (8,), (8,), "a tensor, ints or floats are taken"),
        ([True], (8,), (8,), "a tensor, ints or floats are taken"),
        ([[1, 2.0]], (8,), (8,), "a tensor, ints or floats are taken"),
        ([[1] * 513], (8,), (8,), "4096 bytes are taken"),
    ],
)
def test_a_wrong_call_is_refused(args: list[Any], threads: Any, group: Any, message: str) -> None:
    shaders = Recorded().compile_shader("")
    with pytest.raises((TypeError, ValueError), match=message):
        shaders.f(*args, threads=threads, group_size=group)


def test_casts_are_those_of_torch() -> None:
    metal = Recorded()
    shaders = metal.compile_shader("")
    shaders.f(1, threads=8, group_size=8, arg_casts={0: "int32"})
    assert metal.dispatches[0].arg_casts == ((0, "int32"),)
    with pytest.raises(ValueError, match="not to uint32"):
        shaders.f(1, threads=8, group_size=8, arg_casts={0: "uint32"})

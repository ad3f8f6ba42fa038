"""The backend `x86_int8`: quantized products in integers, everything else through the shared CPU lowerings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from fusewright import machine
from fusewright.interface import Device, OpView, Quantization, Unavailable
from fusewright.toolkit.region.graph import RegionGraph
from fusewright.toolkit.region.rewrite import Row, by_root
from fusewright_cpu.onednn.fused import half_features
from fusewright_cpu.onednn.lowerings import ROWS as FLOAT_ROWS
from fusewright_cpu.onednn.quantized import QuantizedBackend
from fusewright_int8 import engines
from fusewright_int8.activations import PRODUCTS as MATMULS
from fusewright_int8.activations import ROWS as MATMUL_ROWS
from fusewright_int8.floats import ROWS as DYNAMIC_ROWS
from fusewright_int8.floats import float_input
from fusewright_int8.flow.api import Int8Quantization
from fusewright_int8.lowerings import ROWS, laid_out, static_input, why_not
from fusewright_int8.operators import NAMESPACE
from fusewright_int8.run import native
from fusewright_int8.siblings import ROWS as SIBLING_ROWS
from fusewright_int8.target import best
from fusewright_int8.tensors import ROWS as TENSOR_ROWS


class X86Int8(QuantizedBackend):
    """x86-64 CPUs with AVX2 or better. Float ops run as in `x86_onednn`."""

    name = "x86_int8"
    priority = 10  # below the CPU's float backend, which comes first for models that are not quantized
    rows: ClassVar[Mapping[str, Sequence[Row]]] = by_root(
        (*SIBLING_ROWS, *ROWS, *MATMUL_ROWS, *DYNAMIC_ROWS, *TENSOR_ROWS, *FLOAT_ROWS)
    )
    carried = frozenset({"linear", "conv", "int_mm", "choose_qparams", *MATMULS})
    products = ("linear", "conv")
    widened = frozenset({"dequantize", "dequantize_per_channel"})
    """A product left in floats reads its weight from a copy in floats, which its measurement assumed."""
    namespaces = (*QuantizedBackend.namespaces, NAMESPACE)
    options: ClassVar[Mapping[str, Any]] = {
        **QuantizedBackend.options,
        # The engine of int8 products: "core", "onednn", or "auto" for the one that measures fastest for a shape.
        "engine": "auto",
    }
    choices: ClassVar[Mapping[str, Sequence[Any]]] = {**QuantizedBackend.choices, "engine": ("auto", "core", "onednn")}
    environment: ClassVar[Mapping[str, str]] = {
        **QuantizedBackend.environment,
        "FUSEWRIGHT_INT8_ISA": "for tests: compute int8 products by a lesser instruction set of the native core",
    }

    @classmethod
    def probe(cls) -> Device | Unavailable:
        if machine.arch() != "x86_64":
            return Unavailable(f"this is {machine.arch()}", "use an x86-64 machine")
        features = machine.cpu_features()
        found = best(features)
        if found is None:
            return Unavailable("the CPU has no AVX2 with FMA", "use `x86_onednn`, which runs quantized models in floats")
        if (nothing := engines.none_left()) is not None:
            return Unavailable(f"nothing computes int8 here: {nothing}", "install a C++20 compiler and reinstall fusewright-int8")
        return Device("cpu", found.arch, features | half_features())

    @classmethod
    def remark(cls) -> str:
        missing = [f"no {e.name}: {why}" for e in engines.ENGINES if (why := e.absent())]
        there = [f"our core ({native.isa()})" if e.name == "core" else "oneDNN" for e in engines.present()]
        return "; ".join([f"int8 products by {' and '.join(there)}", *missing])

    def fingerprint(self) -> str:
        """Include the core and its build, because plans contain its calls."""
        core = "absent" if native.absent() else f"{native.isa()} {machine.sources('fusewright_int8')[:16]}"
        return f"{super().fingerprint()}-core {core}"

    @classmethod
    def quantization(cls) -> Quantization:
        return Int8Quantization()

    def why_not(self, op: OpView, graph: RegionGraph, note: str) -> str | None:
        found = why_not(op, graph)
        known = static_input(op, graph) or (op.op == "linear" and float_input(op, graph))
        if found is not None or not known or note.startswith(("int8", "in the call of")):
            return found
        if not laid_out(op, op.out, known.value):
            return "of symbolic size, with a result in another layout than its input's rows"
        return "floats are faster for its shape, as was measured"

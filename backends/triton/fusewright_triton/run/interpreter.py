"""Runs emitted kernels on CPU tensors with Triton's interpreter.

The interpreter is Triton's own, except for parts whose arithmetic differs from the devices': casts (it
truncates to bf16), maxima of NaN, types of comparisons, and reductions by Python loops. The replacements are active
only during a run.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from fusewright_triton.build.compiler import load
from fusewright_triton.run.interpreted_ops import Device, Libdevice

_LOCK = threading.RLock()

_TORCH = {
    tl.float32: torch.float32,
    tl.float64: torch.float64,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.int1: torch.bool,
    tl.int8: torch.int8,
    tl.uint8: torch.uint8,
    tl.int16: torch.int16,
    tl.int32: torch.int32,
    tl.int64: torch.int64,
}


class _Builder(interpreter.InterpreterBuilder):
    """NumPy arithmetic of the interpreter, with the devices' rounding and NaN rules."""

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        src_type, dst_type = src.dtype.scalar, dst_type.scalar
        if src_type not in _TORCH or dst_type not in _TORCH:
            return super().cast_impl(src, dst_type)
        t = torch.from_numpy(np.ascontiguousarray(src.data))
        t = t.view(torch.bfloat16) if src_type == tl.bfloat16 else t
        t = t.to(_TORCH[dst_type])
        data = t.view(torch.uint16).numpy() if dst_type == tl.bfloat16 else t.numpy()
        return interpreter.TensorHandle(data, dst_type)

    def binary_op(self, lhs: Any, rhs: Any, op: Any) -> Any:
        out = super().binary_op(lhs, rhs, op)
        # Triton keeps the operands' type on comparisons, and then makes float blocks of the results
        return interpreter.TensorHandle(out.data, tl.int1) if out.data.dtype == np.bool_ else out

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        return self.cast_impl(src, dst_type)

    def get_all_ones_value(self, type: Any) -> Any:
        if type.scalar == tl.int1:
            return interpreter.TensorHandle(np.array([True]), tl.int1)
        ones = torch.full((1,), -1, dtype=torch.int64, device="cpu").to(_TORCH[type.scalar]).numpy()
        return interpreter.TensorHandle(ones, type.scalar)

    def create_dot(self, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        """Multiply half types in fp32 and int8 in int32, as matrix instructions do (bf16 is represented by its bits here, and
        fp16 would round)."""
        wide = tl.float32 if d.dtype.scalar.is_floating() else d.dtype.scalar
        x, y = (self.cast_impl(operand, wide).data for operand in (a, b))
        return interpreter.TensorHandle(np.matmul(x, y) + d.data, d.dtype.scalar)

    def create_minnumf(self, a: Any, b: Any) -> Any:
        return self.binary_op(a, b, np.fmin)

    def create_maxnumf(self, a: Any, b: Any) -> Any:
        return self.binary_op(a, b, np.fmax)


@functools.cache
def _replacements() -> tuple[Any, Any]:
    builder = _Builder()
    return builder, interpreter.TritonSemantic(builder)


@contextmanager
def _replaced() -> Iterator[None]:
    """Replace the builder in the interpreter's module for the duration of a run."""
    names = ("interpreter_builder", "interpreter_semantic")
    with _LOCK:
        before = [getattr(interpreter, n) for n in names]
        for n, x in zip(names, _replacements(), strict=True):
            setattr(interpreter, n, x)
        try:
            with np.errstate(all="ignore"):
                yield
        finally:
            for n, x in zip(names, before, strict=True):
                setattr(interpreter, n, x)


class _Jit:
    """Stands for `triton` in interpreted source: `triton.jit` keeps the Python function."""

    @staticmethod
    def jit(fn: Callable[..., Any]) -> Callable[..., Any]:
        return fn


def _range(*bounds: Any, **hints: Any) -> range:
    """`range` over interpreted numbers (Triton's own conversion does not work with NumPy 2.4); the hints of `tl.range`
    only affect compilation."""
    return range(*(b.handle.data.item() if isinstance(b, tl.tensor) else b for b in bounds))


class _Language:
    """Stands for `tl` in interpreted source: Triton's language with our `range`."""

    range = staticmethod(_range)

    def __getattr__(self, name: str) -> Any:
        return getattr(tl, name)


class Simulated:
    """Functions of a source text, interpreted. `run(k, programs, args)` is a launch of the k-th."""

    def __init__(self, text: str, functions: Sequence[str]) -> None:
        names = {"triton": _Jit, "tl": _Language(), "libdevice": Libdevice(), "fw": Device, "range": _range}
        names["language"] = tl  # the interpreter replaces parts of this module, which it finds in a function's globals
        module = load(text, names)
        with _replaced():
            self.functions = [interpreter.InterpretedFunction(getattr(module, f)) for f in functions]

    def run(self, k: int, programs: int, args: Sequence[Any], **constants: Any) -> None:
        with _replaced():
            self.functions[k][(programs,)](*args, **constants)

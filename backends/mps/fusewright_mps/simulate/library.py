"""A simulated shader library on CPU tensors, with the interface of the one that `torch.mps.compile_shader` returns.

    shaders = compile_shader(text)
    shaders.add_gelu_0b1c(x, y, out, threads=(1024, 1, 1), group_size=(256, 1, 1))

`FUSEWRIGHT_MPS_CHECK=1`, or `checked=True`, checks every access for bounds, alignment, and races between threads without a
barrier. This is about ten times slower.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fusewright_mps.simulate.compiler import build
from fusewright_mps.simulate.translate import Function, Parameter, functions, to_cpp

MOST_THREADS = 1024
"""Most threads in a threadgroup."""
THREADGROUP_BYTES = 32 * 1024
INLINE_BYTES = 4096
"""Most bytes of numbers that Metal takes without a buffer (`setBytes`)."""

TYPES = {
    "float": torch.float32, "half": torch.float16, "bfloat": torch.bfloat16, "char": torch.int8, "uchar": torch.uint8,
    "short": torch.int16, "int": torch.int32, "long": torch.int64, "bool": torch.bool,
    "uint": torch.int32, "atomic_uint": torch.int32, "atomic_int": torch.int32,
}  # fmt: skip
"""Metal's element types of buffers -> dtypes of the tensors passed for them."""


class SimulationError(RuntimeError):
    """An error found by a checked run: kernel, source line and what happened there."""


class ShaderFunction(Protocol):
    """One kernel function. `threads` counts threads, not threadgroups, in up to three directions."""

    def __call__(self, *args: Any, threads: Any = None, group_size: Any = None, arg_casts: Any = None) -> None: ...


class ShaderLibrary(Protocol):
    """Functions are attributes, as in torch's library."""

    def __getattr__(self, entry: str) -> ShaderFunction: ...


class _Region(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("begin", ctypes.c_void_p),
        ("end", ctypes.c_void_p),
        ("space", ctypes.c_int),
    ]


class _Argument(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("region", _Region)]


class _Report(ctypes.Structure):
    _fields_ = [("line", ctypes.c_int32), ("text", ctypes.c_char * 500)]


_Three = ctypes.c_uint32 * 3


@functools.lru_cache(256)
def compile_shader(text: str, checked: bool | None = None, backward: bool = False) -> ShaderLibrary:
    """Compile a Metal source. `backward`: run threadgroups and threads in the opposite order, which must not change results.

    Raise `translate.NotMetal` or `compiler.NotCompiled` for a source that the shim does not support, `compiler.NoCompiler`
    without a compiler."""
    checked = os.environ.get("FUSEWRIGHT_MPS_CHECK") == "1" if checked is None else checked
    found = functions(text)
    return _Library(text, {f.name: f for f in found}, build(to_cpp(text, found), checked), backward)


@dataclass(frozen=True)
class _Library:
    text: str
    functions: dict[str, Function]
    code: ctypes.CDLL
    backward: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "_lock", threading.Lock())  # a library's code runs one dispatch at a time

    def __getattr__(self, entry: str) -> ShaderFunction:
        try:
            return _Function(self, self.functions[entry])
        except KeyError:
            raise AttributeError(f"the shader library has no function {entry!r}") from None


class _Function:
    def __init__(self, library: _Library, function: Function) -> None:
        self.library, self.function = library, function

    def __call__(self, *args: Any, threads: Any = None, group_size: Any = None, arg_casts: Any = None) -> None:
        f = self.function
        if len(args) != len(f.buffers):
            raise TypeError(f"{f.name} takes {len(f.buffers)} arguments, not {len(args)}")
        if arg_casts is not None:
            raise TypeError(f"{f.name}: the simulation knows no arg_casts; give lists of numbers")
        size = _three(threads if threads is not None else args[0].numel())
        group = _three(group_size if group_size is not None else min(size[0], MOST_THREADS))
        if math.prod(size) == 0:
            raise ValueError(f"{f.name}: a dispatch of no threads; leave it out")
        self._limits(group)
        values = [_value(f, p, a) for p, a in zip(f.buffers, args, strict=True)]
        given = (_Argument * max(len(values), 1))(*(v for v, _ in values))
        report = _Report()
        code, body = self.library.code, getattr(self.library.code, f"shim_body_{f.name}")
        with self.library._lock:  # type: ignore[attr-defined]
            failed = code.shim_dispatch(
                body, given, len(values), _Three(*size), _Three(*group), int(f.meets), int(self.library.backward),
                ctypes.byref(report),
            )  # fmt: skip
        if failed:
            raise SimulationError(self._said(report))

    def _limits(self, group: Sequence[int]) -> None:
        f = self.function
        if math.prod(group) > MOST_THREADS or min(group) < 1:
            raise ValueError(f"{f.name}: a threadgroup of {tuple(group)}; Metal takes 1 to {MOST_THREADS} threads")
        if f.most is not None and math.prod(group) > f.most:
            raise ValueError(f"{f.name}: a threadgroup of {tuple(group)}; it was compiled for {f.most} threads")
        if f.threadgroup_bytes > THREADGROUP_BYTES:
            raise ValueError(
                f"{f.name}: {f.threadgroup_bytes} bytes of threadgroup memory; there are {THREADGROUP_BYTES}"
            )

    def _said(self, report: _Report) -> str:
        lines = self.library.text.splitlines()
        where = lines[report.line - 1].strip() if 0 < report.line <= len(lines) else ""
        return f"{self.function.name}, line {report.line}: {report.text.decode()}\n    {where}"


def _three(n: Any) -> tuple[int, int, int]:
    given = [int(n)] if isinstance(n, int) else [int(x) for x in n]
    x, y, z = (*given, 1, 1, 1)[:3]
    return x, y, z


def _value(f: Function, p: Parameter, a: Any) -> tuple[_Argument, Any]:
    """Return the argument as the shim takes it, and an object to keep alive until the call returns."""
    if isinstance(a, torch.Tensor):
        if a.dtype is not TYPES.get(p.type):
            raise TypeError(f"{f.name}: {p.name} is a buffer of {p.type}, the tensor is {a.dtype}")
        if a.device.type != "cpu":
            raise TypeError(f"{f.name}: {p.name} lies on {a.device}; a simulation takes CPU tensors")
        return _argument(p.name, a.data_ptr(), _extent(a) * a.element_size()), a
    numbers = list(a) if isinstance(a, list | tuple) else [a]
    kind: Any = {"long": ctypes.c_int64, "float": ctypes.c_float, "int": ctypes.c_int32}.get(p.type)
    if kind is None or not numbers or any(isinstance(x, float) != (p.type == "float") for x in numbers):
        raise TypeError(f"{f.name}: {p.name} is constant {p.type}*, and is given {a!r}")
    held = (kind * len(numbers))(*numbers)
    if ctypes.sizeof(held) > INLINE_BYTES:
        raise ValueError(
            f"{f.name}: {p.name} has {ctypes.sizeof(held)} bytes; Metal takes {INLINE_BYTES} without a buffer"
        )
    return _argument(p.name, ctypes.addressof(held), ctypes.sizeof(held)), held


def _argument(name: str, at: int, size: int) -> _Argument:
    return _Argument(at, _Region(name.encode(), at, at + size, 0))


def _extent(t: torch.Tensor) -> int:
    """Return the number of elements from the first to the last, gaps included."""
    return 0 if t.numel() == 0 else 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))


__all__ = ["ShaderFunction", "ShaderLibrary", "SimulationError", "compile_shader"]

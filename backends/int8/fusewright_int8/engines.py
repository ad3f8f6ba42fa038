"""Who can compute an int8 product: our core, oneDNN or FBGEMM, as data, and which is the fastest for a shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fusewright.interface import CompileContext
from fusewright.toolkit.backend.candidates import Lazy, Thunk
from fusewright_int8.operators import name
from fusewright_int8.run import native

POSTS = ("none", "relu", "clamp", "gelu", "gelu_tanh", "silu")
LIBRARY_POSTS = ("none", "relu", "gelu", "gelu_tanh")


@dataclass(frozen=True)
class Engine:
    """`linear`, `conv` and `pack_*` are operators. `residual`: it adds one. `limits`: it clamps to other limits than the type's."""

    name: str
    linear: str
    pack_linear: str
    conv: str
    pack_conv: str
    posts: tuple[str, ...]
    residual: bool
    limits: bool
    absent: Callable[[], str | None]


def _no_onednn() -> str | None:
    return None if torch.backends.mkldnn.is_available() else "torch is built without oneDNN"


ENGINES: tuple[Engine, ...] = (
    Engine("core", name("linear"), name("pack_linear"), name("conv"), name("pack_conv"), POSTS, True, True, native.absent),
    Engine(
        "onednn", name("linear_onednn"), name("pack_linear_onednn"), name("conv_onednn"), name("pack_conv_onednn"),
        LIBRARY_POSTS, False, False, _no_onednn,
    ),
)  # fmt: skip
"""Those that take the most neighbours in come first: they are asked first."""

MOST_MEASURED = 1 << 22
"""Largest weight that a measurement makes, in elements; a wider product is measured on fewer columns."""


def present(engines: Sequence[Engine] = ENGINES) -> tuple[Engine, ...]:
    """Engines that are there."""
    return tuple(e for e in engines if e.absent() is None)


@dataclass(frozen=True)
class Product:
    """x[m, k] @ w[n, k].T of 8 bits, into `out`."""

    m: int
    k: int
    n: int
    x: torch.dtype
    out: torch.dtype

    @property
    def key(self) -> str:
        types = "->".join(str(t).removeprefix("torch.") for t in (self.x, self.out))
        return f"int8 product {types} {self.m}x{self.k}x{self.n}"


@dataclass(frozen=True)
class Convolution:
    """x[shape] with w[weight], into `out`; strides and padding over two dimensions."""

    shape: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    x: torch.dtype
    out: torch.dtype

    @property
    def key(self) -> str:
        types = "->".join(str(t).removeprefix("torch.") for t in (self.x, self.out))
        parts = (self.shape, self.weight, self.stride, self.padding, self.dilation)
        return f"int8 conv {types} {' '.join('x'.join(map(str, p)) for p in parts)} {self.groups}"


def fastest(ctx: CompileContext, shape: Product | Convolution) -> str:
    """The name of the engine that is fastest for a shape."""
    there = present()
    make = _linear if isinstance(shape, Product) else _conv
    wanted = str(ctx.options.get("engine", "auto"))
    if any(e.name == wanted for e in there):
        return wanted
    candidates: Mapping[str, Callable[[], Thunk]] = {e.name: make(e, shape) for e in there}  # type: ignore[arg-type]
    return ctx.choose(f"{shape.key} {'/'.join(candidates)}", Lazy(candidates))


def _operator(target: str) -> Callable[..., torch.Tensor]:
    namespace, _, rest = target.partition("::")
    return getattr(getattr(torch.ops, namespace), rest.partition(".")[0])


def _after(out: torch.dtype) -> tuple[object, ...]:
    return None, 1.0, 0, "none", (), out, 0.1, 3, 0 if out is torch.uint8 else -128, 255 if out is torch.uint8 else 127


def _bytes(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(tuple(shape), 3, dtype=dtype)


def _linear(e: Engine, p: Product) -> Callable[[], Thunk]:
    def make() -> Thunk:
        n = min(p.n, max(64, MOST_MEASURED // p.k))
        x, scale, bias = _bytes((p.m, p.k), p.x), torch.full((n,), 0.01), torch.zeros(n)
        packed = _operator(e.pack_linear)(_bytes((n, p.k), torch.int8))
        run = _operator(e.linear)
        return lambda: run(x, packed, scale, bias, 0.1, 3, *_after(p.out))

    return make


def _conv(e: Engine, c: Convolution) -> Callable[[], Thunk]:
    def make() -> Thunk:
        x = _bytes(c.shape, c.x).contiguous(memory_format=torch.channels_last)
        scale, geometry = torch.full((c.weight[0],), 0.01), (c.stride, c.padding, c.dilation, c.groups)
        weight = _bytes(c.weight, torch.int8)
        rest = (c.groups,) if e.name == "core" else (scale, 0.1, 3, *geometry)
        packed, run = _operator(e.pack_conv)(weight, *rest), _operator(e.conv)
        return lambda: run(x, packed, scale, None, 0.1, 3, c.weight[2:], *geometry, *_after(c.out))

    return make

"""The engines that compute int8 products (our core and oneDNN), as data, and the choice of the fastest for a shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch

from fusewright.interface import CompileContext
from fusewright.plan.ir import DIRECT
from fusewright.toolkit.backend.candidates import Lazy, Thunk
from fusewright_cpu.kernels.by_hand import MOST_GEMV_ROWS
from fusewright_cpu.onednn import choices, own
from fusewright_cpu.onednn.choices import few_rows, in_turn, own_product
from fusewright_cpu.onednn.fused import HALVES, half_features
from fusewright_int8.operators import as_planned, name
from fusewright_int8.run import native
from fusewright_int8.target import VNNI, onednn_features

POSTS = ("none", "relu", "clamp", "gelu", "gelu_tanh", "silu")
LIBRARY_POSTS = ("none", "relu", "gelu", "gelu_tanh")


@dataclass(frozen=True)
class Engine:
    """One engine. `linear`, `dynamic`, `conv` and `pack_*` name operators; `linear_tensor` takes scale and zero point as tensors.
    `conv_sum` adds a residual, which it may overwrite.
    `adds`: whether it can add a shape's residual; None if it can add any. `posts_of_sums`: its post-ops after an addition.
    `limits`: it can clamp to limits other than the type's. `exact_with`: CPU features without all of which its sums are wrong;
    empty if they are exact on any CPU. `missing`: why the library is not there, or None."""

    name: str
    linear: str
    linear_tensor: str
    dynamic: str
    pack_linear: str
    conv: str
    conv_sum: str
    pack_conv: str
    posts: tuple[str, ...]
    posts_of_sums: tuple[str, ...]
    adds: Callable[[Product | Convolution], bool] | None
    limits: bool
    exact_with: frozenset[str]
    missing: Callable[[], str | None]

    def absent(self) -> str | None:
        """Return why this machine cannot use the engine, or None if it can."""
        found = self.missing()
        if found is None and self.exact_with and not self.exact_with & onednn_features():
            found = f"{self.name}'s int8 sums saturate at 16 bits on a CPU without VNNI, or with ONEDNN_MAX_CPU_ISA below it"
        return found


def _no_onednn() -> str | None:
    return None if torch.backends.mkldnn.is_available() else "torch is built without oneDNN"


def _onednn_adds(shape: Product | Convolution) -> bool:
    """oneDNN overwrites a residual by the result, so both are bytes or of one float type. Another operator, of linears only, adds
    floats to any result; bytes it adds wrongly (seen in torch 2.13)."""
    residual, out = shape.adds, shape.out
    if residual is None or not residual.is_floating_point:
        return residual is not None and not out.is_floating_point
    return residual is out or isinstance(shape, Product)


ENGINES: tuple[Engine, ...] = (
    Engine(
        "core", name("linear"), name("linear_tensor"), name("dynamic_linear"), name("pack_linear"), name("conv"), name("conv"),
        name("pack_conv"),
        POSTS, POSTS, None, True, frozenset(), native.absent,
    ),
    Engine(
        "onednn", name("linear_onednn"), name("linear_tensor_onednn"), name("dynamic_linear_onednn"), name("pack_linear_onednn"),
        name("conv_onednn"), name("conv_sum_onednn"), name("pack_conv_onednn"),
        LIBRARY_POSTS, ("none", "relu"), _onednn_adds, False, VNNI, _no_onednn,
    ),
)  # fmt: skip
"""In the order in which they are tried: those that fuse the most neighbours first."""

MOST_MEASURED = 1 << 22
"""Largest weight that a measurement allocates, in elements; a wider product is measured on fewer columns."""


def none_left() -> str | None:
    """Return why no engine can be used on this machine, or None if one can."""
    reasons = [e.absent() for e in ENGINES]
    return None if None in reasons else "; ".join(filter(None, reasons))


def present(engines: Sequence[Engine] = ENGINES) -> tuple[Engine, ...]:
    """Return the engines available on this machine."""
    return tuple(e for e in engines if e.absent() is None)


def _adding(residual: torch.dtype | None) -> str:
    return "" if residual is None else f" adds {residual}".replace("torch.", "")


@dataclass(frozen=True)
class Product:
    """An 8-bit product x[m, k] @ w[n, k].T into `out`. `adds`: the type of a residual."""

    m: int
    k: int
    n: int
    x: torch.dtype
    out: torch.dtype
    adds: torch.dtype | None = None

    @property
    def key(self) -> str:
        types = "->".join(str(t).removeprefix("torch.") for t in (self.x, self.out))
        return f"int8 product {types} {self.m}x{self.k}x{self.n}{_adding(self.adds)}"


@dataclass(frozen=True)
class Convolution:
    """An 8-bit 2-d convolution of x[shape] with w[weight] into `out`. `adds`: the type of a residual."""

    shape: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    x: torch.dtype
    out: torch.dtype
    adds: torch.dtype | None = None

    @property
    def key(self) -> str:
        types = "->".join(str(t).removeprefix("torch.") for t in (self.x, self.out))
        parts = (self.shape, self.weight, self.stride, self.padding, self.dilation)
        return f"int8 conv {types} {' '.join('x'.join(map(str, p)) for p in parts)} {self.groups}{_adding(self.adds)}"


@dataclass(frozen=True)
class Dynamic:
    """A product x[m, k] @ w[n, k].T of a float input, quantized dynamically by a rule of `reference.RULES`."""

    m: int
    k: int
    n: int
    x: torch.dtype
    rule: str

    @property
    def key(self) -> str:
        return f"int8 dynamic {self.rule} {str(self.x).removeprefix('torch.')} {self.m}x{self.k}x{self.n}"


@dataclass(frozen=True)
class Reading:
    """A product of a float input x[m, k] with an 8-bit weight w[n, k], which our core alone computes."""

    m: int
    k: int
    n: int
    x: torch.dtype

    @property
    def key(self) -> str:
        return f"int8 weight {str(self.x).removeprefix('torch.')} {self.m}x{self.k}x{self.n}"


FLOATS = "floats"
"""The answer of `fastest` when a float product beats every engine."""

OWN_FLOATS = "floats, own"
"""The candidate that stands for our own float kernel, beside oneDNN's."""

FEW_FLOATS = "floats, few rows"
"""The candidate that stands for our float kernel of few rows, which reads the weight unpacked."""


def fastest(
    ctx: CompileContext, shape: Product | Convolution | Dynamic, among: Sequence[Engine] | None = None,
    floats: torch.dtype | None = None,
) -> str:  # fmt: skip
    """Return the name of the fastest engine for a shape, of the available ones or of `among`. Given the graph's type `floats`, it
    may be `FLOATS`: a float product between conversions from and to bytes."""
    there = present() if among is None else among
    make: Callable[[Engine, Any], Callable[[], Thunk]] = MAKERS[type(shape)]
    wanted = str(ctx.options.get("engine", "auto"))
    if any(e.name == wanted for e in there):
        return wanted
    candidates: dict[str, Callable[[], Thunk]] = {e.name: make(e, shape) for e in there}
    around = ""
    if floats is not None and torch.backends.mkldnn.is_available():
        candidates.update(FLOAT_MAKERS[type(shape)](shape, floats, ctx.options["prepack"] == "auto"))
        around = f" {floats}".replace("torch.", "")
    found = ctx.choose(f"{shape.key} {'/'.join(candidates)}{around}", Lazy(candidates))
    return FLOATS if found == OWN_FLOATS else found


Makers: TypeAlias = dict[str, Callable[[], Thunk]]


def _operator(target: str) -> Callable[..., torch.Tensor]:
    """Return what a plan calls for a target, which torch's dispatcher would make 20 us longer."""
    if (direct := DIRECT.get(target)) is not None:
        return direct()
    namespace, _, rest = target.partition("::")
    return getattr(getattr(torch.ops, namespace), rest.partition(".")[0])


def _after(out: torch.dtype, residual: torch.Tensor | None = None) -> tuple[object, ...]:
    if out.is_floating_point:
        return residual, 1.0, 0, "none", (), out, 1.0, 0, 0, 0
    low, high = (0, 255) if out is torch.uint8 else (-128, 127)
    return residual, 1.0, 0, "none", (), out, 0.1, 3, low, high


def _call(e: Engine, op: str, summing: str, shape: Product | Convolution, given: Sequence[Any]) -> Thunk:
    """Return a call of an engine. A residual is added in it, or else in a separate pass, as a loop kernel after it would."""
    run, out = _operator(op), shape.out
    if shape.adds is None:
        return as_planned(op, *given, *_after(out))
    y = run(*given, *_after(torch.float32)).to(shape.adds)
    if e.adds is None or e.adds(shape):
        return as_planned(summing, *given, *_after(out, y if y.dtype.is_floating_point else y.to(out)))
    return lambda: torch.add(run(*given, *_after(torch.float32)), y).to(out)


def _bytes(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(tuple(shape), 3, dtype=dtype)


def _linear(e: Engine, p: Product) -> Callable[[], Thunk]:
    def make() -> Thunk:
        n = min(p.n, max(64, MOST_MEASURED // p.k))
        x, scale, bias = _bytes((p.m, p.k), p.x), torch.full((n,), 0.01), torch.zeros(n)
        packed = _operator(e.pack_linear)(_bytes((n, p.k), torch.int8))
        return _call(e, e.linear, e.linear, p, (x, packed, scale, bias, 0.1, 3))

    return make


def _dynamic(e: Engine, p: Dynamic) -> Callable[[], Thunk]:
    def make() -> Thunk:
        n = min(p.n, max(64, MOST_MEASURED // p.k))
        x, scale = torch.linspace(-1, 1, p.m * p.k).reshape(p.m, p.k).to(p.x), torch.full((n,), 0.01)
        packed = _operator(e.pack_linear)(_bytes((n, p.k), torch.int8))
        return as_planned(e.dynamic, x, packed, scale, None, p.rule, None, "none", (), p.x)

    return make


def _reading(e: Engine, r: Reading) -> Callable[[], Thunk]:
    """Weights take turns, since those of other layers lie between two calls."""

    def make() -> Thunk:
        n = min(r.n, max(64, MOST_MEASURED // r.k))
        x, scale = torch.ones(r.m, r.k, dtype=r.x), torch.full((n,), 0.01)
        pack, rest = _operator(e.pack_linear), (None, None, "none", (), r.x)
        packed = partial(pack, _bytes((n, r.k), torch.int8))
        turn = in_turn(n, r.k, torch.int8, lambda: as_planned(name("weight_linear"), x, packed(), scale, *rest))
        return lambda: next(turn)()

    return make


def _reading_floats(r: Reading, dtype: torch.dtype, admitted: bool) -> Makers:
    """Return float products with the weight widened beforehand."""
    n = min(r.n, max(64, MOST_MEASURED // r.k))

    def library() -> Thunk:
        x, w = torch.ones(r.m, r.k, dtype=dtype), torch.ones(n, r.k, dtype=dtype)
        turn = in_turn(n, r.k, dtype, lambda: _float_linear(w.clone(), r.m))
        return lambda: next(turn)(x)

    def kernel() -> Thunk:
        x, run = torch.ones(r.m, r.k, dtype=dtype), own_product(own.kernel_of(dtype), r.m, r.k, n)
        return lambda: run(x)

    def few() -> Thunk:
        x, run = torch.ones(r.m, r.k, dtype=dtype), few_rows(choices.Product(r.m, r.k, n, dtype, bias=False))
        turn = in_turn(n, r.k, dtype, lambda: torch.ones(n, r.k, dtype=dtype))
        return lambda: run(x, next(turn), None)

    ours = {OWN_FLOATS: kernel} if admitted and own.fits(r.m, r.k, dtype) else {}
    return {FLOATS: library, **ours, **({FEW_FLOATS: few} if 0 < r.m <= MOST_GEMV_ROWS else {})}


def reading_pays(ctx: CompileContext, m: int, k: int, n: int, dtype: torch.dtype) -> bool:
    """Whether our core, which reads the 8-bit weight, is faster than a float product with the weight widened beforehand."""
    if native.absent():
        return False
    if ctx.options.get("engine") == "core":
        return True
    shape, core = Reading(m, k, n, dtype), ENGINES[0]
    candidates = {**_reading_floats(shape, dtype, ctx.options["prepack"] == "auto"), core.name: _reading(core, shape)}
    return ctx.choose(f"{shape.key} {'/'.join(candidates)}", Lazy(candidates)) == core.name


def sums_pay(ctx: CompileContext, p: Product) -> bool:
    """Whether our core is faster than eager's `_int_mm`, which packs the weight at every call and without VNNI is a plain loop."""
    if native.absent() or (wanted := ctx.options.get("engine", "auto")) == "onednn":
        return False

    def eager() -> Thunk:
        x, w = _bytes((p.m, p.k), p.x), _bytes((min(p.n, max(64, MOST_MEASURED // p.k)), p.k), torch.int8).t()
        run = _operator("aten::_int_mm.default")
        return lambda: run(x, w).float()

    candidates = {ENGINES[0].name: _linear(ENGINES[0], p), "eager": eager}
    return wanted == "core" or ctx.choose(f"{p.key} sums {'/'.join(candidates)}", Lazy(candidates)) == ENGINES[0].name


def _conv(e: Engine, c: Convolution) -> Callable[[], Thunk]:
    def make() -> Thunk:
        x = _bytes(c.shape, c.x).contiguous(memory_format=torch.channels_last)
        scale, geometry = torch.full((c.weight[0],), 0.01), (c.stride, c.padding, c.dilation, c.groups)
        weight = _bytes(c.weight, torch.int8)
        rest = (c.groups,) if e.name == "core" else (scale, 0.1, 3, *geometry, c.shape)
        packed = _operator(e.pack_conv)(weight, *rest)
        return _call(e, e.conv, e.conv_sum, c, (x, packed, scale, None, 0.1, 3, c.weight[2:], *geometry))

    return make


def _onednn_takes(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies this float type here; what it refuses is computed by eager."""
    return torch.backends.mkldnn.is_available() and (dtype not in HALVES or HALVES[dtype] in half_features())


def _float_linear(w: torch.Tensor, m: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the product of m rows with a weight that is not quantized."""
    if not _onednn_takes(w.dtype):
        few = few_rows(choices.Product(m, w.shape[1], w.shape[0], w.dtype, bias=False)) if m <= MOST_GEMV_ROWS else None
        return lambda x: few(x, w, None) if few else torch.nn.functional.linear(x, w)
    packed, run = torch.ops.mkldnn._reorder_linear_weight(w, m), torch.ops.mkldnn._linear_pointwise
    return lambda x: run(x, packed, None, "none", [], "")


def _between_bytes(shape: Product | Convolution, x: torch.Tensor, dtype: torch.dtype, run: Callable[..., torch.Tensor]) -> Thunk:
    """Return a float product that reads and stores bytes, as its quantized neighbours require."""
    if shape.adds is None:
        return lambda: run(x.to(dtype)).to(shape.out)
    y = run(x.to(dtype)).to(shape.adds)
    return lambda: torch.add(run(x.to(dtype)), y).to(shape.out)


def _linear_floats(p: Product, dtype: torch.dtype, admitted: bool) -> Makers:
    n = min(p.n, max(64, MOST_MEASURED // p.k))

    def library() -> Thunk:
        return _between_bytes(p, _bytes((p.m, p.k), p.x), dtype, _float_linear(torch.ones(n, p.k, dtype=dtype), p.m))

    def kernel() -> Thunk:
        return _between_bytes(p, _bytes((p.m, p.k), p.x), dtype, own_product(own.kernel_of(dtype), p.m, p.k, n))

    return {FLOATS: library, **({OWN_FLOATS: kernel} if admitted and own.fits(p.m, p.k, dtype) else {})}


def _conv_floats(c: Convolution, dtype: torch.dtype, admitted: bool) -> Makers:
    batch, channels, height, width = c.shape
    pixels, n = batch * height * width, c.weight[0]
    pointwise = c.groups == 1 and set(c.weight[2:]) == set(c.stride) == {1} and set(c.padding) == {0}

    def library() -> Thunk:
        geometry = c.padding, c.stride, c.dilation, c.groups
        x = _bytes(c.shape, c.x).contiguous(memory_format=torch.channels_last)
        w = torch.ones(c.weight, dtype=dtype)
        if not _onednn_takes(dtype):
            eager = torch.nn.functional.conv2d
            return _between_bytes(c, x, dtype, lambda x: eager(x, w, None, c.stride, c.padding, c.dilation, c.groups))
        packed = torch.ops.mkldnn._reorder_convolution_weight(w, *geometry, c.shape)
        run = torch.ops.mkldnn._convolution_pointwise
        return _between_bytes(c, x, dtype, lambda x: run(x, packed, None, *geometry, "none", [], ""))

    def kernel() -> Thunk:
        """A residual of the kernel's type is added in its call."""
        adds = c.adds is dtype
        run, others = own_product(own.kernel_of(dtype, add=adds), pixels, channels, n), [torch.ones(pixels, n, dtype=dtype)] * adds
        shape = replace(c, adds=None) if adds else c
        return _between_bytes(shape, _bytes((pixels, channels), c.x), dtype, lambda x: run(x, *others))

    return {FLOATS: library, **({OWN_FLOATS: kernel} if admitted and pointwise and own.fits(pixels, channels, dtype) else {})}


FLOAT_MAKERS: Mapping[type, Callable[[Any, torch.dtype, bool], Makers]] = {
    Product: _linear_floats,
    Convolution: _conv_floats,
    Reading: _reading_floats,
}
"""Makers of a float layer's timed calls: oneDNN's and, if the last argument admits it, our own kernel's."""
MAKERS: Mapping[type, Callable[[Engine, Any], Callable[[], Thunk]]] = {
    Product: _linear,
    Convolution: _conv,
    Dynamic: _dynamic,
    Reading: _reading,
}
"""Makers of the timed call, by the kind of shape measured."""


def bare(op: str, sizes: Sequence[Any]) -> dict[str, Thunk]:
    """Return each engine's call of a requantized uint8 "linear" of (m, k, n) or "conv" of (input, weight, stride, groups)."""
    if op == "linear":
        m, k, n = sizes
        shape: Product | Convolution = Product(m, k, n, torch.uint8, torch.uint8)
    else:
        x, w, stride, groups = sizes
        edges = (stride, stride), (w[2] // 2, w[3] // 2), (1, 1)
        shape = Convolution(tuple(x), tuple(w), *edges, groups, torch.uint8, torch.uint8)
    return {e.name: MAKERS[type(shape)](e, shape)() for e in present()}

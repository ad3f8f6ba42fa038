"""Choose the fastest form of a library call for a shape, by short measurements on tensors of that shape
that the host remembers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import cycle
from typing import Any, TypeAlias, TypeVar

import torch

from fusewright.interface import CompileContext, TensorSpec
from fusewright.toolkit.backend.candidates import Lazy, Thunk
from fusewright.toolkit.ir.types import from_torch, to_torch
from fusewright_cpu.kernels.by_hand import DEPTHWISE_CHANNELS, Attention, Depthwise, DirectConv, FirstConv, Gemv
from fusewright_cpu.onednn import own
from fusewright_cpu.onednn.patterns import POST_OPS
from fusewright_cpu.run.jit import compile_kernels

Made = TypeVar("Made")

PROXY_FLOPS = 8e8
"""Products above this are measured on fewer columns, so that a candidate takes no more than a few
milliseconds."""

FEWEST_BIASED = 12
"""The fewest rows of MKL's packed product with a bias."""

PROXY_ELEMENTS = 1 << 23
"""The largest weight that a measurement allocates."""

ELEMENT = 2.0**-6
"""The elements of operands and weights. Sums stay small: of large ones, an exponential is no normal number, which takes a CPU a
hundred times as long."""

CORE_CACHE, MOST_COPIED, MOST_COPIES = 2 << 20, 32 << 20, 32
"""Bytes of the largest cache that a core has to itself, the most bytes of copies of one weight, and the most of these."""


@dataclass(frozen=True)
class Fitted:
    """Constants that were fitted on one machine. Choices that depend on them are still measured wherever the backend runs."""

    source: str
    packed_gain: float
    """The least speed-up for which a weight is packed, as the packed copy doubles its memory."""
    copy: float
    """Time of a kernel that transposes a matrix, relative to a plain copy of it."""
    small_product: int
    """The number of multiplications below which a bf16 product of symbolic size stays with eager: oneDNN's fixed cost of 12 us is
    more than the product takes."""
    mkl_flops: float
    """The least work for which a weight in MKL's layout is measured: below it, eager's call packs the weight in no time."""
    gemv_weight: int
    """The least elements of a weight for which our product of few rows is measured: smaller ones stay in a cache."""
    tiny_product: int
    """The most multiplications for which it is measured as well: eager's call takes longer than its product there."""


FITTED = Fitted(
    "2-core AMD Zen 5 virtual machine (AVX-512), 2026-11-21, docs/studies/onednn.md",
    packed_gain=1.04, copy=1.5, small_product=1 << 15, mkl_flops=1e6, gemv_weight=1 << 18,
    tiny_product=1 << 15,
)  # fmt: skip


Matrix: TypeAlias = Callable[[int, int, bool, torch.dtype], torch.Tensor]
"""Makes an operand from rows, columns, whether rows are dense, and dtype."""


def penalised(run: Thunk, factor: float) -> Thunk:
    """Return `run` slowed down by `factor`."""

    def slow() -> None:
        start = time.perf_counter()
        run()
        end = start + (time.perf_counter() - start) * factor
        while time.perf_counter() < end:
            pass

    return slow


@dataclass(frozen=True)
class Product:
    """x[m, k] @ w[n, k].T, with the layouts at hand. `x_rows`, `w_rows`: whether the last dimension is the
    dense one."""

    m: int
    k: int
    n: int
    dtype: torch.dtype
    bias: bool = True
    x_rows: bool = True
    w_rows: bool = True

    @property
    def key(self) -> str:
        layout = ("n" if self.x_rows else "t") + ("t" if self.w_rows else "n")
        dtype = str(self.dtype).removeprefix("torch.")
        return f"product {dtype} {self.m}x{self.k}x{self.n} {layout}{' bias' if self.bias else ''}"

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.k * self.n

    def proxy(self) -> Product:
        """Return a product that is quick to measure and behaves alike: itself if it is hardly larger, otherwise one of fewer
        columns, in multiples of a cache line."""
        most = min(PROXY_FLOPS / (2.0 * self.m * self.k), PROXY_ELEMENTS / self.k)
        if self.n <= 2 * most:  # another number of columns divides otherwise among threads
            return self
        return replace(self, n=max(64, int(most) // 64 * 64))

    @property
    def packed_forms(self) -> tuple[str, ...]:
        """The forms with a weight that was packed for this number of rows: oneDNN's, MKL's where torch has it, and our kernel's. Of
        few rows MKL's adds the products to the bias one by one (one row on an Intel CPU, nine of the first eleven numbers on an
        AMD), with up to 60 times the error of eager's where these are small."""
        mkl = self.dtype is torch.float32 and self.flops >= FITTED.mkl_flops and torch.backends.mkl.is_available()
        mkl = mkl and (self.m >= FEWEST_BIASED or not self.bias)
        ours = self.x_rows and own.fits(self.m, self.k, self.dtype)
        return (*(("mkl",) if mkl else ()), *((own.FORM,) if ours else ()), "packed")


Post: TypeAlias = tuple[str, Sequence[float], str]
"""A post-op of oneDNN's calls: attribute, scalars and algorithm."""


@dataclass(frozen=True)
class Unary:
    """A unary op after a product: as oneDNN's post-op (attribute, scalars and algorithm), and as a call that writes eager's result
    over its argument, in place of the loop kernel that follows a product without post-ops."""

    post: Post = ("none", (), "")
    apart: Callable[[torch.Tensor], object] = lambda product: product
    rides: bool = True
    """Whether oneDNN computes it in its call."""
    own: tuple[str, tuple[float, ...]] = ("", ())
    """Name and scalars of our own kernel's activation."""

    @property
    def key(self) -> str:
        attr, scalars, algorithm = self.post
        return "" if attr == "none" else f" {attr}{list(scalars)}{algorithm}{'' if self.rides else ' apart'}"


NOTHING = Unary()


def linear_form(ctx: CompileContext, product: Product, forms: Sequence[str], after: Unary = NOTHING) -> str:
    """Return the fastest of `forms`. "aten" is eager's call (MKL for fp32); "dense", "packed" and "mkl" are oneDNN's call with the
    weight as it is, and a weight in oneDNN's or MKL's layout; "copied" is "dense" after a kernel has copied a transposed x to rows,
    for which oneDNN's own copy takes several times as long; "own" and "gemv" are our kernels."""
    if len(forms) == 1:
        return forms[0]
    matrix = cache(_matrix)
    candidates = {f: _linear_thunk(product.proxy(), f, matrix, product.n, after) for f in forms}
    return ctx.choose(f"{product.key}{after.key} {'/'.join(forms)}", Lazy(candidates))


def _linear_thunk(p: Product, form: str, matrix: Matrix, columns: int = 0, after: Unary = NOTHING) -> Callable[[], Thunk]:
    """Return a product in one form, on operands that `matrix` makes. `p` may be a proxy with fewer columns: the copy of x is then
    scaled in proportion."""

    def make() -> Thunk:
        x = matrix(p.m, p.k, p.x_rows or form == "copied", p.dtype)
        w = matrix(p.n, p.k, p.w_rows, p.dtype)
        b = torch.full((p.n,), 0.5, dtype=p.dtype) if p.bias else None
        weights = partial(in_turn, p.n, p.k, p.dtype)

        def fused(weight: torch.Tensor) -> Any:
            if after.rides:
                return torch.ops.mkldnn._linear_pointwise(x, weight, b, *after.post)
            return after.apart(torch.ops.mkldnn._linear_pointwise(x, weight, b, *NOTHING.post))

        if form == own.FORM:
            kernel = own.kernel_of(p.dtype, p.bias, False, after.own[0], p.m, columns or p.n)
            run = own_product(kernel, p.m, p.k, p.n, after.own[1])
            return penalised(lambda: run(x), FITTED.packed_gain)
        if form == "mkl":
            turn = weights(lambda: torch.ops.mkl._mkl_reorder_linear_weight(w, p.m))
            mkl = torch.ops.mkl._mkl_linear
            return penalised(lambda: after.apart(mkl(x, next(turn), w, b, p.m)), FITTED.packed_gain)
        if form == "packed":
            turn = weights(lambda: torch.ops.mkldnn._reorder_linear_weight(w, p.m))
            return penalised(lambda: fused(next(turn)), FITTED.packed_gain)
        turn = weights(w.clone)
        if form == own.FEW_ROWS:
            few = few_rows(p)
            return lambda: after.apart(few(x, next(turn), b))
        if form == "aten":
            return lambda: after.apart(torch.nn.functional.linear(x, next(turn), b))
        if form == "dense":
            return lambda: fused(next(turn))
        part = x.view(-1)[: max(1, int(FITTED.copy * x.numel() * p.n / max(columns, p.n)))]
        target = torch.empty_like(part)
        return lambda: (target.copy_(part), fused(next(turn)))

    return make


def in_turn(n: int, k: int, dtype: torch.dtype, make: Callable[[], Made]) -> Iterator[Made]:
    """Yield equal weights [n, k], or what holds one, in turn: in a model, those of other layers push one out of the cores' caches,
    and forms of a product differ in what that costs. (A weight in MKL's layout cannot be copied.)"""
    cached = min(MOST_COPIED, torch.get_num_threads() * CORE_CACHE)
    return cycle([make() for _ in range(min(MOST_COPIES, math.ceil(cached / max(1, n * k * dtype.itemsize))))])


def own_product(kernel: own.Linear, m: int, k: int, n: int, scalars: Sequence[float] = ()) -> Callable[..., torch.Tensor]:
    """Return our own kernel with weights [n, k] to measure it with: a function of m dense rows, and of those that it adds."""
    launch, wide = compile_kernels([kernel]).launcher(kernel).bound((m, n, k, k), scalars), own.padded(kernel, n)
    dtype = to_torch(kernel.dtype)
    turn = in_turn(n, k, dtype, lambda: torch.full((wide, k), ELEMENT, dtype=dtype))
    bias = [torch.full((wide,), 0.5)] if kernel.bias else []

    def run(*rows: torch.Tensor) -> torch.Tensor:
        out = torch.empty_strided((m, n), (n, 1), dtype=dtype)
        x, *other = rows
        launch(x, next(turn), *bias, *other, out)
        return out

    return run


def few_rows(p: Product) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]:
    """Return our own kernel for a product of few rows, as a function of input, weight [n, k] and bias."""
    kind = from_torch(p.dtype)
    kernel = Gemv(p.m, kind, kind, kind if p.bias else "")
    launch = compile_kernels([kernel]).launcher(kernel).bound((p.n, p.k))

    def run(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = torch.empty_strided((p.m, p.n), (p.n, 1), dtype=p.dtype)
        launch(x, w, out) if bias is None else launch(x, w, bias, out)
        return out

    return run


def siblings_form(ctx: CompileContext, m: int, k: int, widths: Sequence[int], dtype: torch.dtype, bias: bool) -> str:
    """Return the packed form of one product with concatenated weights if it beats separate ones; else "". Whether it does is
    measured in oneDNN's form alone: packing every weight for MKL too would make first calls longer."""
    matrix = cache(_matrix)
    whole = Product(m, k, sum(widths), dtype, bias)

    def separate() -> Thunk:
        thunks = [_linear_thunk(Product(m, k, n, dtype, bias), "packed", matrix)() for n in widths]
        return lambda: [t() for t in thunks]

    key = f"siblings {str(dtype).removeprefix('torch.')} {m}x{k}x{'+'.join(map(str, widths))}"
    candidates = Lazy({"separate": separate, "together": _linear_thunk(whole, "packed", matrix)})
    return linear_form(ctx, whole, whole.packed_forms) if ctx.choose(key, candidates) == "together" else ""


def attention_form(
    ctx: CompileContext, kernel: Attention, specs: Sequence[TensorSpec], sizes: Sequence[int], scale: float, built: list[object]
) -> str:
    """Return "eager" (torch's own kernel) or "kernel". `specs`: query, key, value, the mask if any, and the result; `sizes` and
    `scale` are the kernel's arguments. `built` receives the kernel's code if it was built for the measurement: while the code is
    held, the plan need not build it again."""

    def tensors() -> list[torch.Tensor]:
        made = [torch.empty_strided(s.shape, s.stride, dtype=s.dtype) for s in specs]  # type: ignore[arg-type]
        return [t.fill_(1 if t.dtype is torch.bool else 0.5) for t in made]

    def eager() -> Thunk:
        q, k, v, *mask, _ = tensors()
        given = mask[0] if mask else None
        attention = torch.nn.functional.scaled_dot_product_attention
        return lambda: attention(q, k, v, given, is_causal=kernel.causal, scale=scale)

    def own() -> Thunk:
        launcher, given = compile_kernels([kernel]).launcher(kernel), tensors()
        built.append(launcher)
        launch = launcher.bound(sizes, (scale,))
        return lambda: launch(*given)

    key = f"{kernel.name} eager/kernel {'x'.join(map(str, sizes))}"
    return ctx.choose(key, Lazy({"eager": eager, "kernel": own}))


_EAGER = {"silu": torch.ops.aten.silu.out, "hardswish": torch.ops.aten.hardswish.out}
"""Activations that cost more than a pass over memory."""
_OVER: Mapping[str, Callable[..., torch.Tensor]] = {"relu": torch.relu_, "clamp": torch.clamp_}
"""Activations that oneDNN's call must not compute (see `PostOp.exact`), over its result."""


def depthwise_form(
    ctx: CompileContext,
    kernel: Depthwise,
    sizes: Sequence[int],
    padding: Sequence[int],
    limits: Sequence[float],
    built: list[object],
    apart: bool = False,
) -> str:
    """Return "onednn" or "kernel" for a depthwise convolution of dense channels-last images. `sizes`, `limits`: the kernel's
    arguments; `built` as in `attention_form`. In front of oneDNN's, another call of it computes the kernel's first activation,
    which takes as long as eager's at least. `apart`: oneDNN's call does not compute the last one."""
    n, c, h, w, oh, ow, *_ = sizes
    dtype = to_torch(kernel.dtype)

    def image(*shape: int) -> torch.Tensor:
        return torch.full(shape, 0.5, dtype=dtype).contiguous(memory_format=torch.channels_last)

    def onednn() -> Thunk:
        x, weight, bias = image(n, c, h, w), image(c, 1, *kernel.kernel), torch.zeros(c, dtype=dtype)
        geometry = (list(padding), list(kernel.stride), [1, 1], c)
        packed = torch.ops.mkldnn._reorder_convolution_weight(weight, *geometry, list(x.shape))
        scalars = [v for s, v in zip(kernel.scalars, limits, strict=True) if s.name.startswith("after")]
        post = (POST_OPS[kernel.after].attr, scalars, "") if kernel.after and not apart else ("none", [], "")
        call, made = torch.ops.mkldnn._convolution_pointwise, torch.empty_like(x)
        if apart:
            last = _OVER[kernel.after]
            return lambda: last(call(x, packed, bias, *geometry, *post), *scalars)
        if kernel.before in _EAGER:
            first = _EAGER[kernel.before]
            return lambda: (first(x, out=made), call(x, packed, bias, *geometry, *post))
        return lambda: call(x, packed, bias, *geometry, *post)

    def own() -> Thunk:
        launcher, width = compile_kernels([kernel]).launcher(kernel), -(-c // DEPTHWISE_CHANNELS) * DEPTHWISE_CHANNELS
        built.append(launcher)
        weight, bias = torch.full((math.prod(kernel.kernel), width), 0.5), torch.zeros(width)
        given = [image(n, c, h, w), weight, bias, image(n, c, oh, ow)]
        launch = launcher.bound(sizes, limits)
        return lambda: launch(*given)

    key = f"{kernel.name}{' apart' if apart else ''} packed/own {'x'.join(map(str, sizes))}"
    return ctx.choose(key, Lazy({"onednn": onednn, "kernel": own}))


def pointwise_form(
    ctx: CompileContext, kernel: own.Linear, image: Sequence[int], columns: int, scalars: Sequence[float], post: Post, apart: bool,
    built: list[object], parts: int = 1,
) -> str:  # fmt: skip
    """Return "packed" (oneDNN) or "own" for a 1x1 convolution of dense channels-last images. `apart`: its activation is not
    computed in oneDNN's call, nor is an addition; `post`, `parts` as in `Convolution`, `built` as in `attention_form`."""
    n, c, h, w = image
    dtype = to_torch(kernel.dtype)

    def filled(channels: int) -> torch.Tensor:
        return torch.full((n, channels, h, w), ELEMENT, dtype=dtype).contiguous(memory_format=torch.channels_last)

    def onednn() -> Thunk:
        x, other = filled(c), filled(columns)
        weight = torch.full((columns * parts, c // parts, 1, 1), ELEMENT, dtype=dtype)
        bias, geometry = torch.zeros(columns * parts), ([0, 0], [1, 1], [1, 1], parts)
        pack = torch.ops.mkldnn._reorder_convolution_weight
        turn = in_turn(columns, c, dtype, lambda: pack(weight, *geometry, list(x.shape)))
        call = torch.ops.mkldnn._convolution_pointwise
        if kernel.add or parts > 1:  # one loop kernel adds and activates
            return lambda: torch.add(call(x, next(turn), bias, *geometry, "none", [], "")[:, :columns], other, out=other)
        return lambda: (made := call(x, next(turn), bias, *geometry, *post), made.relu_() if apart else None)

    def ours() -> Thunk:
        run, rows = own_product(kernel, n * h * w, c, columns, scalars), [filled(c), *([filled(columns)] if kernel.add else [])]
        built.append(run)
        return lambda: run(*rows)

    split, rides = f" {parts}" if parts > 1 else "", f" {post[0]}" if post != NOTHING.post else ""
    key = f"{kernel.name} packed/own {'x'.join(map(str, image))}x{columns}{split}{rides}{' apart' if apart else ''}"
    return ctx.choose(key, Lazy({"packed": onednn, own.FORM: ours}))


@dataclass(frozen=True)
class Convolution:
    """A convolution of dense channels-last fp32 images: the shapes of image and weight, padding, stride and dilation, groups."""

    image: tuple[int, ...]
    weight: tuple[int, ...]
    geometry: tuple[list[int], ...]
    groups: int
    parts: int
    """Into how many sums it is split in oneDNN's call, whose results are added in another pass, as is a residual."""
    apart: bool
    """Whether its activation is not computed in oneDNN's call."""
    post: Post = NOTHING.post
    """The activation that is, if nothing is between them."""

    @property
    def key(self) -> str:
        around = " ".join("x".join(map(str, sizes)) for sizes in (self.image, self.weight, *self.geometry))
        rides = f" {self.post[0]}" if self.post != NOTHING.post else ""
        return f"{around} {self.groups} {self.parts}{rides}{' apart' if self.apart else ''}"


def _filled(*shape: int) -> torch.Tensor:
    """Return images, channels-last, of equal numbers."""
    return torch.full(shape, ELEMENT).contiguous(memory_format=torch.channels_last)


def conv_form(
    ctx: CompileContext, kernel: DirectConv, conv: Convolution, sizes: Sequence[int], scalars: Sequence[float], built: list[object]
) -> str:
    """Return "packed" (oneDNN) or "own" for a convolution. `sizes`, `scalars`: the kernel's arguments; `built` as in
    `attention_form`."""
    channels, of_group, *_ = conv.weight
    k = math.prod(conv.weight[1:])

    def ours() -> Thunk:
        launcher = compile_kernels([kernel]).launcher(kernel)
        built.append(launcher)
        wide = conv.groups * own.padded(kernel, channels // conv.groups)
        turn = in_turn(channels, k, torch.float32, lambda: torch.full((wide, k), ELEMENT))
        x, other = _filled(*conv.image), _filled(conv.image[0], channels, *sizes[7:9])
        more = [*([torch.zeros(channels + kernel.columns)] if kernel.bias else []), *([other] if kernel.add else [])]
        more += [] if kernel.pointwise else [torch.zeros(of_group)]
        launch = launcher.bound(sizes, scalars)
        return lambda: launch(x, next(turn), *more, torch.empty_like(other))

    key = f"{kernel.name} packed/own {conv.key}"
    onednn = partial(_onednn_conv, conv, kernel.add, sizes[7:9], partial(_filled, *conv.image))
    return ctx.choose(key, Lazy({"packed": onednn, own.FORM: ours}))


def _onednn_conv(conv: Convolution, add: bool, points: Sequence[int], image: Callable[[], torch.Tensor]) -> Thunk:
    """Return oneDNN's call with what it does not compute, for a result of so many points; images in another layout are copied."""
    (channels, of_group, *window), parts, x = conv.weight, conv.parts, image()
    other, bias = _filled(x.shape[0], channels, *points).to(x.dtype), torch.zeros(channels * parts)
    weight = _filled(channels * parts, of_group // parts, *window).to(x.dtype)
    geometry = (*conv.geometry, conv.groups * parts)
    pack, call = torch.ops.mkldnn._reorder_convolution_weight, torch.ops.mkldnn._convolution_pointwise
    turn = in_turn(channels, math.prod(conv.weight[1:]), x.dtype, lambda: pack(weight, *geometry, list(x.shape)))

    def run() -> None:
        made = call(x.contiguous(memory_format=torch.channels_last), next(turn), bias, *geometry, *conv.post)
        if add or parts > 1:  # one loop kernel adds and activates
            torch.add(made[:, :channels], other, out=other)
        elif conv.apart:
            made.relu_()

    return run


def first_form(
    ctx: CompileContext, kernel: FirstConv, conv: Convolution, sizes: Sequence[int], scalars: Sequence[float], built: list[object]
) -> str:
    """Return "packed" (oneDNN) or "own" for a convolution of few channels. `sizes`, `scalars`: the kernel's arguments, with the
    strides of the image; `built` as in `attention_form`."""
    dtype, steps = to_torch(kernel.dtype), tuple(sizes[-4:])

    def image() -> torch.Tensor:
        return torch.empty_strided(conv.image, steps, dtype=dtype).fill_(ELEMENT)

    def ours() -> Thunk:
        launcher = compile_kernels([kernel]).launcher(kernel)
        built.append(launcher)
        (_, n, k, *_), x = sizes, image()
        wide = -(-n // kernel.columns) * kernel.columns
        weight, out = torch.full((wide, k), ELEMENT), _filled(conv.image[0], n, *sizes[6:8]).to(dtype)
        more = [*([torch.zeros(wide)] if kernel.bias else []), *([out.clone()] if kernel.add else [])]
        launch = launcher.bound(sizes, scalars)
        return lambda: launch(x, weight, *more, out)

    onednn = partial(_onednn_conv, conv, kernel.add, sizes[6:8], image)
    key = f"{kernel.name} packed/own {conv.key} {'x'.join(map(str, steps))}"
    return ctx.choose(key, Lazy({"packed": onednn, own.FORM: ours}))


@dataclass(frozen=True)
class Transposed:
    """A transposed convolution of dense channels-last fp32 images: the shapes of image, weight and result, padding, output padding,
    stride and dilation, groups."""

    image: tuple[int, ...]
    weight: tuple[int, ...]
    result: tuple[int, ...]
    geometry: tuple[list[int], ...]
    groups: int
    apart: bool
    """Whether its activation is not computed in oneDNN's call."""

    @property
    def key(self) -> str:
        around = " ".join("x".join(map(str, sizes)) for sizes in (self.image, self.weight, *self.geometry))
        return f"{around} {self.groups}{' apart' if self.apart else ''}"


def transposed_form(
    ctx: CompileContext, kernel: DirectConv, conv: Transposed, sizes: Sequence[int], scalars: Sequence[float], built: list[object]
) -> str:
    """Return "packed" (oneDNN) or "own" for a transposed convolution, as `conv_form` does."""

    def onednn() -> Thunk:
        x, bias, other = _filled(*conv.image), torch.zeros(conv.result[1]), _filled(*conv.result)
        pack, call = torch.ops.mkldnn._reorder_convolution_transpose_weight, torch.ops.mkldnn._convolution_transpose_pointwise
        weight, geometry = torch.full(conv.weight, ELEMENT), (*conv.geometry, conv.groups)
        turn = in_turn(conv.weight[0], math.prod(conv.weight[1:]), torch.float32, lambda: pack(weight, *geometry, conv.image))

        def run() -> None:
            made = call(x, next(turn), bias, *geometry, "none", [], "")
            if kernel.add:  # one loop kernel adds and activates
                torch.add(made, other, out=other)
            elif conv.apart:
                made.relu_()

        return run

    def ours() -> Thunk:
        launcher = compile_kernels([kernel]).launcher(kernel)
        built.append(launcher)
        x, other = _filled(*conv.image), _filled(*conv.result)
        wide = conv.groups * math.prod(conv.geometry[2]) * -(-sizes[1] // kernel.columns) * kernel.columns
        turn = in_turn(wide, sizes[2], torch.float32, lambda: torch.full((wide, sizes[2]), ELEMENT))
        more = [*([torch.zeros(conv.result[1] + kernel.columns)] if kernel.bias else []), *([other] if kernel.add else [])]
        more.append(torch.zeros(sizes[4]))
        launch = launcher.bound(sizes, scalars)
        return lambda: launch(x, next(turn), *more, torch.empty_like(other))

    key = f"{kernel.name} packed/own {conv.key}"
    return ctx.choose(key, Lazy({"packed": onednn, own.FORM: ours}))


def _matrix(rows: int, columns: int, row_major: bool, dtype: torch.dtype) -> torch.Tensor:
    if row_major:
        return torch.full((rows, columns), ELEMENT, dtype=dtype)
    return torch.full((columns, rows), ELEMENT, dtype=dtype).t()

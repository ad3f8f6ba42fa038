"""Signatures of the handwritten kernels: name, buffers, sizes, scalars and supported targets, without the emitters.
Launching code from the plan cache needs only these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fusewright.toolkit.ir.ir import Buffer, Scalar
from fusewright_cpu.target import CpuTarget

MOST_WIDTH = 256
"""Most elements of an attention head."""
SIZES = ("batch", "heads", "rows", "keys")
STRIDES = ("b", "h", "l")


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention for one type and head width; lengths, strides and the scale are arguments.

    Buffers: query, key, value, the mask if there is one, and the result, all with a dense last dimension. `mask` is the
    type of a mask added to the scores ("f32", "bf16"), or "bool" for a mask of keys to keep. Rows with no visible key are 0.
    """

    dtype: str
    width: int
    mask: str = ""
    causal: bool = False

    @property
    def name(self) -> str:
        return f"attention_{self.dtype}_{self.width}{'_' + self.mask if self.mask else ''}{'_causal' if self.causal else ''}"

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        masks = (Buffer("mask", self.mask, "in"),) if self.mask else ()
        read = (Buffer(n, self.dtype, "in") for n in ("query", "key", "value"))
        return (*read, *masks, Buffer("out", self.dtype, "out"))

    @property
    def symbols(self) -> tuple[str, ...]:
        """The sizes, then for every buffer the strides of batch, head and row, in elements."""
        return (*SIZES, *(f"{b.name}_{s}" for b in self.buffers for s in STRIDES))

    @property
    def scalars(self) -> tuple[Scalar, ...]:
        return (Scalar("scale", "f32"),)

    def refused(self, target: CpuTarget) -> str:
        """Return why the target is not supported, or ""."""
        if not (target.masks and target.fma):
            return "needs AVX2 with FMA, AVX-512, or NEON"
        if self.dtype not in ("f32", "bf16") or self.width > MOST_WIDTH:
            return f"only fp32 and bf16, and heads of up to {MOST_WIDTH}"
        return ""


MOST_GEMV_ROWS = 4
"""Most rows of `x`; with more, a library's product is faster."""
FLOATS = ("f32", "bf16")


@dataclass(frozen=True, slots=True)
class Gemv:
    """A product of few rows, for one number of rows and types; lengths are arguments.

    `x` is [rows, k] and `out` [rows, n] of type `dtype`, `weight` [n, k] of "f32", "bf16" or "i8", all dense. int8 weights
    have an fp32 `scale` [n] and, with `zeros`, an fp32 `zero` [n]. `bias` is the type of a vector [n], or "".
    """

    rows: int
    dtype: str
    weight: str
    bias: str = ""
    zeros: bool = False

    @property
    def name(self) -> str:
        more = "".join(f"_{n}" for n in ("bias", "zeros") if getattr(self, n))
        return f"gemv_{self.rows}_{self.dtype}_{self.weight}{more}"

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        of_rows = {"scale": self.weight == "i8", "zero": self.zeros}
        given = (Buffer(name, "f32", "in") for name, there in of_rows.items() if there)
        bias = (Buffer("bias", self.bias, "in"),) if self.bias else ()
        read = (Buffer("x", self.dtype, "in"), Buffer("weight", self.weight, "in"))
        return (*read, *given, *bias, Buffer("out", self.dtype, "out"))

    @property
    def symbols(self) -> tuple[str, ...]:
        return ("n", "k")

    @property
    def scalars(self) -> tuple[Scalar, ...]:
        return ()

    def refused(self, target: CpuTarget) -> str:
        """Return why the target is not supported, or ""."""
        if not (target.masks and target.fma):
            return "needs AVX2 with FMA, AVX-512, or NEON"
        if not 1 <= self.rows <= MOST_GEMV_ROWS:
            return f"only for up to {MOST_GEMV_ROWS} rows"
        if self.dtype not in FLOATS or self.weight not in (*FLOATS, "i8") or self.bias not in ("", *FLOATS):
            return "only fp32 and bf16, with weights of fp32, bf16 or int8"
        return "only weights of int8 have zero points" if self.zeros and self.weight != "i8" else ""


FORMS = {"smmla": ("i8mm", 2, 8), "sdot": ("dotprod", 4, 4)}
"""Instruction -> the feature that provides it, and the columns and elements per column that a register of weights holds."""


def form_of(target: CpuTarget) -> str:
    """Return the best instruction of a target, or ""."""
    return next((form for form, (feature, *_) in FORMS.items() if target.arm and target.has(feature)), "")


@dataclass(frozen=True, slots=True)
class Int8Product:
    """The common part of int8 kernels: the types of `x` ("i8", "u8") and of `out` ("f32", "bf16", "i32").

    fp32 `w_scale`, int32 `sums` (of each weight row) and fp32 `bias` are made by `int8_linear.padded`, and so is int32 `w_zero`,
    which exists only if weights have zero points (`zeros`).
    """

    x: str
    out: str
    form: str
    bias: bool = False
    zeros: bool = False
    stem: ClassVar[str]
    symbols: ClassVar[tuple[str, ...]]

    @property
    def name(self) -> str:
        more = "".join(f"_{n}" for n in ("bias", "zeros") if getattr(self, n))
        return f"{self.stem}_{self.x}_{self.out}_{self.form}{more}"

    @property
    def scaled(self) -> bool:
        """Whether sums are scaled."""
        return self.out != "i32"

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        types = {"x": self.x, "weight": "i8"}
        types |= {"w_scale": "f32", "sums": "i32", "x_scale": "f32", "x_zero": "i32"} if self.scaled else {}
        types |= {"w_zero": "i32"} if self.zeros else {}
        types |= {"bias": "f32"} if self.bias else {}
        return (*(Buffer(n, t, "in") for n, t in types.items()), Buffer("out", self.out, "out"))

    @property
    def scalars(self) -> tuple[Scalar, ...]:
        return ()

    def refused(self, target: CpuTarget) -> str:
        """Return why the target is not supported, or ""."""
        if self.form not in FORMS or not target.arm or not target.has(FORMS[self.form][0]):
            return f"needs an Arm CPU with {' or '.join(FORMS)}"
        known = self.x in ("i8", "u8") and self.out in ("f32", "bf16")
        return "" if known else "only int8 and uint8, with results of fp32 or bf16"


@dataclass(frozen=True, slots=True)
class Int8Linear(Int8Product):
    """`x` is [m, k], `out` [m, n], `weight` is made by `int8_linear.packed`; lengths are arguments. fp32 `x_scale` and int32
    `x_zero` are [m], or [1] if `row_step` is 0. An int32 `out` holds the sums of int8 `x`, without scales, zero points and bias.
    """

    stem = "int8_linear"
    symbols = ("m", "n", "k", "row_step")

    def refused(self, target: CpuTarget) -> str:
        """Return why the target is not supported, or ""."""
        if not self.scaled and self.x == "i8" and not (self.bias or self.zeros):
            return Int8Linear("i8", "f32", self.form).refused(target)
        why = Int8Product.refused(self, target)
        return f"{why}, or sums of int8" if "results" in why else why


@dataclass(frozen=True, slots=True)
class Int8Conv(Int8Product):
    """`x` is [batch, c, h, w] and `out` [batch, columns, oh, ow], both dense and channels-last; `weight` is made by
    `int8_conv.packed`, per-column vectors by `int8_conv.padded`. fp32 `x_scale` and int32 `x_zero` are [1]; the zero point is
    representable in `x`'s type. All lengths are arguments: `int8_conv.Geometry.sizes`.
    """

    stem = "int8_conv"
    symbols = (
        "m", "n", "k", "groups", "row_step", "width", "batch", "c", "h", "w", "oh", "ow", "run", "rows", "runs", "stride_y",
        "stride_x", "pad_y", "pad_x", "dilation_y", "dilation_x",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bf16Linear:
    """fp32 `x` [m, k] and `out` [m, n]; `weight` is made by `bf16_linear.packed`, fp32 `bias` by `int8_linear.padded`. Lengths are
    arguments."""

    bias: bool = False

    @property
    def name(self) -> str:
        return f"bf16_linear{'_bias' if self.bias else ''}"

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        bias = (Buffer("bias", "f32", "in"),) if self.bias else ()
        return (Buffer("x", "f32", "in"), Buffer("weight", "bf16", "in"), *bias, Buffer("out", "f32", "out"))

    @property
    def symbols(self) -> tuple[str, ...]:
        return ("m", "n", "k")

    @property
    def scalars(self) -> tuple[Scalar, ...]:
        return ()

    def refused(self, target: CpuTarget) -> str:
        """Return why the target is not supported, or ""."""
        return "" if target.arm and target.has("bf16") else "needs an Arm CPU with bfmmla"


DEPTHWISE_CHANNELS = 32
"""Channels of a work item: whole cache lines, in bf16 one. Weights are padded to a multiple of it."""
LIMITED = frozenset({"clamp"})
"""Activations with two limits, which are arguments."""


@dataclass(frozen=True, slots=True)
class Depthwise:
    """A depthwise convolution of images, whose activations before and after it ("", "relu", "clamp" and, after it, "silu" and
    "hardswish") keep NaN.

    `x` is [n, c, h, w] with dense channels and any other strides, `out` dense and channels-last; fp32 `weight` is [taps, channels]
    and `bias` [channels], padded to whole work items. Outside of the image there are zeros, also where `before` would make another
    number of them. `columns` pixels of a row are computed together. `part`: the channels may end within a vector.
    """

    dtype: str
    kernel: tuple[int, int]
    stride: tuple[int, int]
    columns: int
    before: str = ""
    after: str = ""
    part: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "kernel", tuple(self.kernel))  # JSON has lists
        object.__setattr__(self, "stride", tuple(self.stride))

    @property
    def name(self) -> str:
        size, step = ("x".join(map(str, pair)) for pair in (self.kernel, self.stride))
        around = "".join(f"_{a}" for a in (self.before and f"of_{self.before}", self.after) if a)
        return f"depthwise_{self.dtype}_{size}_by_{step}_{self.columns}{around}{'_part' if self.part else ''}"

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        read = (Buffer("x", self.dtype, "in"), Buffer("weight", "f32", "in"), Buffer("bias", "f32", "in"))
        return (*read, Buffer("out", self.dtype, "out"))

    @property
    def symbols(self) -> tuple[str, ...]:
        """Sizes of both images, zeros above and left of `x`, and its strides in elements."""
        return ("n", "c", "h", "w", "oh", "ow", "pad_y", "pad_x", "step_n", "step_y", "step_x")

    @property
    def scalars(self) -> tuple[Scalar, ...]:
        sides = (side for side in ("before", "after") if getattr(self, side) in LIMITED)
        return tuple(Scalar(f"{side}_{end}", "f32") for side in sides for end in ("low", "high"))

    def refused(self, target: CpuTarget) -> str:
        """Return why the target is not supported, or ""."""
        return "" if target.masks and target.fma else "needs AVX2 with FMA, AVX-512, or NEON"


AMX_BLOCK = 32
"""Columns of a panel of weights, and rows that are multiplied together: the least rows of a product."""
SCALARS: Mapping[str, tuple[str, ...]] = {"clamp": ("low", "high"), "leaky_relu": ("slope",)}
"""Activations with numbers that are arguments."""


@dataclass(frozen=True, slots=True)
class AmxLinear:
    """A linear of bf16 with at least AMX_BLOCK rows. `x` is [m, k], its rows `step` elements apart, `k` a multiple of 32; `weight`
    is made by `amx_linear.packed`; fp32 `bias` is padded to whole panels; bf16 `other` and `out` are [m, n] and dense. The
    activation `after` keeps NaN."""

    bias: bool = False
    add: bool = False
    after: str = ""
    dtype: ClassVar[str] = "bf16"
    least: ClassVar[int] = AMX_BLOCK
    """Least rows."""
    columns: ClassVar[int] = AMX_BLOCK
    """Columns of a panel."""
    depth: ClassVar[int] = 32
    """`k` is a multiple of it."""

    @property
    def name(self) -> str:
        parts = ("bias" if self.bias else "", "add" if self.add else "", self.after)
        return "_".join(("amx_linear", *filter(None, parts)))

    def panels(self, n: int) -> tuple[tuple[int, int], ...]:
        """Return the number of panels of a weight of n columns, and the columns of each."""
        return ((-(-n // self.columns), self.columns),)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        bias = (Buffer("bias", "f32", "in"),) if self.bias else ()
        other = (Buffer("other", "bf16", "in"),) if self.add else ()
        return (Buffer("x", "bf16", "in"), Buffer("weight", "bf16", "in"), *bias, *other, Buffer("out", "bf16", "out"))

    @property
    def symbols(self) -> tuple[str, ...]:
        return ("m", "n", "k", "step")

    @property
    def scalars(self) -> tuple[Scalar, ...]:
        return tuple(Scalar(name, "f32") for name in SCALARS.get(self.after, ()))

    def refused(self, target: CpuTarget) -> str:
        """Return why the target is not supported, or ""."""
        return "" if target.has("amx-bf16") and target.vector_bytes == 64 else "needs AMX with bf16"


WIDE, NARROW = 48, 32
"""Columns of panels of a `VectorLinear` that has two kinds: any number of registers but one is a sum of these."""


def panels_of(n: int, columns: int, narrow: bool) -> tuple[tuple[int, int], ...]:
    """Return the numbers of panels of a weight of n columns, and the columns of each: first the wide ones. Narrow ones are two at
    most."""
    if not narrow:
        return ((-(-n // columns), columns),)
    vectors = -(-n // 16)
    wide = max(0, vectors // 3 - (vectors % 3 == 1))
    return (wide, WIDE), (-(-max(0, n - wide * WIDE) // NARROW), NARROW)


VECTOR_TILES = {32: (6, 16), 64: (8, 48)}
"""By the bytes of a register: the rows of a linear that are multiplied together, and the columns of a panel of weights."""


@dataclass(frozen=True, slots=True)
class VectorLinear:
    """A linear of fp32 with at least `rows` rows. `x` is [m, k], its rows `step` elements apart; `weight` is made by
    `vector_linear.packed`; `bias` is padded to whole panels; `other` and `out` are [m, n] and dense. `rows` by `columns` results
    are computed together. The activation `after` keeps NaN."""

    bias: bool = False
    add: bool = False
    after: str = ""
    rows: int = 8
    columns: int = 48
    narrow: bool = False
    """Whether the last panels have NARROW columns where that wastes less; the others have WIDE (AVX-512)."""
    dtype: ClassVar[str] = "f32"
    depth: ClassVar[int] = 1

    @property
    def least(self) -> int:
        return self.rows

    @property
    def name(self) -> str:
        parts = ("narrow" if self.narrow else "", "bias" if self.bias else "", "add" if self.add else "", self.after)
        return "_".join(("vector_linear", str(self.rows), str(self.columns), *filter(None, parts)))

    def panels(self, n: int) -> tuple[tuple[int, int], ...]:
        """Return the numbers of panels of a weight of n columns, and the columns of each."""
        return panels_of(n, self.columns, self.narrow)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        read = ("x", "weight", *(("bias",) if self.bias else ()), *(("other",) if self.add else ()))
        return (*(Buffer(name, "f32", "in") for name in read), Buffer("out", "f32", "out"))

    @property
    def symbols(self) -> tuple[str, ...]:
        return ("m", "n", "k", "step")

    @property
    def scalars(self) -> tuple[Scalar, ...]:
        return tuple(Scalar(name, "f32") for name in SCALARS.get(self.after, ()))

    def refused(self, target: CpuTarget) -> str:
        """Return why the target is not supported, or ""."""
        return _refused_tile(self.rows, self.columns, target)


def _refused_tile(rows: int, columns: int, target: CpuTarget) -> str:
    """Return why sums of fp32 do not fit in the registers of a target, or ""."""
    if target.arm or not (target.masks and target.fma):
        return "needs AVX2 with FMA, or AVX-512"
    vectors = rows * columns * 4 // target.vector_bytes
    fits = columns * 4 % target.vector_bytes == 0 and vectors <= target.registers - 4
    return "" if fits else "a block of sums that does not fit in registers"


@dataclass(frozen=True, slots=True)
class DirectConv:
    """A convolution of fp32 images with at least `rows` pixels in the result. `x` is [batch, groups * c, h, w] with dense channels,
    `other` and `out` are [batch, groups * n, oh, ow], dense and channels-last; `weight` is made by `direct_conv.packed`, `bias` is
    padded to whole panels; `zero` holds `c` zeros. `rows` pixels by `columns` channels are computed together. The activation
    `after` keeps NaN. `pointwise`: each pixel is multiplied alone, pixels of `x` lie `step_x` apart, and there is no `zero`.
    `transposed`: see `transposed_conv`. `narrow`: as of a `VectorLinear`, for each group."""

    rows: int
    columns: int
    bias: bool = False
    add: bool = False
    after: str = ""
    pointwise: bool = False
    transposed: bool = False
    narrow: bool = False
    dtype: ClassVar[str] = "f32"

    @property
    def name(self) -> str:
        form = "pointwise" if self.pointwise else "transposed" if self.transposed else ""
        parts = (form, "narrow" if self.narrow else "", "bias" if self.bias else "", "add" if self.add else "", self.after)
        return "_".join(("direct_conv", str(self.rows), str(self.columns), *filter(None, parts)))

    def panels(self, n: int) -> tuple[tuple[int, int], ...]:
        """Return the numbers of panels of a weight of n columns of a group, and the columns of each."""
        return panels_of(n, self.columns, self.narrow)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        given = {"bias": self.bias, "other": self.add, "zero": not self.pointwise}
        read = ("x", "weight", *(name for name, there in given.items() if there))
        return (*(Buffer(name, "f32", "in") for name in read), Buffer("out", "f32", "out"))

    @property
    def symbols(self) -> tuple[str, ...]:
        """Pixels and channels per group of the result, products of each, then the geometry; steps are strides in elements."""
        window = ("ky", "kx", "stride_y", "stride_x", "dilation_y", "dilation_x", "pad_y", "pad_x")
        whole = ("whole_y", "whole_x") if self.transposed else ()
        return ("m", "n", "k", "groups", "c", "h", "w", "oh", "ow", *window, "step_n", "step_y", "step_x", *whole)

    @property
    def scalars(self) -> tuple[Scalar, ...]:
        return tuple(Scalar(name, "f32") for name in SCALARS.get(self.after, ()))

    def refused(self, target: CpuTarget) -> str:
        """Return why the target is not supported, or ""."""
        return _refused_tile(self.rows, self.columns, target)


@dataclass(frozen=True, slots=True)
class FirstConv:
    """A convolution of images of few channels, at least `rows` pixels wide in the result. `x` is [batch, c, h, w] of any strides,
    `other` and `out` are [batch, n, oh, ow], dense and channels-last; fp32 `weight` is packed as that of a `VectorLinear` [n, k]
    with k = c * ky * kx, fp32 `bias` padded to whole panels. `rows` pixels by `columns` channels are computed together. The
    activation `after` keeps NaN."""

    dtype: str
    kernel: tuple[int, int]
    stride: tuple[int, int]
    rows: int
    columns: int
    bias: bool = False
    add: bool = False
    after: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kernel", tuple(self.kernel))  # JSON has lists
        object.__setattr__(self, "stride", tuple(self.stride))

    @property
    def name(self) -> str:
        window = "x".join(map(str, self.kernel)) + "_by_" + "x".join(map(str, self.stride))
        parts = ("bias" if self.bias else "", "add" if self.add else "", self.after)
        return "_".join(("first_conv", self.dtype, window, str(self.rows), str(self.columns), *filter(None, parts)))

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        bias = (Buffer("bias", "f32", "in"),) if self.bias else ()
        other = (Buffer("other", self.dtype, "in"),) if self.add else ()
        return (Buffer("x", self.dtype, "in"), Buffer("weight", "f32", "in"), *bias, *other, Buffer("out", self.dtype, "out"))

    @property
    def symbols(self) -> tuple[str, ...]:
        """Pixels and channels of the result, products of each, sizes of both images, zeros around `x`, and its strides."""
        steps = ("step_n", "step_c", "step_y", "step_x")
        return ("m", "n", "k", "c", "h", "w", "oh", "ow", "pad_y", "pad_x", *steps)

    @property
    def scalars(self) -> tuple[Scalar, ...]:
        return tuple(Scalar(name, "f32") for name in SCALARS.get(self.after, ()))

    def refused(self, target: CpuTarget) -> str:
        """Return why the target is not supported, or ""."""
        return _refused_tile(self.rows, self.columns, target)

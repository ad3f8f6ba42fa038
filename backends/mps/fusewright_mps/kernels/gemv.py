"""Products of a few rows with weights of 8 or 4 bits: `out[m, n] = sum(x[m, k] * (q[n, k] - zero[n, g]) * scale[n, g]) + bias[n]`.

Decoding reads every weight once, so all that counts is how few bytes that is. A SIMD group computes `rows` outputs together, its
lanes side by side along k: a load of a lane is 4 bytes of weights, one of the group 128 bytes in a row, and `x` is read once for
all its outputs. Zeros cost one sum of `x` for each group, not a subtraction for each weight.

Weights of 4 bits that torchao keeps in 8 (`IntxUnpackedToInt8Tensor`) are split once into planes of nibbles, low and high. The
second plane is read only for rows whose flag says that some weight is no signed nibble, so that 4-bit weights cost 4 bits and
others are right too. Weights that torch or torchao has packed for MPS itself are unsigned nibbles, low ones first, and are read as
they are: `out[m, n] = sum(x[m, k] * ((q[n, k] - middle) * scale[n, g] + zero[n, g]))`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from fusewright.toolkit.ir.ir import Buffer
from fusewright_mps.kernels.handwritten import SHORT, Handwritten, vector
from fusewright_mps.target import Target

LANES = 32
MOST_ROWS = 4
"""Of x."""
SIMD_GROUPS = 2
"""In a threadgroup: little is shared, and small groups spread over all cores."""


Packed: TypeAlias = Literal["", "tinygemm", "affine"]
"""Unsigned nibbles: "tinygemm" is torch's `_weight_int4pack_mm`, scale and zero [k / group, n, 2] and a middle of 8; "affine" is
torchao's `_linear_fp_act_4bit_weight`, scale and zero [n, k / group] each and a middle of 0."""


@dataclass(frozen=True, slots=True)
class Gemv(Handwritten):
    """x [m, k] of `dtype` (Metal's name), weights [n, k] of `bits`, scale [n, k / group] of `dtype`, zero [n, k / group] of type
    `zeros` (Metal's name, or "" for none), bias [n] of `dtype` where `biased`. `rows` are outputs of a SIMD group. k is a multiple
    of 8, and so is `group`. Weights of 4 bits are planes, or `packed`."""

    kind: ClassVar[str] = "gemv"

    dtype: str
    bits: int
    m: int
    n: int
    k: int
    group: int
    zeros: str
    biased: bool
    rows: int
    packed: Packed = ""

    @property
    def name(self) -> str:
        parts = (
            f"gemv{self.bits}",
            self.packed,
            SHORT[self.dtype],
            f"m{self.m}",
            f"r{self.rows}",
            f"zero_{SHORT[self.zeros]}" if self.zeros else "",
            "bias" * self.biased,
        )
        return "_".join(p for p in parts if p)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        x = SHORT[self.dtype]
        planes = [("low", "u8")] if self.packed else [("low", "u8"), ("high", "u8"), ("flags", "i32")]
        weights = [("w", "i8")] if self.bits == 8 else planes
        rest = [("scale", x), *[("zero", SHORT[z]) for z in (self.zeros,) if z], *[("bias", x)] * self.biased]
        given = (Buffer(n, t) for n, t in [("x", x), *weights, *rest])
        return (*given, Buffer("out", x, "out"))

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.n, self.k, self.group

    @property
    def threads(self) -> tuple[int, int, int]:
        return -(-self.n // (self.rows * SIMD_GROUPS)) * SIMD_GROUPS * LANES, 1, 1

    @property
    def threadgroup(self) -> tuple[int, int, int]:
        return SIMD_GROUPS * LANES, 1, 1

    @property
    def alignment(self) -> tuple[int, ...]:
        """Rows of `x` and weights are read in vectors of four, a scale and its zero together."""
        size = 2 if self.dtype != "float" else 4
        wanted = {"x": 4 * size, "w": 4, "low": 4, "high": 4, "scale": 2 * size if self.packed == "tinygemm" else 1}
        return tuple(wanted.get(b.name, 1) for b in self.buffers)

    def text(self, aligned: bool = True) -> str:
        return "\n".join(self._lines(aligned)) + "\n"

    def _lines(self, aligned: bool) -> Iterator[str]:
        t, m, r = self.dtype, self.m, self.rows
        step = 4 if self.bits == 8 else 8
        yield f"kernel void {self.name}({', '.join(self._parameters())}) {{"
        yield "    const int N = int(sizes[0]), K = int(sizes[1]), group = int(sizes[2]);"
        if self.packed != "tinygemm":
            yield "    const int groups = K / group;"
        yield f"    const int first = int(at.x * {SIMD_GROUPS}u + simd) * {r};"
        yield "    if (first >= N) return;"
        yield f"    float total[{m}][{r}];"
        yield f"    FW_UNROLL for (int i = 0; i < {m}; ++i) FW_UNROLL for (int j = 0; j < {r}; ++j) total[i][j] = 0.0f;"
        yield from self._places()
        yield f"    for (int k = int(lane) * {step}; k < K; k += {LANES * step}) {{"
        yield from self._step_places()
        yield f"        float v[{m}][{step}], sum[{m}];"
        yield f"        FW_UNROLL for (int i = 0; i < {m}; ++i) {{"
        yield "            sum[i] = 0.0f;"
        yield f"            FW_UNROLL for (int b = 0; b < {step}; b += 4) {{"
        yield f"                const {t}4 four = {vector(t, 4, 'x', 'long(i) * K + k + b', aligned)};"
        yield "                FW_UNROLL for (int e = 0; e < 4; ++e) { v[i][b + e] = float(four[e]); sum[i] += v[i][b + e]; }"
        yield "            }"
        yield "        }"
        yield f"        FW_UNROLL for (int j = 0; j < {r}; ++j) {{"
        yield from self._weights(step, aligned)
        yield from self._factors(aligned)
        yield f"            FW_UNROLL for (int i = 0; i < {m}; ++i) {{"
        yield "                float dot = 0.0f;"
        yield f"                FW_UNROLL for (int e = 0; e < {step}; ++e) dot = metal::fma(v[i][e], q[e], dot);"
        yield f"                total[i][j] = {self._added()};"
        yield "            }"
        yield "        }"
        yield "    }"
        yield f"    FW_UNROLL for (int i = 0; i < {m}; ++i) FW_UNROLL for (int j = 0; j < {r}; ++j) {{"
        yield "        const float sum = simd_sum(total[i][j]);"
        bias = " + float(bias[first + j])" if self.biased else ""
        yield f"        if (lane == 0u && first + j < N) out[long(i) * N + first + j] = {t}(sum{bias});"
        yield "    }"
        yield "}"

    def _places(self) -> Iterator[str]:
        """Where the rows of weights begin, and their factors: 64 bits, and not in the loop."""
        length = "K" if self.bits == 8 else "(K / 2)"
        factors = "" if self.packed == "tinygemm" else f", factors[{self.rows}]"
        yield f"    int n[{self.rows}];"
        yield f"    long row[{self.rows}]{factors};"
        yield f"    FW_UNROLL for (int j = 0; j < {self.rows}; ++j) {{"
        yield "        n[j] = min(first + j, N - 1);"
        yield f"        row[j] = long(n[j]) * {length};"
        if factors:
            yield "        factors[j] = long(n[j]) * groups;"
        yield "    }"

    def _step_places(self) -> Iterator[str]:
        """Of a lane's weights in every row."""
        yield "        const int g = k / group;"
        if self.packed == "tinygemm":
            yield "        const long factors = long(g) * 2 * N;"
        if self.bits == 4:
            yield "        const int from = k >> 1;"

    def _factors(self, aligned: bool) -> Iterator[str]:
        """`s` and `z`: the factor of a group and its zero."""
        if self.packed == "tinygemm":
            yield f"            const {self.dtype}2 both = {vector(self.dtype, 2, 'scale', 'factors + 2 * n[j]', aligned)};"
            yield "            const float s = float(both[0]), z = float(both[1]);"
            return
        yield "            const float s = float(scale[factors[j] + g]);"
        if self.zeros:
            yield "            const float z = float(zero[factors[j] + g]);"

    def _added(self) -> str:
        """A total with a lane's part of a row added."""
        if self.packed:
            return "metal::fma(s, dot, metal::fma(z, sum[i], total[i][j]))"
        return f"metal::fma(s, {'metal::fma(-z, sum[i], dot)' if self.zeros else 'dot'}, total[i][j])"

    def _parameters(self) -> Iterator[str]:
        types = {"f32": "float", "f16": "half", "bf16": "bfloat", "i8": "char", "u8": "uchar", "i32": "int"}
        for k, b in enumerate(self.buffers):
            yield f"device {'' if b.access == 'out' else 'const '}{types[b.dtype]}* {b.name} [[buffer({k})]]"
        yield f"constant long* sizes [[buffer({len(self.buffers)})]]"
        yield "uint3 at [[threadgroup_position_in_grid]]"
        yield "uint lane [[thread_index_in_simdgroup]]"
        yield "uint simd [[simdgroup_index_in_threadgroup]]"

    def _weights(self, step: int, aligned: bool) -> Iterator[str]:
        """`q`: the weights of a lane as numbers."""
        yield f"            float q[{step}];"
        if self.bits == 8:
            yield f"            const char4 four = {vector('char', 4, 'w', 'row[j] + k', aligned)};"
            yield "            FW_UNROLL for (int e = 0; e < 4; ++e) q[e] = float(four[e]);"
            return
        yield f"            const uchar4 lows = {vector('uchar', 4, 'low', 'row[j] + from', aligned)};"
        yield from self._unsigned() if self.packed else self._signed(aligned)

    def _unsigned(self) -> Iterator[str]:
        middle = 8 if self.packed == "tinygemm" else 0
        yield "            FW_UNROLL for (int e = 0; e < 4; ++e) {"
        yield "                const int two = int(lows[e]);"
        yield f"                q[2 * e] = float((two & 15) - {middle});"
        yield f"                q[2 * e + 1] = float((two >> 4) - {middle});"
        yield "            }"

    def _signed(self, aligned: bool) -> Iterator[str]:
        yield "            const bool whole = flags[n[j]] != 0;"
        yield "            uchar4 highs = uchar4(0);"
        yield f"            if (whole) highs = {vector('uchar', 4, 'high', 'row[j] + from', aligned)};"
        yield "            FW_UNROLL for (int e = 0; e < 4; ++e) {"
        yield "                const int two = int(lows[e]), more = int(highs[e]);"
        for e, nibble in (("2 * e", "& 15"), ("2 * e + 1", ">> 4")):
            signed = f"(((two {nibble}) ^ 8) - 8)"
            yield f"                q[{e}] = float(whole ? (two {nibble}) + 16 * (((more {nibble}) ^ 8) - 8) : {signed});"
        yield "            }"


def rows_for(n: int, target: Target) -> int:
    """Outputs of a SIMD group: as many as leave each core the SIMD groups that hide its loads, 4 at most."""
    return next((r for r in (4, 2) if n // r >= target.simdgroups), 1)

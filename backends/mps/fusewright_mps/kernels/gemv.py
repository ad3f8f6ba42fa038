"""Products of a few rows with 8-bit or 4-bit weights: `out[m, n] = sum(x[m, k] * (q[n, k] - zero[n, g]) * scale[n, g]) + bias[n]`.

Decoding reads every weight once, so its speed depends on the bytes read. A SIMD group computes `rows` outputs together with its
lanes side by side along k: a lane loads 4 bytes of weights, the SIMD group 128 contiguous bytes, and `x` is read once for all
its outputs. Zero points cost one sum of `x` per group instead of a subtraction per weight.

4-bit weights that torchao stores in 8 bits (`IntxUnpackedToInt8Tensor`) are split once into planes of low and high nibbles. The
high plane is read only for rows whose flag says that some weight does not fit a signed nibble, so 4-bit weights cost 4 bits and
wider ones are still computed correctly. Weights that torch or torchao packed for MPS are unsigned nibbles, low ones first, and are
read as they are: `out[m, n] = sum(x[m, k] * ((q[n, k] - middle) * scale[n, g] + zero[n, g]))`.
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
"""Most rows of x."""
SIMD_GROUPS = 2
"""SIMD groups per threadgroup: little is shared, and small threadgroups spread over all cores."""


Packed: TypeAlias = Literal["", "tinygemm", "affine"]
"""Formats of unsigned nibbles. "tinygemm" is torch's `_weight_int4pack_mm`: scale and zero in one [k / group, n, 2], middle 8.
"affine" is torchao's `_linear_fp_act_4bit_weight`: scale and zero [n, k / group] each, middle 0."""


@dataclass(frozen=True, slots=True)
class Gemv(Handwritten):
    """x [m, k] of `dtype` (Metal's name), weights [n, k] of `bits`, scale [n, k / group] of `dtype`, zero [n, k / group] of type
    `zeros` (Metal's name, or "" for none), bias [n] of `dtype` if `biased`. `rows`: outputs per SIMD group. k and `group` are
    multiples of 8. 4-bit weights are nibble planes, or `packed`."""

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
        """Rows of `x` and weights are read in vectors of four; "tinygemm" reads a scale and its zero together."""
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
        """Emit the 64-bit start offsets of the weight rows and their factors, outside the loop."""
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
        """Emit the offsets within the rows for one step."""
        yield "        const int g = k / group;"
        if self.packed == "tinygemm":
            yield "        const long factors = long(g) * 2 * N;"
        if self.bits == 4:
            yield "        const int from = k >> 1;"

    def _factors(self, aligned: bool) -> Iterator[str]:
        """Emit `s` and `z`: the scale and zero of a group."""
        if self.packed == "tinygemm":
            yield f"            const {self.dtype}2 both = {vector(self.dtype, 2, 'scale', 'factors + 2 * n[j]', aligned)};"
            yield "            const float s = float(both[0]), z = float(both[1]);"
            return
        yield "            const float s = float(scale[factors[j] + g]);"
        if self.zeros:
            yield "            const float z = float(zero[factors[j] + g]);"

    def _added(self) -> str:
        """Return the expression that adds a lane's part of a row to the total."""
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
        """Emit `q`: a lane's weights as floats."""
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
    """Return the outputs per SIMD group: at most 4, few enough that each core has enough SIMD groups to hide memory latency."""
    return next((r for r in (4, 2) if n // r >= target.simdgroups), 1)

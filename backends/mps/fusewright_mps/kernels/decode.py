"""Attention of few queries over a long cache (split-KV decoding: Dao et al., Flash-Decoding, 2023), in two functions.

`Parts`: a SIMD group takes a part of the keys of one head of the cache, for every query that reads it (the query heads of a group,
times queries): keys and values are read once. Scores go along lanes, the softmax is online in registers, nothing is shared, so
there is no barrier. `Combined` puts the parts of a row together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from fusewright.toolkit.ir.ir import Buffer, Scalar
from fusewright_mps.kernels.handwritten import SHORT, Handwritten
from fusewright_mps.target import Target

LANES = 32
MOST_ROWS = 16
"""Queries that read one head of the cache: their rows lie in registers."""
LARGEST_DIM = 256
MOST_REGISTERS = 2048
"""Numbers of a SIMD group's rows, head by rows: twice as many (queries and sums) are half a lane's registers."""
SHORTEST = 32
"""Keys of a part at least."""
MOST_PARTS = 64

Mask = Literal["", "bool", "added"]


@dataclass(frozen=True, slots=True)
class Parts(Handwritten):
    """query [b, h, q, d], key and value [b, heads, keys, d] of `dtype` (Metal's name), h = heads * group; mask broadcasts to
    [b, h, q, keys]. Strides are (b, h, row) of each, the mask's (b, h, row, key); the last dimension of the others is dense.

    Gives sums [b * heads, parts, rows, d], maxima and totals [b * heads, parts, rows] in fp32."""

    kind: ClassVar[str] = "decode_parts"

    dtype: str
    mask: Mask
    d: int
    batch: int
    heads: int
    group: int
    queries: int
    keys: int
    chunk: int
    strides: tuple[int, ...]

    @property
    def rows(self) -> int:
        return self.group * self.queries

    @property
    def parts(self) -> int:
        return -(-self.keys // self.chunk)

    @property
    def name(self) -> str:
        return "_".join(x for x in ("decode", SHORT[self.dtype], f"d{self.d}", f"r{self.rows}", self.mask) if x)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        t = SHORT[self.dtype]
        masks = [("mask", "bool" if self.mask == "bool" else t)] if self.mask else []
        given = [Buffer(n, x) for n, x in [("q", t), ("k", t), ("v", t), *masks]]
        return (*given, *(Buffer(n, "f32", "out") for n in ("sums", "top", "total")))

    @property
    def scalars(self) -> tuple[Scalar, ...]:
        return (Scalar("scale", "f32"),)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.keys, self.chunk, self.heads, self.group, self.queries, self.parts, *self.strides

    @property
    def threads(self) -> tuple[int, int, int]:
        return self.parts * LANES, self.batch * self.heads, 1

    @property
    def threadgroup(self) -> tuple[int, int, int]:
        return LANES, 1, 1

    def text(self, aligned: bool = True) -> str:
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        rows, per_lane = self.rows, -(-self.d // LANES)
        each = f"FW_UNROLL for (int i = 0; i < {per_lane}; ++i)"
        inside = "" if self.d % LANES == 0 else f" if (int(lane) + 32 * i < {self.d})"
        yield f"kernel void {self.name}({', '.join(self._parameters())}) {{"
        yield "    const int keys = int(sizes[0]), chunk = int(sizes[1]), heads = int(sizes[2]);"
        yield "    const int group = int(sizes[3]), queries = int(sizes[4]), parts = int(sizes[5]);"
        yield "    constant long* qs = sizes + 6;"
        yield "    constant long* ks = sizes + 9;"
        yield "    constant long* vs = sizes + 12;"
        yield "    const int b = int(at.y) / heads, h = int(at.y) % heads;"
        yield f"    float query[{rows}][{per_lane}], sum[{rows}][{per_lane}], high[{rows}], weight[{rows}];"
        yield f"    FW_UNROLL for (int r = 0; r < {rows}; ++r) {{"
        yield "        const long from = b * qs[0] + (h * group + r / queries) * qs[1] + (r % queries) * qs[2];"
        yield f"        {each} {{"
        yield "            query[r][i] = 0.0f;"
        yield "            sum[r][i] = 0.0f;"
        yield f"           {inside} query[r][i] = float(q[from + lane + 32 * i]) * reals[0];"
        yield "        }"
        yield "        high[r] = -INFINITY;"
        yield "        weight[r] = 0.0f;"
        yield "    }"
        yield "    const int first = int(at.x) * chunk, last = min(first + chunk, keys);"
        yield "    for (int j = first; j < last; ++j) {"
        yield "        const long kj = b * ks[0] + h * ks[1] + j * ks[2], vj = b * vs[0] + h * vs[1] + j * vs[2];"
        yield f"        float one[{per_lane}], value[{per_lane}];"
        yield f"        {each} {{"
        yield "            one[i] = 0.0f;"
        yield "            value[i] = 0.0f;"
        yield f"           {inside} {{"
        yield "                one[i] = float(k[kj + lane + 32 * i]);"
        yield "                value[i] = float(v[vj + lane + 32 * i]);"
        yield "            }"
        yield "        }"
        yield f"        FW_UNROLL for (int r = 0; r < {rows}; ++r) {{"
        yield "            float dot = 0.0f;"
        yield f"            {each} dot = metal::fma(query[r][i], one[i], dot);"
        yield "            float score = simd_sum(dot);"
        yield from self._masked()
        yield "            const float top_now = score > high[r] ? score : high[r];"
        yield "            if (score == -INFINITY) continue;"
        yield "            const float before = metal::precise::exp(high[r] - top_now);"
        yield "            const float p = metal::precise::exp(score - top_now);"
        yield "            weight[r] = metal::fma(weight[r], before, p);"
        yield "            high[r] = top_now;"
        yield f"            {each} sum[r][i] = metal::fma(p, value[i], sum[r][i] * before);"
        yield "        }"
        yield "    }"
        yield f"    FW_UNROLL for (int r = 0; r < {rows}; ++r) {{"
        yield f"        const long row = (long(at.y) * parts + at.x) * {rows} + r;"
        yield f"        {each}{inside} sums[row * {self.d} + lane + 32 * i] = sum[r][i];"
        yield "        if (lane == 0u) {"
        yield "            top[row] = high[r];"
        yield "            total[row] = weight[r];"
        yield "        }"
        yield "    }"
        yield "}"

    def _masked(self) -> Iterator[str]:
        if not self.mask:
            return
        yield "            constant long* ms = sizes + 15;"
        yield "            const long m = b * ms[0] + (h * group + r / queries) * ms[1] + (r % queries) * ms[2] + j * ms[3];"
        if self.mask == "bool":
            yield "            if (!mask[m]) score = -INFINITY;"
        else:
            yield "            score += float(mask[m]);"

    def _parameters(self) -> Iterator[str]:
        types = {"f32": "float", "f16": "half", "bf16": "bfloat", "bool": "bool"}
        for k, b in enumerate(self.buffers):
            yield f"device {'' if b.access == 'out' else 'const '}{types[b.dtype]}* {b.name} [[buffer({k})]]"
        yield f"constant float* reals [[buffer({len(self.buffers)})]]"
        yield f"constant long* sizes [[buffer({len(self.buffers) + 1})]]"
        yield "uint3 at [[threadgroup_position_in_grid]]"
        yield "uint lane [[thread_index_in_simdgroup]]"


@dataclass(frozen=True, slots=True)
class Combined(Handwritten):
    """The rows of `Parts` together, as [b, heads * group, queries, d] of `dtype` in these strides (b, h, row). A row that saw no
    key is 0, as torch's attention has it."""

    kind: ClassVar[str] = "decode_combined"

    dtype: str
    d: int
    batch: int
    heads: int
    group: int
    queries: int
    parts: int
    strides: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"decode_combined_{SHORT[self.dtype]}_d{self.d}"

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        given = (Buffer(n, "f32") for n in ("sums", "top", "total"))
        return (*given, Buffer("out", SHORT[self.dtype], "out"))

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.heads, self.group, self.queries, self.parts, *self.strides

    @property
    def threads(self) -> tuple[int, int, int]:
        return LANES, self.group * self.queries, self.batch * self.heads

    @property
    def threadgroup(self) -> tuple[int, int, int]:
        return LANES, 1, 1

    def text(self, aligned: bool = True) -> str:
        t = self.dtype
        return f"""\
kernel void {self.name}(device const float* sums [[buffer(0)]], device const float* top [[buffer(1)]], device const float* total \
[[buffer(2)]], device {t}* out [[buffer(3)]], constant long* sizes [[buffer(4)]], uint3 at [[threadgroup_position_in_grid]], \
uint lane [[thread_index_in_simdgroup]]) {{
    const int heads = int(sizes[0]), group = int(sizes[1]), queries = int(sizes[2]), parts = int(sizes[3]);
    const int rows = group * queries, r = int(at.y), b = int(at.z) / heads, h = int(at.z) % heads;
    const long first = long(at.z) * parts * rows + r;
    float high = -INFINITY, whole = 0.0f;
    for (int p = 0; p < parts; ++p) {{
        const float t = top[first + long(p) * rows];
        high = t > high ? t : high;
    }}
    for (int p = 0; p < parts; ++p) {{
        const float t = top[first + long(p) * rows], n = total[first + long(p) * rows];
        if (n != 0.0f) whole += metal::precise::exp(t - high) * n;
    }}
    const long to = b * sizes[4] + (h * group + r / queries) * sizes[5] + (r % queries) * sizes[6];
    for (int d = int(lane); d < {self.d}; d += 32) {{
        float sum = 0.0f;
        for (int p = 0; p < parts; ++p) {{
            const long row = first + long(p) * rows;
            if (total[row] != 0.0f) sum += metal::precise::exp(top[row] - high) * sums[row * {self.d} + d];
        }}
        out[to + d] = {t}(whole == 0.0f ? 0.0f : sum / whole);
    }}
}}
"""


def chunk_for(keys: int, batches: int, target: Target) -> int:
    """Keys of a part: parts enough that each core has the SIMD groups that hide its loads."""
    wanted = min(MOST_PARTS, max(1, -(-target.simdgroups // batches)))
    return max(SHORTEST, -(-keys // wanted))

"""Attention of few queries over a long cache (split-KV decoding: Dao et al., Flash-Decoding, 2023), in two functions.

`Parts`: a SIMD group takes one split of the keys of one cache head, for every query that reads it (the group's query heads times
queries), so keys and values are read once. Lanes divide the head dimension, the softmax is online in registers, and there is no
threadgroup memory and no barrier. `Combined` merges the splits of each row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from fusewright.toolkit.ir.ir import Buffer, Scalar
from fusewright_mps.kernels.handwritten import SHORT, Handwritten, vector
from fusewright_mps.target import Target

LANES = 32
MOST_ROWS = 16
"""Most queries that read one head of the cache; their rows are kept in registers."""
LARGEST_DIM = 256
MOST_REGISTERS = 2048
"""Most numbers (head dimension times rows) in a SIMD group's rows; queries and sums together take half a lane's registers."""
SHORTEST = 32
"""Fewest keys in a split."""
MOST_PARTS = 64

Mask = Literal["", "bool", "added"]


@dataclass(frozen=True, slots=True)
class Parts(Handwritten):
    """query [b, h, q, d], key and value [b, heads, keys, d] of `dtype` (Metal's name), h = heads * group; mask broadcasts to
    [b, h, q, keys]. Strides are (b, h, row) of each, with a dense last dimension, and (b, h, row, key) of the mask.

    Outputs sums [b * heads, parts, rows, d], and maxima and totals [b * heads, parts, rows], in fp32."""

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
        wide = f"v{self.width}" if self.width > 1 else ""
        return "_".join(x for x in ("decode", SHORT[self.dtype], f"d{self.d}", f"r{self.rows}", self.mask, wide) if x)

    @property
    def width(self) -> int:
        """Elements along a head that a lane reads in one load; head size and strides are multiples of it."""
        strides = self.strides[:9]
        return next((w for w in (4, 2) if self.d % (LANES * w) == 0 and not any(s % w for s in strides)), 1)

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

    @property
    def alignment(self) -> tuple[int, ...]:
        """Alignment in bytes that vector accesses to queries, keys, values and sums need."""
        size, w = (4 if self.dtype == "float" else 2), self.width
        wanted = {**dict.fromkeys("qkv", size * w), "sums": 4 * w} if w > 1 else {}
        return tuple(wanted.get(b.name, 1) for b in self.buffers)

    def text(self, aligned: bool = True) -> str:
        return "\n".join(self._lines(aligned)) + "\n"

    def _lines(self, aligned: bool) -> Iterator[str]:
        rows, w, per_lane = self.rows, self.width, -(-self.d // LANES)
        one = f"FW_UNROLL for (int i = 0; i < {per_lane}; ++i)"
        each, at = f"FW_UNROLL for (int i = 0; i < {per_lane}; i += {w})", f"{w} * int(lane) + {LANES} * i"
        inside = "" if self.d % LANES == 0 else f"if (int(lane) + {LANES} * i < {self.d}) "
        yield f"kernel void {self.name}({', '.join(self._parameters())}) {{"
        yield "    const int keys = int(sizes[0]), chunk = int(sizes[1]), heads = int(sizes[2]);"
        yield "    const int group = int(sizes[3]), queries = int(sizes[4]), parts = int(sizes[5]);"
        yield "    constant long* qs = sizes + 6;"
        yield "    constant long* ks = sizes + 9;"
        yield "    constant long* vs = sizes + 12;"
        yield from ["    constant long* ms = sizes + 15;"] * bool(self.mask)
        yield "    const int b = int(at.y) / heads, h = int(at.y) % heads;"
        yield "    const int first = int(at.x) * chunk, last = min(first + chunk, keys);"
        yield f"    float query[{rows}][{per_lane}], sum[{rows}][{per_lane}], high[{rows}], weight[{rows}];"
        yield from [f"    long hides[{rows}];"] * bool(self.mask)
        yield f"    FW_UNROLL for (int r = 0; r < {rows}; ++r) {{"
        yield "        const int head = h * group + r / queries, row = r % queries;"
        yield "        const long from = b * qs[0] + head * qs[1] + row * qs[2];"
        yield f"        {one} {{ query[r][i] = 0.0f; sum[r][i] = 0.0f; }}"
        yield f"        {each} {inside}{{"
        yield from self._loaded("query[r]", "q", f"from + {at}", aligned, " * reals[0]")
        yield "        }"
        yield "        high[r] = -INFINITY;"
        yield "        weight[r] = 0.0f;"
        yield from ["        hides[r] = b * ms[0] + head * ms[1] + row * ms[2] + first * ms[3];"] * bool(self.mask)
        yield "    }"
        yield "    long kj = b * ks[0] + h * ks[1] + first * ks[2], vj = b * vs[0] + h * vs[1] + first * vs[2];"
        yield "    for (int j = first; j < last; ++j, kj += ks[2], vj += vs[2]) {"
        yield f"        float key[{per_lane}], value[{per_lane}];"
        yield from [f"        {one} {{ key[i] = 0.0f; value[i] = 0.0f; }}"] * bool(inside)
        yield f"        {each} {inside}{{"
        yield from self._loaded("key", "k", f"kj + {at}", aligned)
        yield from self._loaded("value", "v", f"vj + {at}", aligned)
        yield "        }"
        yield f"        FW_UNROLL for (int r = 0; r < {rows}; ++r) {{"
        yield "            float dot = 0.0f;"
        yield f"            {one} dot = metal::fma(query[r][i], key[i], dot);"
        yield "            float score = simd_sum(dot);"
        yield from self._masked()
        yield "            const float top_now = score > high[r] ? score : high[r];"
        yield "            if (score == -INFINITY) continue;"
        yield "            const float before = metal::precise::exp(high[r] - top_now);"
        yield "            const float p = metal::precise::exp(score - top_now);"
        yield "            weight[r] = metal::fma(weight[r], before, p);"
        yield "            high[r] = top_now;"
        yield f"            {one} sum[r][i] = metal::fma(p, value[i], sum[r][i] * before);"
        yield "        }"
        yield "    }"
        yield f"    FW_UNROLL for (int r = 0; r < {rows}; ++r) {{"
        yield f"        const long row = (long(at.y) * parts + at.x) * {rows} + r;"
        yield f"        {each} {inside}{{ {self._stored(f'row * {self.d} + {at}', aligned)} }}"
        yield "        if (lane == 0u) {"
        yield "            top[row] = high[r];"
        yield "            total[row] = weight[r];"
        yield "        }"
        yield "    }"
        yield "}"

    def _loaded(self, to: str, buffer: str, at: str, aligned: bool, scaled: str = "") -> Iterator[str]:
        """Emit the load of a lane's elements as fp32."""
        w = self.width
        if w == 1:
            yield f"            {to}[i] = float({buffer}[{at}]){scaled};"
            return
        yield f"            const {self.dtype}{w} {buffer}{w} = {vector(self.dtype, w, buffer, at, aligned)};"
        yield f"            FW_UNROLL for (int e = 0; e < {w}; ++e) {to}[i + e] = float({buffer}{w}[e]){scaled};"

    def _stored(self, at: str, aligned: bool) -> str:
        w = self.width
        if w == 1:
            return f"sums[{at}] = sum[r][i];"
        if not aligned:
            return f"FW_UNROLL for (int e = 0; e < {w}; ++e) sums[{at} + e] = sum[r][i + e];"
        values = ", ".join(f"sum[r][i{f' + {e}' if e else ''}]" for e in range(w))
        return f"*(device float{w}*)(sums + ({at})) = float{w}({values});"

    def _masked(self) -> Iterator[str]:
        if not self.mask:
            return
        yield "            const long m = hides[r] + (j - first) * ms[3];"
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
    """Merges the splits of `Parts` into [b, heads * group, queries, d] of `dtype` with strides (b, h, row). A row that saw no key
    is 0, as in torch's attention."""

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
        t, per_lane = self.dtype, -(-self.d // LANES)
        inside = "" if self.d % LANES == 0 else f"if (int(lane) + {LANES} * i < {self.d}) "
        return f"""\
kernel void {self.name}(device const float* sums [[buffer(0)]], device const float* top [[buffer(1)]], device const float* total \
[[buffer(2)]], device {t}* out [[buffer(3)]], constant long* sizes [[buffer(4)]], uint3 at [[threadgroup_position_in_grid]], \
uint lane [[thread_index_in_simdgroup]]) {{
    const int heads = int(sizes[0]), group = int(sizes[1]), queries = int(sizes[2]), parts = int(sizes[3]);
    const int rows = group * queries, r = int(at.y), b = int(at.z) / heads, h = int(at.z) % heads;
    const long first = long(at.z) * parts * rows + r;
    float high = -INFINITY, whole = 0.0f, sum[{per_lane}];
    for (int p = 0; p < parts; ++p) {{
        const float t = top[first + long(p) * rows];
        high = t > high ? t : high;
    }}
    FW_UNROLL for (int i = 0; i < {per_lane}; ++i) sum[i] = 0.0f;
    for (int p = 0; p < parts; ++p) {{
        const long row = first + long(p) * rows;
        if (total[row] == 0.0f) continue;
        const float factor = metal::precise::exp(top[row] - high);
        whole += factor * total[row];
        FW_UNROLL for (int i = 0; i < {per_lane}; ++i) {{
            {inside}sum[i] += factor * sums[row * {self.d} + lane + 32 * i];
        }}
    }}
    const long to = b * sizes[4] + (h * group + r / queries) * sizes[5] + (r % queries) * sizes[6];
    FW_UNROLL for (int i = 0; i < {per_lane}; ++i) {{
        {inside}out[to + lane + 32 * i] = {t}(whole == 0.0f ? 0.0f : sum[i] / whole);
    }}
}}
"""


def chunk_for(keys: int, batches: int, target: Target) -> int:
    """Return the keys per split, few enough that each core has enough SIMD groups to hide memory latency."""
    wanted = min(MOST_PARTS, max(1, -(-target.simdgroups // batches)))
    return max(SHORTEST, -(-keys // wanted))

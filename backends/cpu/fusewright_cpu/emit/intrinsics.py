"""Instructions that LLVM does not select from generic vector code: bf16 products (`vdpbf16ps` of AVX-512, `bfdot` of NEON and
SVE), SVE's widening loads."""

from __future__ import annotations

from collections.abc import Sequence

from fusewright_cpu.emit.text import BITS, Fn, V, const
from fusewright_cpu.target import CpuTarget

_SHORT = {"float": "f32"}


def multiplies_pairs(target: CpuTarget) -> bool:
    """Return whether `dot_pairs` is an instruction for vectors of the target's full width."""
    return target.has("bf16") if target.arm else target.has("avx512bf16") and target.vector_bytes == 64


def dot_pairs(f: Fn, acc: V, x: V, y: V) -> V:
    """Return acc + x * y in fp32, summed over the two bf16 of each i32 word. Subnormals count as 0."""
    target = f.module.target
    if target.sve_bits > 128:
        return scalable(f, "llvm.aarch64.sve.bfdot", acc, [x, y], "bfloat")
    name = "llvm.aarch64.neon.bfdot.v4f32.v8bf16" if target.arm else "llvm.x86.avx512bf16.dpbf16ps.512"
    both = [f.let("bfloat", 2 * v.w, f"bitcast {v} to <{2 * v.w} x bfloat>") for v in (x, y)]
    f.module.declare(name, acc.ty, [acc.ty, both[0].ty, both[0].ty])
    return f.let("float", acc.w, f"call {acc.ty} @{name}({acc}, {both[0]}, {both[1]})")


def near_bf16(f: Fn, x: V) -> V:
    """Round to the nearest bf16; subnormals may become 0."""
    if f.module.target.arm:
        return f.conv("fptrunc", x, "bfloat")
    name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
    f.module.declare(name, "<16 x bfloat>", [x.ty])
    return f.let("bfloat", 16, f"call <16 x bfloat> @{name}({x})")


def widened(f: Fn, t: str, p: V, w: int, left: V | None = None) -> V:
    """Load `w` integers of type `t` at `p` as i32, by SVE's widening loads; zeros after the first `left` (any count)."""
    ty, bits = f"<vscale x 4 x {t}>", BITS[t]
    if left is None:
        x = f.let(t, 0, f"load {ty}, {p}, align {bits // 8}")
    else:
        name, masks = f"llvm.masked.load.nxv4{t}.p0", "<vscale x 4 x i1>"
        f.module.declare("llvm.get.active.lane.mask.nxv4i1.i64", masks, ["i64", "i64"])
        f.module.declare(name, ty, ["ptr", "i32", masks, ty])
        n = f.call("smax", "i64", [left, const(0, "i64")])
        mask = f.let("i1", 0, f"call {masks} @llvm.get.active.lane.mask.nxv4i1.i64(i64 0, {n})").name
        x = f.let(t, 0, f"call {ty} @{name}({p}, i32 {bits // 8}, {masks} {mask}, {ty} zeroinitializer)")
    return _fixed(f, f.let("i32", 0, f"sext {ty} {x.name} to <vscale x 4 x i32>").name, "i32", w)


def scalable(f: Fn, name: str, acc: V, words: Sequence[V], t: str) -> V:
    """Call an SVE intrinsic on `acc` and words with as many bits as its lanes, read as elements of type `t`. Vectors have the
    target's length; the intrinsic's types are scalable."""
    apart = 32 // BITS[t]
    to = f"<vscale x {4 * apart} x {t}>"
    args = [(f"<vscale x 4 x {acc.t}>", _scalable(f, acc))]
    args += [(to, f.let(t, 0, f"bitcast <vscale x 4 x i32> {_scalable(f, v)} to {to}").name) for v in words]
    f.module.declare(name, args[0][0], [ty for ty, _ in args])
    result = f.let("", 0, f"call {args[0][0]} @{name}({', '.join(f'{ty} {v}' for ty, v in args)})")
    return _fixed(f, result.name, acc.t, acc.w)


def _fixed(f: Fn, name: str, t: str, w: int) -> V:
    """Convert a vector of scalable length to the target's length."""
    ty, short = f"<vscale x 4 x {t}>", _SHORT.get(t, t)
    back = f"llvm.vector.extract.v{w}{short}.nxv4{short}"
    f.module.declare(back, f"<{w} x {t}>", [ty, "i64"])
    return f.let(t, w, f"call <{w} x {t}> @{back}({ty} {name}, i64 0)")


def _scalable(f: Fn, v: V) -> str:
    """Convert a vector of 32-bit lanes to scalable length; return its name."""
    ty, short = f"<vscale x 4 x {v.t}>", _SHORT.get(v.t, v.t)
    name = f"llvm.vector.insert.nxv4{short}.v{v.w}{short}"
    f.module.declare(name, ty, [ty, v.ty, "i64"])
    return f.let(v.t, 0, f"call {ty} @{name}({ty} poison, {v}, i64 0)").name

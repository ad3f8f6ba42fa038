"""Instructions of CPUs that multiply bf16: `vdpbf16ps` of AVX-512, `bfdot` of NEON and SVE."""

from __future__ import annotations

from collections.abc import Sequence

from fusewright_cpu.emit.text import BITS, Fn, V
from fusewright_cpu.target import CpuTarget

_SHORT = {"float": "f32"}


def multiplies_pairs(target: CpuTarget) -> bool:
    """Whether `dot_pairs` is an instruction for vectors of the target's full width."""
    return target.has("bf16") if target.arm else target.has("avx512bf16") and target.vector_bytes == 64


def dot_pairs(f: Fn, acc: V, x: V, y: V) -> V:
    """acc + x * y, summed over the two bf16 of each word, an i32: fp32. Subnormals count as 0."""
    target = f.module.target
    if target.sve_bits > 128:
        return scalable(f, "llvm.aarch64.sve.bfdot", acc, [x, y], "bfloat")
    name = "llvm.aarch64.neon.bfdot.v4f32.v8bf16" if target.arm else "llvm.x86.avx512bf16.dpbf16ps.512"
    both = [f.let("bfloat", 2 * v.w, f"bitcast {v} to <{2 * v.w} x bfloat>") for v in (x, y)]
    f.module.declare(name, acc.ty, [acc.ty, both[0].ty, both[0].ty])
    return f.let("float", acc.w, f"call {acc.ty} @{name}({acc}, {both[0]}, {both[1]})")


def near_bf16(f: Fn, x: V) -> V:
    """The nearest bf16; subnormals may become 0."""
    if f.module.target.arm:
        return f.conv("fptrunc", x, "bfloat")
    name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
    f.module.declare(name, "<16 x bfloat>", [x.ty])
    return f.let("bfloat", 16, f"call <16 x bfloat> @{name}({x})")


def scalable(f: Fn, name: str, acc: V, words: Sequence[V], t: str) -> V:
    """An SVE intrinsic of `acc` and of words of as many bits as its lanes, read as elements of type `t`. Vectors have the
    target's length; the intrinsic's types leave that open."""
    apart = 32 // BITS[t]
    to = f"<vscale x {4 * apart} x {t}>"
    args = [(f"<vscale x 4 x {acc.t}>", _scalable(f, acc))]
    args += [(to, f.let(t, 0, f"bitcast <vscale x 4 x i32> {_scalable(f, v)} to {to}").name) for v in words]
    f.module.declare(name, args[0][0], [ty for ty, _ in args])
    result = f.let("", 0, f"call {args[0][0]} @{name}({', '.join(f'{ty} {v}' for ty, v in args)})")
    short = _SHORT.get(acc.t, acc.t)
    back = f"llvm.vector.extract.v{acc.w}{short}.nxv4{short}"
    f.module.declare(back, acc.ty, [args[0][0], "i64"])
    return f.let(acc.t, acc.w, f"call {acc.ty} @{back}({args[0][0]} {result.name}, i64 0)")


def _scalable(f: Fn, v: V) -> str:
    """The name of a vector of 32-bit lanes as one of scalable length."""
    ty, short = f"<vscale x 4 x {v.t}>", _SHORT.get(v.t, v.t)
    name = f"llvm.vector.insert.nxv4{short}.v{v.w}{short}"
    f.module.declare(name, ty, [ty, v.ty, "i64"])
    return f.let(v.t, 0, f"call {ty} @{name}({ty} poison, {v}, i64 0)").name

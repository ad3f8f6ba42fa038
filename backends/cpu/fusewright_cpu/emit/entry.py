"""Emit the C function of a kernel: `int64 k(int64 *block, int64 threads)` decides how many threads the work is
worth and runs it.

`block` holds the buffers' addresses, the sizes in the order of `Kernel.symbols`, and the scalars (floats as
the bits of a double). The result is 0, or an error word (see `kernel.checks`). A whole plan is a list of such calls."""

from __future__ import annotations

from fusewright.toolkit.ir.extent import Extent
from fusewright.toolkit.ir.ir import Kernel
from fusewright.toolkit.transform.moments import without_moments
from fusewright_cpu.emit.body import Body
from fusewright_cpu.emit.memory import Arguments
from fusewright_cpu.emit.strategy import choose, work_units
from fusewright_cpu.emit.text import Fn, Module, V, const, i64
from fusewright_cpu.openmp import PARALLEL, THREAD, THREADS
from fusewright_cpu.policy import LOOPS
from fusewright_cpu.target import CpuTarget


class UnsupportedKernel(ValueError):
    """This machine cannot run the kernel; the caller leaves those ops to eager."""


def new_module(target: CpuTarget) -> Module:
    """Return an empty module whose functions use the target's full vector width."""
    width, wide = f'"{target.vector_bytes * 8}"', ""
    if target.triple.startswith("x86"):
        wide = f'"prefer-vector-width"={width} "min-legal-vector-width"={width}'
    elif target.sve_bits:
        wide = f"vscale_range({target.sve_bits // 128},{target.sve_bits // 128})"
    return Module(target, f"nounwind {wide}".strip())


def emit_kernel(module: Module, kernel: Kernel, name: str, parallel: bool) -> None:
    """Add the function `name` for `kernel`; `parallel` means that a thread pool will be linked in.

    Raise UnsupportedKernel when the target lacks what the kernel needs.
    """
    if not module.target.converts_half and any(n.dtype == "f16" for n in kernel.nodes()):
        raise UnsupportedKernel(f"{kernel.name}: this CPU does not convert f16 (no F16C)")
    kernel = without_moments(kernel)
    how = choose(kernel, module.target)
    body = Body(module, kernel, how, f"{name}.body")
    body.write()
    if parallel:
        share(module, name)
    f = Fn(module, name, "i64", ["ptr", "i64"], linkage="dso_local")
    block, threads = f.args
    args = Arguments(f, kernel, block)
    error = f.alloca("i64", 1, 8)
    f.raw(f"store i64 0, {error}")
    items = _items(f, args, body)
    start(f, name, block, items, error, _team(f, args, kernel, items, threads) if parallel else None)
    f.raw(f"ret {f.let('i64', 1, f'load i64, {error}')}")
    f.finish()


def _items(f: Fn, args: Arguments, body: Body) -> V:
    """Return the number of work items, 0 when any axis that they run over is empty."""
    total = i64(1)
    for a in body.blocked():
        total = f.mul(total, body.blocks(f, args, a))
    for a in body.how.parallel:
        total = f.mul(total, args.extent(body.kernel.sizes[a]))
    return total


def _team(f: Fn, args: Arguments, kernel: Kernel, items: V, threads: V) -> V:
    """Return min(threads, items, 1 + work / grain)."""
    per_p, per_r = work_units(kernel)
    points: Extent = 1
    for s in kernel.p:
        points = points * s
    row: Extent = per_r
    for s in kernel.r:
        row = row * s
    work = args.extent(points * (row + per_p))
    worth = f.add(f.bin("sdiv", work, i64(LOOPS.grain)), i64(1))
    team = f.select(f.cmp("icmp slt", items, threads), items, threads)
    return f.select(f.cmp("icmp slt", worth, team), worth, team)


def start(f: Fn, name: str, block: V, items: V, shared: V, team: V | None) -> None:
    """Run all work items by `void name.body(ptr block, i64 lo, i64 hi, ptr shared)`: here, or on a team of several threads
    (see `share`), of which the function's second argument is the number of all."""
    if team is None:
        _run(f, name, block, items, shared)
        return
    alone = f.cmp("icmp sle", team, i64(1))
    solo, fork, done = f.new_label("solo"), f.new_label("fork"), f.new_label("out")
    f.raw(f"br i1 {alone.name}, label %{solo}, label %{fork}")
    f.label(solo)
    _run(f, name, block, items, shared)
    f.raw(f"br label %{done}")
    f.label(fork)
    _fork(f, name, block, items, shared, team)
    f.raw(f"br label %{done}")
    f.label(done)


def _run(f: Fn, name: str, block: V, items: V, shared: V) -> None:
    f.raw(f"call void @{name}.body({block}, i64 0, {items}, {shared})")


def _fork(f: Fn, name: str, block: V, items: V, shared: V, team: V) -> None:
    """Run the work on the pool. Error words are only ever set, and written whole, so the race for `shared` is
    harmless. All threads are called, though only the team works: libgomp ends threads that a smaller team leaves out, and the
    next one, torch's, waits until they are created again."""
    words = f.alloca("i64", 4, 16)
    for k, v in enumerate((f.conv("ptrtoint", block, "i64"), items, f.conv("ptrtoint", shared, "i64"), team)):
        f.raw(f"store {v}, {f.gep('i64', words, i64(k))}")
    f.module.declare(PARALLEL, "void", ["ptr", "ptr", "i32", "i32"], external=True)
    f.raw(f"call void @{PARALLEL}(ptr @{name}.part, {words}, {f.conv('trunc', f.args[1], 'i32')}, i32 0)")


def share(module: Module, name: str) -> None:
    """Emit `void part(ptr words)`, which runs this thread's contiguous share of the work items, if it is of the team."""
    module.declare(THREAD, "i32", [], external=True)
    module.declare(THREADS, "i32", [], external=True)
    f = Fn(module, f"{name}.part", "void", ["ptr"])
    words = [f.let("i64", 1, f"load i64, {f.gep('i64', f.args[0], i64(k))}") for k in range(4)]
    block, items, shared = f.conv("inttoptr", words[0], "ptr"), words[1], f.conv("inttoptr", words[2], "ptr")
    me = f.conv("zext", f.let("i32", 1, f"call i32 @{THREAD}()"), "i64")
    here = f.conv("zext", f.let("i32", 1, f"call i32 @{THREADS}()"), "i64")
    team = f.select(f.cmp("icmp slt", here, words[3]), here, words[3])
    works, done = f.new_label("works"), f.new_label("done")
    f.raw(f"br i1 {f.cmp('icmp slt', me, team).name}, label %{works}, label %{done}")
    f.label(works)
    lo = f.bin("sdiv", f.mul(items, me), team)
    hi = f.bin("sdiv", f.mul(items, f.add(me, const(1, "i64"))), team)
    f.raw(f"call void @{name}.body({block}, {lo}, {hi}, {shared})")
    f.raw(f"br label %{done}")
    f.label(done)
    f.raw("ret void")
    f.finish()

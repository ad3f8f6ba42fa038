"""Print loop kernels as Metal source: `emit` prints one kernel, `library` joins several into one shader library.

This is the interface that `backend` and `runtime` use; `emit.source` describes a `Source` and how to call it.
Only a kernel's own accumulating stores use atomics, so all other results do not depend on scheduling.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from fusewright.toolkit.ir.ir import Kernel, Node, Stage
from fusewright.toolkit.ir.printer import to_text
from fusewright.toolkit.ir.serial import structural_hash
from fusewright.toolkit.rules.offsets import offsets_bound
from fusewright.toolkit.transform.moments import without_moments
from fusewright_mps.emit.addressing import WIDE
from fusewright_mps.emit.operators import METAL
from fusewright_mps.emit.points import Points
from fusewright_mps.emit.prelude import PRELUDE
from fusewright_mps.emit.rows import Rows
from fusewright_mps.emit.schedule import Config, choose, moves
from fusewright_mps.emit.source import MOST_ARGUMENTS, Argument, Dispatch, Source, Unsupported, Variant, most_threads
from fusewright_mps.emit.values import Writer, divides, refuse_f64, sites, without_unused
from fusewright_mps.target import TYPICAL, Target

__all__ = ["PRELUDE", "Source", "Unsupported", "Variant", "emit", "library", "refused", "variant_for"]

_POSITIONS = {
    "at": "uint3 at [[{}]]",
    "grid": "uint3 grid [[threads_per_grid]]",
    "tid": "uint tid [[thread_index_in_threadgroup]]",
    "lane": "uint lane [[thread_index_in_simdgroup]]",
    "simd": "uint simd [[simdgroup_index_in_threadgroup]]",
}
_NUMBERS = {
    "sizes": "constant long* sizes",
    "reals": "constant float* reals",
    "integers": "constant long* integers",
    "errors": "device atomic_uint* errors",
}
SLOT = 4
"""Words per check in the error buffer: the check's number, the index in two words, padding."""


def emit(
    kernel: Kernel, variant: Variant | None = None, target: Target = TYPICAL, config: Config | None = None
) -> Source:
    """Return the Metal functions of `kernel`, sized for `target`. The default variant follows from the sizes that the kernel was
    traced with, the default configuration from the formula. Results are the same on every chip.

    Raises `Unsupported` when Metal cannot express the kernel.
    """
    variant = variant or variant_for(kernel, kernel.hints)
    refuse_f64(kernel)
    name = _name(kernel, variant)
    # Threads share a row: an element that all of them read may have been overwritten by the one that owns it.
    pieces = list(_pieces(without_moments(kernel, short=0), variant))
    texts, dispatches = [_comment(kernel)], []
    alignment, apart = [1] * len(kernel.buffers), len(pieces) > 1
    for k, piece in enumerate(pieces):
        entry = name if len(pieces) == 1 else f"{name}_{k}"
        how = config or choose(piece, target, variant.aligned)
        text, dispatch, again = _function(piece, entry, how, variant)
        apart |= again
        texts.append(text)
        dispatches.append(dispatch)
        alignment = list(map(max, alignment, _alignment(piece, how, variant)))
    errors = SLOT * (sites(kernel) + 1) if any("errors" in _kinds(d) for d in dispatches) else 0
    return Source(kernel, variant, "\n".join(texts), tuple(dispatches), tuple(alignment), errors, apart)


def variant_for(kernel: Kernel, sizes: Sequence[int], aligned: bool = True, check_division: bool = False) -> Variant:
    """Return the variant that these sizes need."""
    return Variant(aligned, offsets_bound(kernel, sizes) >= WIDE, check_division)


def library(sources: Iterable[Source]) -> str:
    """Return the text of a shader library: the shared prelude, then each kernel's functions without duplicates."""
    return "\n".join([PRELUDE.lstrip(), *dict.fromkeys(s.text for s in sources)])


@functools.lru_cache(4096)
def refused(kernel: Kernel, target: Target) -> str | None:
    """Return why the emitter cannot print a kernel, or None."""
    try:
        emit(kernel, target=target)
    except Unsupported as e:
        return str(e)
    return None


def _kinds(d: Dispatch) -> set[str]:
    return {a.kind for a in d.arguments}


def _name(kernel: Kernel, variant: Variant) -> str:
    word = re.sub(r"\W", "_", kernel.name, flags=re.ASCII)
    word = word if word[:1].isalpha() else f"k{word}"
    marks = (
        "" if variant.aligned else "_unaligned",
        "_wide" if variant.wide else "",
        "_checked" if variant.check_division else "",
    )
    return f"{word}_{structural_hash(kernel)[:8]}{''.join(marks)}"


def _comment(kernel: Kernel) -> str:
    text = to_text(kernel).encode("ascii", "replace").decode()  # torch passes the source to Metal's compiler as ASCII
    return "\n".join(f"// {line}" for line in text.splitlines())


# one function


def _function(kernel: Kernel, entry: str, config: Config, variant: Variant) -> tuple[str, Dispatch, bool]:
    """Return the text of one function, its dispatch, and whether inputs must not alias outputs."""
    program = (Rows if kernel.r else Points)(kernel, config, variant)
    program.write()
    shared = program.shared_lines if isinstance(program, Rows) else []
    program.lines = without_unused(program.lines)
    body = [*shared, *_sizes(program), *program.lines]
    arguments, parameters = _parameters(program, "\n".join(body), config)
    head = f"{most_threads(config.group)}\nkernel void {entry}(\n    " + ",\n    ".join(parameters) + ") {"
    apart = isinstance(program, Rows) and program.apart
    return "\n".join([head, *body, "}", ""]), Dispatch(entry, arguments, program.threads(), config.group), apart


def _sizes(program: Writer) -> Iterator[str]:
    """Emit definitions of the size symbols that the lines mention."""
    text = "\n".join(program.lines)
    for s in program.kernel.symbols:
        if re.search(rf"\bs{s}\b", text):
            yield f"    const {program.integer} s{s} = {program.integer}(sizes[{s}]);"


def _parameters(program: Writer, text: str, config: Config) -> tuple[tuple[Argument, ...], list[str]]:
    """Return the function's arguments and their declarations."""
    words = set(re.findall(r"(?<![.\w])\w+", text))  # the x of at.x is not a buffer
    stored = {n.buffer for n in program.nodes.values() if n.op == "store"}
    arguments, parameters = list[Argument](), list[str]()
    for k, name in enumerate(program.buffers):
        if name in words:
            access = "device" if k in stored else "device const"
            parameters.append(f"{access} {METAL[program.kernel.buffers[k].dtype]}* {name} [[buffer({len(arguments)})]]")
            arguments.append(Argument("buffer", k))
    for kind, declared in _NUMBERS.items():
        if kind in words:
            parameters.append(f"{declared} [[buffer({len(arguments)})]]")
            arguments.append(Argument(kind))  # type: ignore[arg-type]
    where = "thread_position_in_grid" if config.workers == "thread" else "threadgroup_position_in_grid"
    parameters += [declared.format(where) for word, declared in _POSITIONS.items() if word in words]
    return tuple(arguments), parameters


def _alignment(kernel: Kernel, config: Config, variant: Variant) -> tuple[int, ...]:
    """Return the alignment of each buffer in bytes that vector accesses need; atomics on half types need 4-byte words."""
    out = [1] * len(kernel.buffers)
    for n in kernel.nodes():
        if n.op not in ("load", "store") or n.buffer is None:
            continue
        if n.op == "store" and n.how and n.dtype in ("f16", "bf16"):
            out[n.buffer] = max(out[n.buffer], 4)
        if variant.aligned and config.along is not None and config.vector > 1 and moves(n, config.along, config.vector):
            out[n.buffer] = max(out[n.buffer], config.vector * _BYTES[n.dtype])
    return tuple(out)


_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "i8": 1, "u8": 1, "i16": 2, "i32": 4, "i64": 8, "bool": 1}


# kernels with too many buffers


def _pieces(kernel: Kernel, variant: Variant) -> Iterator[Kernel]:
    """Yield the kernel; if it has more buffers than Metal allows, split it by groups of stores that fit."""
    extra = bool(kernel.symbols) + len({s.dtype in ("f32", "f64") for s in kernel.scalars})
    extra += any(n.op == "bound" for n in kernel.nodes()) or (variant.check_division and divides(kernel))
    room = MOST_ARGUMENTS - extra
    if len(_buffers(kernel)) <= room:
        yield kernel
        return
    stored = {n.buffer for n in kernel.nodes() if n.op == "store"}
    if any(n.op == "load" and n.buffer in stored for n in kernel.nodes()):
        raise Unsupported(
            f"{len(kernel.buffers)} buffers, some of them loaded and stored; Metal takes {MOST_ARGUMENTS}"
        )
    group: list[Node] = [n for n in kernel.nodes() if n.op == "bound"]
    for n in [n for n in kernel.nodes() if n.op == "store"]:
        if len(_buffers(_only(kernel, [*group, n]))) > room and any(m.op == "store" for m in group):
            yield _only(kernel, group)
            group = []
        group.append(n)
        if len(_buffers(_only(kernel, group))) > room:
            raise Unsupported(
                f"one result of {kernel.name} needs more buffers than the {MOST_ARGUMENTS} that Metal takes"
            )
    yield _only(kernel, group)


def _buffers(kernel: Kernel) -> set[int | None]:
    return {n.buffer for n in kernel.nodes() if n.op in ("load", "store")}


def _only(kernel: Kernel, roots: Iterable[Node]) -> Kernel:
    """Return the kernel reduced to these nodes and what they depend on."""
    nodes, todo, live = kernel.node_map(), [n.id for n in roots], set[int]()
    while todo:
        i = todo.pop()
        if i not in live:
            live.add(i)
            todo.extend(nodes[i].uses())
    stages = (Stage(s.over, tuple(n for n in s.nodes if n.id in live)) for s in kernel.stages)
    return replace(kernel, stages=tuple(s for s in stages if s.nodes))

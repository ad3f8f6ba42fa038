"""Print loop kernels as Triton source text.

One kernel gives one function, or one per pass over the row when several programs share a row ("split"): each
pass leaves its partial reductions in a workspace, and the next function combines them. Atomics are used only for
stores that the kernel itself accumulates, hence results do not depend on scheduling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusewright.toolkit.ir.extent import Extent, evaluate
from fusewright.toolkit.ir.ir import Kernel
from fusewright.toolkit.ir.printer import to_text
from fusewright.toolkit.ir.serial import structural_hash
from fusewright.toolkit.ir.types import DType, is_int
from fusewright.toolkit.rules.offsets import offsets_bound
from fusewright_triton.emit import reductions as red
from fusewright_triton.emit.deferred import deferred
from fusewright_triton.emit.layout import Layout, make_layout, product
from fusewright_triton.emit.program import Program
from fusewright_triton.emit.schedule import WIDE, Config
from fusewright_triton.emit.values import DIVISIONS

HEADER = """\
import triton
import triton.language as tl
from triton.language.extra import libdevice

from fusewright_triton.emit import device as fw
"""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of every function of a source. `kind` is buffer, scalar, size, error or part (workspace)."""

    name: str
    kind: str
    dtype: DType

    @property
    def pointer(self) -> bool:
        return self.kind in ("buffer", "error", "part")


@dataclass(frozen=True, slots=True)
class Function:
    """One launch. `grid` holds (size, block) pairs and `split`: the number of programs is their product."""

    name: str
    grid: tuple[tuple[Extent, int], ...]
    split: int

    def programs(self, sizes: Sequence[int]) -> int:
        """How many programs to launch; 0 when there are no points."""
        out = self.split
        for size, block in self.grid:
            out *= -(-evaluate(size, sizes) // block)
        return out


@dataclass(frozen=True, slots=True)
class Source:
    """Triton source of a kernel. `workspace` gives type and element count of each `part` parameter; `warps` is passed
    to the compiler. `wide` means 64-bit offsets; sizes are then passed as 64-bit integers."""

    text: str
    functions: tuple[Function, ...]
    parameters: tuple[Parameter, ...]
    workspace: tuple[tuple[DType, Extent], ...]
    warps: int
    wide: bool


def emit(
    kernel: Kernel, config: Config, wide: bool | None = None, check_division: bool = False, name: str | None = None
) -> Source:
    """Print `kernel` under `config`.

    `wide=None` decides from sizes: static ones, or the hints of symbolic ones. With `check_division`, integer
    division by zero is reported in the error flag, as eager does on the CPU but not on GPUs. Raise
    `Unsupported` when Triton cannot express the kernel.
    """
    if wide is None:
        wide = offsets_bound(kernel, kernel.hints) >= WIDE
    layout = make_layout(kernel if config.persistent else deferred(kernel), config)
    base = name or f"{_identifier(kernel.name)}_{structural_hash(kernel)[:8]}"
    parameters = _parameters(layout, wide, check_division)
    texts, functions = [], []
    segments = _segments(layout) if config.split > 1 else [(0, len(kernel.stages) - 1)]
    for k, (first, last) in enumerate(segments):
        own = base if len(segments) == 1 else f"{base}_{k}"
        program = Program(layout, wide, check_division)
        rows = any(layout.passes_row(s) for s in layout.kernel.stages[first : last + 1])
        program.shares_row = config.split > 1 and rows
        program.write(first, last)
        texts.append(_function(own, parameters, program.lines))
        functions.append(Function(own, _grid(layout), config.split if program.shares_row else 1))
    comment = "\n".join(f"# {line}" for line in to_text(kernel).splitlines())
    return Source(
        "\n\n".join([HEADER, comment, *texts]),
        tuple(functions),
        parameters,
        _workspace(kernel, config),
        config.warps,
        wide,
    )


def _function(name: str, parameters: Sequence[Parameter], lines: Sequence[str]) -> str:
    head = f"@triton.jit\ndef {name}({', '.join(p.name for p in parameters)}):"
    return "\n".join([head, *(lines or ["    pass"])]) + "\n"


def _segments(layout: Layout) -> list[tuple[int, int]]:
    """Return ranges of stages: each ends with a pass that has reductions, the last one with the kernel."""
    out, first, stages = [], 0, layout.kernel.stages
    for k, s in enumerate(stages):
        if any(n.op == "reduce" for n in layout.roots(s)):
            out.append((first, k))
            first = k + 1
    if first < len(stages):
        out.append((first, len(stages) - 1))
    return out


def _grid(layout: Layout) -> tuple[tuple[Extent, int], ...]:
    out: list[tuple[Extent, int]] = [(layout.kernel.sizes[a], 1) for a in layout.rest]
    out += [(d.size, d.block) for d in layout.dims if d is not layout.row]
    return tuple(out)


def _parameters(layout: Layout, wide: bool, check_division: bool) -> tuple[Parameter, ...]:
    kernel = layout.kernel
    out = [Parameter(name, "buffer", b.dtype) for name, b in zip(layout.buffers, kernel.buffers, strict=True)]
    # a bool is passed as 0 or 1
    types = ["i32" if s.dtype == "bool" else s.dtype for s in kernel.scalars]
    out += [Parameter(n, "scalar", t) for n, t in zip(layout.scalars, types, strict=True)]
    out += [Parameter(layout.sizes[s], "size", "i64" if wide else "i32") for s in kernel.symbols]
    if _reports(kernel, check_division):
        out.append(Parameter("error_ptr", "error", "i32"))
    if layout.config.split > 1:
        out += [Parameter(f"part{suffix}_ptr", "part", dtype) for suffix, dtype in _parts(kernel)]
    return tuple(out)


def _parts(kernel: Kernel) -> list[tuple[str, DType]]:
    types = {n.id: n.dtype for n in kernel.nodes()}
    return [p for n in kernel.nodes() if n.op == "reduce" for p in red.parts(n, types[n.args[0]])]


def _workspace(kernel: Kernel, config: Config) -> tuple[tuple[DType, Extent], ...]:
    if config.split == 1:
        return ()
    return tuple((dtype, product(kernel.p) * config.split) for _, dtype in _parts(kernel))


def _reports(kernel: Kernel, check_division: bool) -> bool:
    """Return whether the kernel can fail."""
    types = {n.id: n.dtype for n in kernel.nodes()}
    return any(
        n.op == "bound" or (check_division and n.op in DIVISIONS and is_int(types[n.args[0]])) for n in kernel.nodes()
    )


def _identifier(name: str) -> str:
    word = "".join(c if c.isalnum() else "_" for c in name)
    return word if word[:1].isalpha() else f"k{word}"

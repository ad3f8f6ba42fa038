"""The blocks of one program: which axes each block dimension holds, and the names in the emitted text."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from fusewright.toolkit.ir.extent import Atom, Extent
from fusewright.toolkit.ir.index import Coefs
from fusewright.toolkit.ir.ir import Kernel, Node, Stage
from fusewright.toolkit.transform.online_softmax import Total, totals
from fusewright_triton.emit.addressing import begin_anywhere, strides, together
from fusewright_triton.emit.schedule import Config

FULL = 9, 10
"""The share of the lanes of steps over planes that have an element, if planes are passed over one by one."""


@dataclass(frozen=True, slots=True)
class Dim:
    """A block dimension: `block` neighbouring points of the flattened `axes`, whose sizes multiply to `size`.

    `var` holds the flattened position, `const` names the block size, `mask` the variable that says which
    positions exist (None: all do). A dimension of P with block 1 does not appear in block shapes; its `var` is
    then a scalar.
    """

    var: str
    const: str
    axes: tuple[int, ...]
    size: Extent
    block: int
    vector: bool
    mask: str | None

    def strides(self, kernel: Kernel) -> Coefs:
        return strides(kernel, self.axes)


@dataclass(slots=True)
class Layout:
    """The layout that all programs of a kernel share."""

    kernel: Kernel
    config: Config
    dims: list[Dim]
    row: Dim | None
    rest: tuple[int, ...]
    buffers: list[str]
    scalars: list[str]
    sizes: dict[Atom, str]
    dims_of: dict[int, frozenset[str]]
    nodes: dict[int, Node]
    stage_of: dict[int, int]
    rowwise: frozenset[int] = field(default_factory=frozenset)
    online: dict[int, Total] = field(default_factory=dict)
    """Sums that are computed in the pass of a maximum (see `online_softmax`); none where rows are held."""

    together: int | None = None
    """Neighbours in a row that every access can move at once, if that is less than a lane could (see `together`)."""

    apart: bool = False
    """Whether each lane takes points apart from each other, next to those of other lanes (see `begin_anywhere`)."""

    @property
    def vectors(self) -> list[Dim]:
        return [d for d in self.dims if d.vector]

    def passes_row(self, stage: Stage) -> bool:
        """Return whether a stage passes over the row, for a store or a reduction of its own."""
        return stage.over == "PR" and bool(self.roots(stage))

    def roots(self, stage: Stage) -> list[Node]:
        """Return the nodes that a stage is there to compute: its stores and reductions."""
        return [n for n in stage.nodes if n.op in ("store", "reduce") and n.id not in self.online]

    @property
    def rank(self) -> int:
        return len(self.vectors)

    def vector_names(self, over_row: bool) -> frozenset[str]:
        """Return the block dimensions of a stage over P (or over P and R)."""
        return frozenset(d.var for d in self.vectors if over_row or d is not self.row)

    def carried(self, dims: Iterable[str]) -> str:
        """Return the block shape of what is carried through a loop over the row, for an operand that varies along `dims`."""
        have = set(dims) | ({self.row.var} if self.row else set())
        return f"[RB // {self.each}]" if self.each > 1 else self.shape(have)

    @property
    def each(self) -> int:
        """The elements that a lane combines before it adds to what it carries: of blocks along the row alone."""
        return self.config.each if self.rank == 1 and not self.config.persistent else 1

    def shape(self, dims: Iterable[str]) -> str:
        """Return the block shape of a value that varies along `dims`, e.g. "[XB, 1]"; "()" for a number."""
        have = set(dims)
        if not self.rank or (self.rank == 1 and not have):
            return "()"
        return f"[{', '.join(d.const if d.var in have else '1' for d in self.vectors)}]"

    def spread(self, dim: Dim) -> str:
        """Return the subscript that turns a 1-D range into this dimension of a block."""
        if self.rank < 2:
            return ""
        at = self.vectors.index(dim)
        return f"[{', '.join(':' if i == at else 'None' for i in range(self.rank))}]"

    def lanes(self) -> str:
        """Return positions along the row, starting at 0."""
        if self.row is None:
            raise ValueError("the kernel has no row")
        text = f"tl.arange(0, {self.row.const}){self.spread(self.row)}"
        plain = self.together is None or self.rank > 1 or (self.each > 1 and any(n.op == "scan" for n in self.kernel.nodes()))
        return text if plain else f"tl.max_contiguous({text}, {self.together})"

    def row_axis(self) -> int:
        """Return the block axis that the row lies along (the last one)."""
        return self.rank - 1

    def dims_of_axes(self, axes: Iterable[int]) -> frozenset[str]:
        """Return the block dimensions along which an address that uses `axes` varies."""
        used = set(axes)
        return frozenset(d.var for d in self.vectors if used & set(d.axes))


def make_layout(kernel: Kernel, config: Config) -> Layout:
    """Choose names and block dimensions for a kernel."""
    n_p = len(kernel.p)
    dims = [_tile_dim(kernel, t.axes, t.block, c) for t, c in zip(config.tiles, _consts(config), strict=True)]
    row = _row_dim(kernel, config) if kernel.r else None
    if row is not None:
        dims.append(row)
    tiled = {a for t in config.tiles for a in t.axes}
    names = _Names()
    buffers = [names.fresh(f"{_word(b.name)}_ptr") for b in kernel.buffers]
    scalars = [names.fresh(_word(s.name)) for s in kernel.scalars]
    sizes: dict[Atom, str] = {s: names.fresh(f"s{s}") for s in kernel.symbols}
    stage_of = {n.id: k for k, s in enumerate(kernel.stages) for n in s.nodes}
    rowwise = frozenset(
        n.id for s in kernel.stages if s.over == "PR" for n in s.nodes if n.op not in ("reduce", "store")
    )
    layout = Layout(
        kernel, config, dims, row, tuple(a for a in range(n_p) if a not in tiled), buffers, scalars, sizes,
        {}, kernel.node_map(), stage_of, rowwise,
        {} if config.persistent else totals(kernel), together(kernel),
        len(config.tiles) == 1 and begin_anywhere(kernel, config.tiles[0].axes),
    )  # fmt: skip
    layout.dims_of = _spread_scans(kernel, layout, {i: layout.dims_of_axes(axes) for i, axes in kernel.axes_of().items()})
    return layout


def by_planes(layout: Layout, ids: Collection[int]) -> Layout | None:
    """Return the layout of a pass over rows plane by plane, whose block lies along the last axis of the row: if the nodes `ids`
    read something once for each plane, and steps fill planes. Each element would find out its plane, and read that again."""
    kernel, config, row = layout.kernel, layout.config, layout.row
    if row is None or len(row.axes) < 2 or layout.each == 1:
        return None
    inner, nodes = row.axes[-1], [layout.nodes[i] for i in ids]
    size = kernel.sizes[inner]
    if not isinstance(size, int) or -(-size // config.row) * config.row * FULL[0] > size * FULL[1]:
        return None
    if any(n.op in ("scan", "state") or n.how.startswith("arg") for n in nodes):
        return None
    if any(n.how == "m2" for n in nodes) and config.split > 1:
        return None  # programs count whole shares of the row
    outer, count = set(row.axes[:-1]), product([kernel.sizes[a] for a in row.axes[:-1]])
    if config.split > 1 and (not isinstance(count, int) or -(-count // config.split) * config.split * FULL[0] > count * FULL[1]):
        return None
    stored = {n.buffer for n in kernel.nodes() if n.op == "store"}
    if any(n.op == "load" and n.buffer in stored for n in nodes):
        return None
    read = [n.index.axes() for n in nodes if n.op == "load" and n.index is not None and not n.index.indirect]
    if not any(axes & outer and inner not in axes for axes in read):
        return None
    var = axis_name(kernel, inner)
    plane = replace(row, var=var, axes=(inner,), size=size, mask=None if _fits(size, config.row) else f"{var}_mask")
    found = replace(layout, dims=[plane if d is row else d for d in layout.dims], row=plane)
    found.dims_of = {i: found.dims_of_axes(axes) for i, axes in kernel.axes_of().items()}
    return found


def _spread_scans(kernel: Kernel, layout: Layout, dims_of: dict[int, frozenset[str]]) -> dict[int, frozenset[str]]:
    """Spread scans, and values computed from them, over every row of a block, even where all rows are alike: Triton's lowering
    of a scan asserts that its operand fills the layout."""
    rows, spread = layout.vector_names(over_row=False), set[int]()
    for n in kernel.nodes():
        if n.id in dims_of and (n.op in ("scan", "state") or spread & set(n.uses())):
            spread.add(n.id)
            dims_of[n.id] |= rows
    return dims_of


def axis_name(kernel: Kernel, axis: int) -> str:
    """Return p0, p1, ..., r0, ... as in the printed IR."""
    return f"p{axis}" if axis < len(kernel.p) else f"r{axis - len(kernel.p)}"


def product(extents: Sequence[Extent]) -> Extent:
    """Return the product of sizes."""
    out: Extent = 1
    for e in extents:
        out = out * e
    return out


def _consts(config: Config) -> list[str]:
    return ["YB", "XB"] if len(config.tiles) == 2 else ["XB"] * len(config.tiles)


def _tile_dim(kernel: Kernel, axes: tuple[int, ...], block: int, const: str) -> Dim:
    size = product([kernel.sizes[a] for a in axes])
    var = axis_name(kernel, axes[0]) if len(axes) == 1 else const[0].lower()
    mask = None if block == 1 or _fits(size, block) else f"{var}_mask"
    return Dim(var, const, axes, size, block, block > 1, mask)


def _row_dim(kernel: Kernel, config: Config) -> Dim:
    axes = tuple(range(len(kernel.p), len(kernel.sizes)))
    size = product(kernel.r)
    var = axis_name(kernel, axes[0]) if len(axes) == 1 else "r"
    mask = None if _fits(size, config.row) else f"{var}_mask"
    return Dim(var, "RB", axes, size, config.row, True, mask)


def _fits(size: Extent, block: int) -> bool:
    return isinstance(size, int) and size > 0 and size % block == 0  # a persistent row of length 0 still runs once


def _word(name: str) -> str:
    """Return `name` as a Python identifier."""
    word = re.sub(r"\W", "_", name)
    return word if word[:1].isalpha() else f"n{word}"


class _Names:
    """Parameter names, made distinct from each other and from the names that programs use themselves."""

    _OWN = re.compile(r"(v|acc|part|carry)\d|[pr]\d+$|(x|y|r|pid|part|start|tl|fw|triton|libdevice|error_ptr|XB|YB|RB)$")

    def __init__(self) -> None:
        self.taken: set[str] = set()

    def fresh(self, word: str) -> str:
        if self._OWN.match(word):  # it matches a prefix, so a suffix would not help
            word = f"n_{word}"
        while word in self.taken:
            word += "_"
        self.taken.add(word)
        return word

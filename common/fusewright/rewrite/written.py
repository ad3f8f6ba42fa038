"""Pieces that are written into an input, `x[:, p:p+1] = y`, as a scatter: caches of decoders that count positions in Python.

Without writes in place, each such line makes all of `x` anew with one piece replaced, and copies that to `x`. A scatter's kernel
writes the piece alone, into `x` itself (`plan/inplace.py`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import torch
from torch.fx import Graph, Node

from fusewright import _torch_compat as compat
from fusewright import ops
from fusewright.graph.effects import drop_dead_code
from fusewright.graph.spec import SizeArgument, arguments, extent, same_size, same_strides, value_of
from fusewright.interface import RuleLog
from fusewright.rewrite.engine import READER, Rewriter, is_call
from fusewright.rewrite.loops.filled import copied
from fusewright.toolkit.ir.extent import distinct

ID = "piece.written"
"""The rule's id in reports, and for `disable_rules`."""

_SCATTERS = {"slice_scatter": "slice", "select_scatter": "select"}
"""The rows that replace a piece, and the views that read it."""

_COPY = torch.ops.aten.copy_.default
_PARTS = 2
"""The least number of times that a tensor is larger than a piece of it that is written alone."""

Size: TypeAlias = "int | torch.SymInt"


@dataclass(frozen=True)
class _Box:
    """Part of a tensor: the first index and the number of indices along each dim, and the dims that it leaves out."""

    starts: tuple[SizeArgument, ...]
    sizes: tuple[Size, ...]
    selected: frozenset[int] = frozenset()

    def within(self, dim: int) -> int:
        """The tensor's dim that a dim of the piece is."""
        return [d for d in range(len(self.sizes)) if d not in self.selected][dim]


def write(graph: Graph, log: RuleLog) -> None:
    """Rewrite what replaces a small piece of an input of a canonical graph."""
    if ID in log.disabled or not any(_SCATTERS.keys() & {READER.name(n)} for n in graph.nodes if n.op == "call_function"):
        return
    r = Rewriter(graph, log)
    for copy in [n for n in graph.nodes if n.target is _COPY and n.args[0].op == "placeholder"]:
        for node in list(_replaced(copy)):
            if not r.changes_before(node) and log.allows(ID):
                r.substitute(ID, node, _scatter, r, node)
    drop_dead_code(graph)


def _replaced(copy: Node) -> Iterator[Node]:
    """The nodes that replace pieces of an input one after the other, first of the last; none if what is copied begins elsewhere."""
    x, node = copy.args[:2]
    found = []
    while isinstance(node, Node) and is_call(node, *_SCATTERS):
        found.append(node)
        node = node.args[0]
    return iter(found[::-1] if node is x else ())


def _scatter(r: Rewriter, node: Node) -> Node | None:
    """`node` with its piece put to places that are computed."""
    x, (box, piece) = cast("Node", node.args[0]), _innermost(node)
    val, y = value_of(node), value_of(piece)
    if box is None or val.is_complex() or not same_strides(val, value_of(x)) or not _small(box.sizes, val.shape):
        return None
    if not distinct([extent(n) for n in val.shape], [extent(n) for n in val.stride()]):
        return None  # a write shows in all elements that share its memory
    if is_call(piece, "copy"):
        piece = copied(r, piece)
    elif y.dtype != val.dtype or y.device != val.device:
        return None
    if piece is None:
        return None
    for dim in sorted(box.selected):
        piece = r.call("unsqueeze", (piece, dim))
    parts = [d for d, (n, size) in enumerate(zip(box.sizes, val.shape, strict=True)) if not same_size(n, size)]
    if parts[-1] - parts[0] >= len(parts):  # indexed dims come first then
        piece = r.call("permute", (piece, [*parts, *(d for d in range(val.dim()) if d not in parts)]))
    places: list[Any] = [None] * (parts[-1] + 1)
    for k, d in enumerate(parts):
        places[d] = _places(r, box.starts[d], box.sizes[d], len(parts) - 1 - k, val.device)
    return r.call("index_put", (x, places, piece), like=node)


def _places(r: Rewriter, start: SizeArgument, count: Size, behind: int, device: torch.device) -> Node:
    """The indices from `start` on, with `behind` dims of one element after theirs."""
    options = {"dtype": torch.int64, "device": device}
    if isinstance(count, int) and count == 1:
        index = r.call("full", ([1], start), kwargs=options)
    else:
        (end,) = arguments(r.graph, [count])
        index = r.call("arange", (0, end, 1), kwargs=options)
        index = index if start == 0 else r.call("add", (index, start))
    for _ in range(behind):
        index = r.call("unsqueeze", (index, -1))
    return index


def _innermost(node: Node) -> tuple[_Box | None, Any]:
    """The box of `node` that is replaced, and by what: `x[layer][:, p] = y` replaces a piece of a piece."""
    base, piece = node.args[:2]
    whole = _Box((0,) * value_of(node).dim(), tuple(value_of(node).shape))
    box = _narrowed(whole, node)
    while box is not None and is_call(piece, *_SCATTERS):
        same = box.selected == whole.selected and all(map(operator.is_, box.sizes, whole.sizes))
        if not (piece.args[0] is base if same else _reads(piece.args[0], base, node)):
            break
        inner = _narrowed(box, piece)
        if inner is None:
            break
        base, node, whole, box, piece = piece.args[0], piece, box, inner, piece.args[1]
    return box, piece


def _reads(view: Any, base: Any, scatter: Node) -> bool:
    """Whether `view` is the piece of `base` that `scatter` replaces."""
    if not is_call(view, _SCATTERS[READER.name(scatter)]) or view.args[0] is not base:
        return False
    one, other = _bound(view), _bound(scatter)
    return all(one[name] == other[name] for name in one if name != "self")


def _bound(node: Node) -> dict[str, Any]:
    row = ops.find(node.target)
    assert row is not None
    return dict(row.bind(node.args, node.kwargs))


def _narrowed(box: _Box, scatter: Node) -> _Box | None:
    """The box of the piece that `scatter`, whose own tensor is `box`, replaces; None where its place is not known."""
    call, tensor = _bound(scatter), value_of(scatter)
    if not isinstance(call["dim"], int) or call.get("step", 1) != 1:
        return None
    dim, kept = call["dim"] % tensor.dim(), "index" not in call
    start = (call["start"] or 0) if kept else call["index"]
    if isinstance(start, int) and start < 0 and isinstance(tensor.shape[dim], int):
        start = max(start + tensor.shape[dim], 0)
    if not compat.statically_true(_value(start) >= 0):
        return None
    at = box.within(dim)
    if box.starts[at] != 0 and start != 0:
        return None
    starts, sizes = list(box.starts), list(box.sizes)
    starts[at] = start or starts[at]
    count = value_of(call["src"]).shape[dim] if kept else 1
    sizes[at] = sizes[at] if kept and same_size(count, sizes[at]) else count
    return replace(box, starts=tuple(starts), sizes=tuple(sizes), selected=box.selected | ({at} if not kept else set()))


def _value(start: SizeArgument) -> Any:
    return value_of(start) if isinstance(start, Node) else start


def _small(piece: tuple[Size, ...], whole: tuple[Size, ...]) -> bool:
    """Whether a piece has few of a tensor's elements: some, if its size is a symbol."""
    partial = any(not same_size(n, size) for n, size in zip(piece, whole, strict=True))
    known = all(isinstance(n, int) for n in (*piece, *whole))
    return partial and (not known or math.prod(piece) * _PARTS <= math.prod(whole))

"""Mend traced metadata, and propagate the change to dependent nodes."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch.fx import Graph, Node

from fusewright import _torch_compat as compat
from fusewright import ops
from fusewright.graph.effects import names_sizes
from fusewright.graph.spec import contiguous_strides, size, tensor_spec, value_of
from fusewright.ops import strides
from fusewright.ops.states import stated

__all__ = ["alike", "called", "downstream", "fake_like", "infer", "mend", "mend_item", "same_kind", "value_of", "viewable"]


_VIEW = torch.ops.aten.view.default


def fake_like(
    val: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    stride: tuple[int, ...] | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Return a FakeTensor like `val` with another dtype, other strides or on another device."""
    return _empty(val, val.shape, stride or val.stride(), dtype or val.dtype, device or val.device)


def called(graph: Graph, place: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Add a call, with its traced value, on behalf of the node `place`."""
    made = graph.call_function(target, args, kwargs)
    made.meta.update({k: v for k, v in place.meta.items() if k not in ("val", "tensor_meta")})
    given, named = torch.fx.node.map_arg((args, kwargs), value_of)
    with compat.fake_mode_of(value_of(place)):
        made.meta["val"] = target(*given, **named)
    return made


def contiguous_like(val: torch.Tensor, sizes: Sequence[Any]) -> torch.Tensor:
    """Return a contiguous FakeTensor like `val` of other sizes, without comparing these, which could add guards."""
    return _empty(val, sizes, contiguous_strides(sizes), val.dtype, val.device)


def _empty(
    val: torch.Tensor, sizes: Sequence[Any], strides: Sequence[Any], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return a FakeTensor of `val`'s mode. Torch 2.15 asks for each size whether it is zero, but only to know how much memory there
    is: no guard is due to that."""
    with compat.unguarded(val):
        return torch.empty_strided(sizes, strides, dtype=dtype, device=device)


def mend(graph: Graph, node: Node, actual: torch.Tensor) -> None:
    """Give `node` the dtype, strides and device of its actual result, and update its users.

    ValueError if it is quantized, or its shape differs, which is not a mere metadata error.
    """
    val = value_of(node)
    if not isinstance(val, torch.Tensor) or not _could_have(val, actual):
        raise ValueError(f"{node.name} makes a {tuple(actual.shape)} where {val!r} was traced")
    stride = actual.stride() if tensor_spec(val).static else _ordered(val, actual)
    node.meta["val"] = fake_like(val, dtype=actual.dtype, stride=stride, device=actual.device)
    downstream(graph, node)


def _could_have(val: torch.Tensor, actual: torch.Tensor) -> bool:
    """Whether a FakeTensor can have the metadata of `actual`, and its shape is the traced one. No FakeTensor has the scale of a
    quantized tensor; an asserted size is a number, though torch holds a symbol."""
    sizes = tensor_spec(val).shape
    return not actual.is_quantized and len(sizes) == actual.dim() and all(
        not isinstance(s, int) or s == n for s, n in zip(sizes, actual.shape, strict=True)
    )


def _ordered(val: torch.Tensor, actual: torch.Tensor) -> tuple[int, ...]:
    """Symbolic strides of a tensor like `val` whose dimensions lie in memory as those of `actual`; ValueError where it has gaps."""
    dims = sorted(range(actual.dim()), key=lambda d: actual.stride(d), reverse=True)
    if not actual.permute(dims).is_contiguous():
        raise ValueError(f"strides {actual.stride()} of {tuple(actual.shape)} do not follow from symbolic sizes")
    stride = dict(zip(dims, contiguous_strides([val.shape[d] for d in dims]), strict=True))
    return tuple(stride[d] for d in range(len(dims)))


def mend_item(graph: Graph, node: Node, position: int, actual: torch.Tensor) -> None:
    """Like `mend`, for one result of a multi-output node. The shape of an unread result may differ."""
    items = list(value_of(node))
    readers = [n for n in node.users if n.target is operator.getitem and n.args[1] == position]
    for reader in readers:
        mend(graph, reader, actual)
        items[position] = value_of(reader)
    if not readers:
        items[position] = _empty(items[position], actual.shape, actual.stride(), actual.dtype, actual.device)
    node.meta["val"] = tuple(items)


def alike(graph: Graph, node: Node) -> list[Node]:
    """`node` and every later node that computes the same from inputs of the same kinds: metadata traced wrong in one layer of a
    model is wrong in all. If this guess is wrong, the next run tells."""
    key, traced = _computation(node), _kind(value_of(node))
    later = list(graph.nodes)
    return [node] + [
        n
        for n in later[later.index(node) + 1 :]
        if n.op == "call_function" and _kind(value_of(n)) == traced and _computation(n) == key
    ]


def _computation(node: Node) -> Any:
    """A key of what a node computes: its operator, the kinds of its tensors and its other arguments."""
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        return node.args[1], _computation(node.args[0])
    target, *given = _call(node)
    args, kwargs = torch.fx.node.map_arg(given, lambda n: (_kind(value_of(n)),))
    return target, args, kwargs


def _call(node: Node) -> tuple[Any, Any, Any]:
    """What a node calls, and with what, besides a generator of its own."""
    found = stated(node)
    return (node.target, node.args, node.kwargs) if found is None else (found.operator, found.args, found.kwargs)


def downstream(graph: Graph, *changed: Node) -> None:
    """Recompute the metadata of every node that depends on one of `changed`.

    A reshape was traced as a view if the wrong strides allowed one. If the true strides do not, it becomes a reshape again.
    """
    if not changed:
        return
    stale = set(changed)
    for node in graph.nodes:
        if node.op != "call_function" or node in changed or not stale & set(node.all_input_nodes):
            continue
        if node.target is _VIEW and not viewable(*node.args):
            node.target = torch.ops.aten.reshape.default
        before = value_of(node)
        try:
            after = infer(node)
        except compat.SizesAssumed:  # guards are fixed: what was traced stays, and the first run tells whether it is true
            continue
        node.meta["val"] = after = _sized(before, after) if names_sizes(node) else after
        if _kind(before) != _kind(after):
            stale.add(node)


def viewable(of: Any, sizes: Any) -> bool:
    """Whether a tensor has a view of these sizes. Asked outside FakeTensorMode, which accepts impossible views, unless sizes
    are symbolic, which only that mode knows."""
    spec, sizes = tensor_spec(value_of(of)), torch.fx.node.map_arg(sizes, value_of)
    try:
        if spec.static:
            with compat.without_modes():
                _VIEW(torch.empty_strided(spec.shape, spec.stride, device="meta"), sizes)  # type: ignore[arg-type]
        else:
            with compat.fake_mode_of(value_of(of)), compat.assuming_nothing(value_of(of)):
                _VIEW(value_of(of), sizes)
    except (RuntimeError, ValueError):
        return False
    return True


def _sized(before: Any, after: Any) -> Any:
    """Keep the symbols of data-dependent sizes: other nodes refer to them."""
    if isinstance(before, tuple | list):
        return tuple(map(_sized, before, after))
    if not isinstance(before, torch.Tensor):
        return before
    return fake_like(before, dtype=after.dtype, device=after.device)


def infer(node: Node) -> Any:
    """Compute a node's result from the metadata of its inputs; `SizesAssumed` if it depends on more than what is known of sizes."""
    target, *given = _call(node)
    args, kwargs = torch.fx.node.map_arg(given, value_of)
    if target is operator.getitem:
        return operator.getitem(*args)
    with _settled(_any_fake(chain(node.all_input_nodes, node.graph.nodes))):
        val = target(*args, **kwargs)
        row = ops.find(target) if compat.is_overload(target) else None
        row = row if row is not None and row.target is target else None
        return as_eager(row, args, kwargs, typed(row, args, kwargs, val))


def _any_fake(nodes: Iterable[Node]) -> torch.Tensor | None:
    """A FakeTensor among the values of nodes. A call without tensors, such as `randn`, needs one too: it would really draw."""
    return next((v for n in nodes if isinstance(v := n.meta.get("val"), torch.Tensor) and compat.is_fake(v)), None)


@contextmanager
def _settled(fake: torch.Tensor | None) -> Iterator[None]:
    """A context for recomputing metadata once guards are fixed."""
    if fake is None:
        yield
        return
    with compat.fake_mode_of(fake), compat.assuming_nothing(fake):
        yield


def typed(row: ops.Op | None, args: Any, kwargs: Any, val: Any) -> Any:
    """Correct the dtypes of traced results by the row's rules, where there are several or torch is known to differ: for a norm's
    gradients torch takes them from the statistics, eager from the input. Returns `val` itself if nothing differs."""
    several = isinstance(val, tuple | list)
    if row is None or not (several or row.fake_differs):
        return val
    vals = val if several else (val,)
    known = [v if d is None or not isinstance(v, torch.Tensor) or v.dtype == d else fake_like(v, dtype=d)
             for v, d in zip(vals, row.dtypes(args, kwargs), strict=False)]  # fmt: skip
    if all(map(operator.is_, vals, known)):
        return val
    return (*known, *vals[len(known) :]) if several else known[0]


def as_eager(row: ops.Op | None, args: Any, kwargs: Any, val: Any) -> Any:
    """Return `val`, traced for a row, with eager's strides. Call under the FakeTensorMode."""
    known = () if row is None else strides.expected(row, args, kwargs)
    if not known:
        return val
    vals = val if isinstance(val, tuple | list) else (val,)
    if row is not None and row.name in strides.VIEWS:
        return _seen_as(val, known[0])
    ones = row is not None and row.name in strides.BROADCAST
    mended = tuple(_laid_out(v, like, ones) for v, like in zip(vals, (*known, *[None] * (len(vals) - len(known))), strict=True))
    return mended if isinstance(val, tuple | list) else mended[0]


def _seen_as(view: torch.Tensor, like: torch.Tensor | None) -> torch.Tensor:
    """A view of the same memory with all strides of `like`, also of dims of size one."""
    return view if like is None or view.stride() == like.stride() else view.as_strided(view.shape, like.stride())


def _laid_out(val: Any, like: torch.Tensor | None, ones: bool = False) -> Any:
    """A value with the strides of `like`, if they differ; `ones`: also where only those of dims of size one do."""
    if like is None or not isinstance(val, torch.Tensor) or val.layout is not torch.strided or val.dim() != like.dim():
        return val
    pairs = zip(val.shape, val.stride(), like.stride(), strict=True)
    if all(compat.statically_true(s == t) or (compat.statically_true(n == 1) and not ones) for n, s, t in pairs):
        return val
    return torch.empty_strided(val.shape, like.stride(), dtype=val.dtype, device=val.device)


def same_kind(a: Any, b: Any) -> bool:
    """Whether two traced values have the same metadata."""
    return bool(_kind(a) == _kind(b))


def _kind(val: Any) -> Any:
    if isinstance(val, tuple | list):
        return [_kind(v) for v in val]
    if isinstance(val, torch.SymInt | torch.SymFloat | torch.SymBool):
        return str(val)
    if not isinstance(val, torch.Tensor):
        return val
    return val.dtype, val.device, *(tuple(map(size, s)) for s in (val.shape, val.stride()))

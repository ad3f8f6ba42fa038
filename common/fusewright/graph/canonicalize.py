"""ATen -> opset: each call of a known overload becomes its row's canonical overload with normalized arguments."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from fusewright import _torch_compat as compat
from fusewright import ops
from fusewright.forms.spec import Pass, in_place
from fusewright.graph import foreach, retrace, verify
from fusewright.graph.fills import host_scalars, number_fills, size_fills
from fusewright.graph.refused import refusal
from fusewright.interface import HOST
from fusewright.ops.core import unbind
from fusewright.ops.states import stated
from fusewright.ops.strides import CHANNELS_LAST, RULES

_BATCH_NORM = torch.ops.aten.native_batch_norm.default


def canonicalize(graph: Graph) -> list[str]:
    """Rewrite `graph` in place; nodes outside the opset stay as opaque ATen nodes.

    Return the disagreements between the table's rules and the traced metadata. Such nodes are marked, and eager runs them.
    """
    disagreements = []
    foreach.single(graph)
    foreach.products_and_sums(graph)
    _own_states(graph)
    _flat_results(graph)
    host_scalars(graph)
    size_fills(graph)
    number_fills(graph)
    _integer_products(graph)
    _library_norms(graph)
    for node in graph.nodes:
        if node.op != "call_function" or not compat.is_overload(node.target):
            continue
        found = ops.canonical(node.target, node.args, node.kwargs)
        refused = _refusal(node) if found is not None else None
        if refused is not None:
            node.meta[verify.UNTRUSTED] = refused
        if found is not None and (refused is None or ops.find(node.target) is not None):
            row, node.args, node.kwargs = found
            node.target = row.target
            _each_dim(node, row)
            _forget_unread(graph, node, row)
            _mend_dtypes(graph, node, row)
            if refused is not None:
                continue
            _lay_as_image(graph, node, row)
            _mend_strides(graph, node, row)
            if problems := list(verify.op_problems(node)):
                node.meta[verify.UNTRUSTED] = f"the opset does not describe it as it was traced: {problems[0]}"
                disagreements += problems
    return disagreements


def _own_states(graph: Graph) -> None:
    """Give calls with states of random numbers their traced values, which torch's checkpoints leave out. Where nothing is drawn (in
    an attention without dropout) the state is needless, and takes time in each replay."""
    for node in graph.nodes:
        found = stated(node)
        if found is None:
            continue
        if "val" not in node.meta:
            node.meta["val"] = _traced(node, len(found.operator._schema.returns))
        if not ops.call_draws(found.operator, found.args, found.kwargs):
            node.target, node.args, node.kwargs = found.operator, found.args, found.kwargs


def _traced(node: Node, results: int) -> Any:
    """The value of a call: computed, or where that would assume sizes what its readers tell of several results."""
    try:
        return retrace.infer(node)
    except compat.SizesAssumed:
        read = {u.args[1]: retrace.value_of(u) for u in node.users if u.target is operator.getitem}
        return tuple(map(read.get, range(results))) if results > 1 else None


def _flat_results(graph: Graph) -> None:
    """Make calls whose results lie in tuples of tuples (the gradients of what flex attention's functions read) return one flat
    tuple: a result is then selected by one getitem."""
    for node in list(graph.nodes):
        val = node.meta.get("val")
        nested = isinstance(val, tuple | list) and any(isinstance(v, tuple | list) for v in val)
        if nested and node.op == "call_function" and node.target is not operator.getitem and _only_selected(node):
            node.target, node.meta["val"] = _flat_call(node.target), tuple(_leaves(val))
            _select_leaves(graph, node, node, val, 0)


def _only_selected(node: Node) -> bool:
    """Whether all readers of a tuple select one of its elements, and so on for tuples that they select."""
    if not isinstance(node.meta.get("val"), tuple | list):
        return True
    return all(u.target is operator.getitem and _only_selected(u) for u in node.users)


def _select_leaves(graph: Graph, call: Node, node: Node, val: Any, first: int) -> None:
    """Replace the getitems of `node`, whose value `val` begins with the leaf `first` of the results of `call`."""
    for user in list(node.users):
        k: int = operator.index(user.args[1]) % len(val)  # type: ignore[arg-type]
        at = first + sum(1 for v in val[:k] for _ in _leaves(v))
        if isinstance(val[k], tuple | list):
            _select_leaves(graph, call, user, val[k], at)
            graph.erase_node(user)
        else:
            user.args = (call, at)


def _flat_call(target: Any) -> Callable[..., tuple[Any, ...]]:
    def flat(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return tuple(_leaves(target(*args, **kwargs)))

    flat.__name__ = flat.__qualname__ = getattr(target, "__name__", str(target))
    return flat


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for v in value:
            yield from _leaves(v)
    else:
        yield value


def _refusal(node: Node) -> str | None:
    """Why eager refuses the call, or None; a refused call is left as it is."""
    args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), retrace.value_of)
    return refusal(node.target, args, kwargs, node.meta.get("val"))


def _library_norms(graph: Graph) -> None:
    """Make a library's batch norm, as the direct capture of fp32 on GPUs records it, the operator that stands for all."""
    for node in list(graph.nodes):
        if not compat.is_overload(node.target) or not ops.is_batch_norm(node.target) or node.target is _BATCH_NORM:
            continue
        if ops.writes_statistics(node.target, node.args, node.kwargs):
            continue
        bound = ops.bind(ops.params_of(node.target), node.args, node.kwargs)
        common = 3 if bound["training"] else 1  # in inference libraries return no statistics
        if all(u.target is operator.getitem and u.args[1] < common for u in node.users if u.users):
            node.target, node.args, node.kwargs = _BATCH_NORM, tuple(bound.values()), {}
            node.meta["val"] = node.meta["val"][:common] + retrace.infer(node)[common:]


def _integer_products(graph: Graph) -> None:
    """Rewrite `out_dtype(mm, int32, a, b)` of int8 matrices, as torchao's dynamic quantization emits on some devices, to
    `_int_mm`."""
    for node in list(graph.nodes):
        of_mm = node.args[:2] == (torch.ops.aten.mm.default, torch.int32)
        if getattr(node.target, "__name__", "") == "out_dtype" and of_mm:
            if all(retrace.value_of(n).dtype == torch.int8 for n in node.args[2:]):
                node.target, node.args = torch.ops.aten._int_mm.default, node.args[2:]
        if node.target is torch.ops.aten._int_mm.default:
            _separate_rows(graph, node)


def _separate_rows(graph: Graph, node: Node) -> None:
    """Copy operands that BLAS cannot address: eager's `_int_mm` on the host returns garbage for them."""
    for x in node.all_input_nodes:
        val = retrace.value_of(x)
        if val.device.type != HOST or _is_blas_matrix(val):
            continue
        _copy_operand(graph, node, x, torch.contiguous_format)


def _copy_operand(graph: Graph, node: Node, x: Node, memory_format: torch.memory_format) -> None:
    """Let a call read a copy of an operand in this layout."""
    with graph.inserting_before(node):
        copy = graph.call_function(torch.ops.aten.clone.default, (x,), {"memory_format": memory_format})
    copy.meta.update(node.meta, val=retrace.infer(copy))
    node.replace_input_with(x, copy)


def _is_blas_matrix(val: torch.Tensor) -> bool:
    """Whether rows or columns are dense and disjoint, or neither is dense: eager copies those itself."""
    (rows, columns), (down, along) = val.shape, val.stride()
    true = compat.statically_true
    if true(along == 1):
        return true(down >= columns)
    return true(along >= rows) if true(down == 1) else true(down != 1) and true(along != 1)


def _each_dim(node: Node, row: ops.Op) -> None:
    """Write out the numbers of a convolution for each dim of its window: one may stand for all, as "valid" is traced."""
    if row.name not in ("conv", "conv_backward"):
        return
    bound = row.bind(node.args, node.kwargs)
    dims = retrace.value_of(bound["weight"]).dim() - 2
    given = {name: bound[name] for name in ("stride", "padding", "dilation", "output_padding")}
    bound |= {name: [*numbers] * dims for name, numbers in given.items() if len(numbers) == 1}
    node.args, node.kwargs = unbind(row.params, bound)


def _lay_as_image(graph: Graph, node: Node, row: ops.Op) -> None:
    """Copy the gradient of a channels-last convolution to channels-last, as its library would: what computes it can lay it so.
    Autograd does not see the layout of what it clears in place, as a minimum's gradient."""
    if row.name != "conv_backward":
        return
    bound = row.bind(node.args, node.kwargs)
    gradient, image = (retrace.value_of(bound[name]) for name in ("grad_output", "input"))
    last = CHANNELS_LAST.get(image.dim())
    fixed = all(isinstance(s, int) for t in (gradient, image) for s in (*t.shape, *t.stride()))  # symbols would be compared
    if last is None or not fixed or image.is_contiguous() or not image.is_contiguous(memory_format=last):
        return
    if not gradient.is_contiguous(memory_format=last):
        _copy_operand(graph, node, bound["grad_output"], last)


def _forget_unread(graph: Graph, node: Node, row: ops.Op) -> None:
    """Give unread results the shapes from the table: for inference batch norm, torch's metadata has the shapes of some GPU's
    statistics, which no device returns."""
    val = node.meta.get("val")
    if not isinstance(val, tuple | list) or any(u.target is not operator.getitem for u in node.users):
        return
    for user in [u for u in node.users if not u.users]:
        graph.erase_node(user)
    read = {u.args[1] for u in node.users}
    if len(read) == len(val):
        return
    args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), retrace.value_of)
    shapes = row.shapes(args, kwargs)
    node.meta["val"] = tuple(
        v if k in read or k >= len(shapes) or not isinstance(v, torch.Tensor) else _shaped(v, shapes[k])
        for k, v in enumerate(val)
    )


def _shaped(val: torch.Tensor, shape: tuple[Any, ...] | None) -> torch.Tensor:
    """Return `val` with the shape from the table; None if the table has none."""
    if shape is None:
        return val
    if len(shape) == val.dim() and all(map(compat.statically_true, map(operator.eq, val.shape, shape))):
        return val
    with compat.fake_mode_of(val):
        return torch.empty(shape, dtype=val.dtype, device=val.device)


def _mend_dtypes(graph: Graph, node: Node, row: ops.Op) -> None:
    """Take the table's dtype where it knows better than torch's metadata what eager returns (statistics of norms)."""
    val = node.meta.get("val")
    if not isinstance(val, tuple | list) and not row.fake_differs:
        return
    args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), retrace.value_of)
    mended = retrace.typed(row, args, kwargs, val)
    if mended is not val:
        node.meta["val"] = mended
        retrace.downstream(graph, node)


def _mend_strides(graph: Graph, node: Node, row: ops.Op) -> None:
    """Take the table's strides where it knows better than torch's metadata what eager returns."""
    val = node.meta.get("val")
    if row.name not in RULES or val is None:
        return
    args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), retrace.value_of)
    fakes = [v for v in (val if isinstance(val, tuple | list) else (val,)) if isinstance(v, torch.Tensor)]
    try:
        with compat.fake_mode_of(fakes[0]), compat.assuming_nothing(fakes[0]):
            mended = retrace.as_eager(row, args, kwargs, val)
    except compat.SizesAssumed:  # eager's strides differ by sizes; the first run compares them
        return
    before, after = ((v if isinstance(v, tuple | list) else (v,)) for v in (val, mended))
    if any(a is not b for a, b in zip(before, after, strict=True)):
        node.meta["val"] = mended
        retrace.downstream(graph, node)


CANONICALIZE = Pass("canonicalize", "graph", verify.GRAPH, canonicalize, in_place)

"""Products in a wider type: on a device without instructions for a half type, its products take several times those of fp32
(`DevicePolicy.wider`). Operands are widened, which is exact, and the result is rounded once, as by eager, whose sums are fp32 too
but in another order."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fusewright import _torch_compat as compat
from fusewright import ops
from fusewright.graph import spec
from fusewright.graph.constants import COMPUTED_ONCE
from fusewright.graph.verify import UNTRUSTED
from fusewright.graph.view import is_op, is_projection
from fusewright.interface import RuleLog, hint
from fusewright.ops.strides import CHANNELS_LAST
from fusewright.rewrite.engine import Rewriter

ID = "product.wider"
"""The rule's id in reports, and for `disable_rules`."""

SUMMED: Mapping[str, tuple[str, slice]] = {
    "linear": ("weight", slice(1, None)), "mm": ("self", slice(1, None)), "addmm": ("mat1", slice(1, None)),
    "matmul": ("self", slice(-1, None)), "mv": ("self", slice(1, None)), "addmv": ("mat", slice(1, None)),
    "bmm": ("self", slice(2, None)), "baddbmm": ("batch1", slice(2, None)),
    "sdpa": ("key", slice(2, None)),
    "conv": ("weight", slice(1, None)), "conv_backward": ("weight", slice(1, None)),
}  # fmt: skip
"""Rows that are widened. The product of these sizes of this argument is the number of products in each sum. Attention in training
is not: kernels may pass on what they widen without the rounding in between, and gradients need the scores of the forward pass."""

Wider: TypeAlias = Callable[[str, torch.dtype, int], torch.dtype | None]

MASK = "attn_mask"
"""The argument of attention that may be in the wider type where others are not."""

LEAST_PRODUCTS = 1 << 15
"""Below these multiplications, more calls cost more than wider ones gain."""


def widen(graph: Graph, wider: Wider | None, log: RuleLog) -> None:
    """Rewrite a canonical graph in place: compute products in the type that `wider` names (see `DevicePolicy.wider`)."""
    if wider is None or ID in log.disabled:
        return
    rewriter = Rewriter(graph, log)
    for node in list(graph.nodes):
        wide = _wider(node, wider)
        if wide is not None and log.allows(ID) and _widened(rewriter, node, wide):
            log.hit(ID)
            graph.erase_node(node)


def _wider(node: Node, wider: Wider) -> torch.dtype | None:
    """Return the type in which to compute a node; None leaves it as it is."""
    row = ops.find(node.target) if is_op(node) else None
    if row is None or row.name not in SUMMED or UNTRUSTED in node.meta:
        return None
    floating = _floating(node)
    if not floating:
        return None
    name, sizes = SUMMED[row.name]
    given, operands = row.bind(node.args, node.kwargs), [spec.value_of(n) for n in floating]
    products = math.prod(hint(spec.size(n)) for n in spec.value_of(given[name]).shape[sizes])
    first, val = operands[0], spec.value_of(node)
    result = val if isinstance(val, torch.Tensor) else first
    if products * spec.tensor_spec(result).numel_hint() < LEAST_PRODUCTS:
        return None
    found = wider(row.name, first.dtype, _rows(operands))
    mask = given.get(MASK)
    same = all(t.dtype in (first.dtype, found if n is mask else first.dtype) for n, t in zip(floating, operands, strict=True))
    return found if same else None  # a product of two types is an error, which must stay one


def _floating(node: Node) -> list[Node]:
    """Return the operands of a node that hold floats: a mask may hold bools."""
    given = [(n, spec.value_of(n)) for n in node.all_input_nodes]
    return [n for n, val in given if isinstance(val, torch.Tensor) and val.is_floating_point()]


def _rows(operands: Sequence[torch.Tensor]) -> int:
    """Return the number of rows of the first operand, of a product whose operands are dense and of fixed size."""
    first = spec.tensor_spec(operands[0])
    plain = all(spec.tensor_spec(t).static and t.is_contiguous() for t in operands[:2])
    return first.numel_hint() // max(1, hint(first.shape[-1])) if plain and first.rank else sys.maxsize


def _widened(r: Rewriter, node: Node, wide: torch.dtype) -> bool:
    """Compute a product in a wider type ahead of its node, and let its readers read the rounded results; False if there is no
    way to give a result the layout of the original."""
    row = ops.find(node.target)
    assert row is not None
    parts = list(node.users) if isinstance(spec.value_of(node), tuple | list) else [node]
    if not all(isinstance(spec.value_of(p), torch.Tensor) and (p is node or is_projection(p)) for p in parts):
        return False
    with r.graph.inserting_before(node):
        narrow = [n for n in _floating(node) if spec.value_of(n).dtype is not wide]
        static = all(spec.tensor_spec(spec.value_of(n)).static for n in _floating(node))
        casts = {n: _cast(r, n, wide, static) for n in narrow}
        args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: casts.get(n, n))
        made = r.call(row.name, args, like=None if static else node, kwargs=kwargs)
        made.meta.update({k: v for k, v in node.meta.items() if k != "val"})
        if not static:  # tracing the op would choose a kernel by its sizes, and so assume something of them
            made.meta["val"] = _in_type(spec.value_of(node), spec.value_of(narrow[0]).dtype, wide)
    results = [spec.value_of(made) if p is node else spec.value_of(made)[p.args[1]] for p in parts]
    formats = [f for result, p in zip(results, parts, strict=True) if (f := _format(result, spec.value_of(p))) is not None]
    if len(formats) < len(parts):
        for unused in (made, *casts.values()):
            r.graph.erase_node(unused)
        return False
    for part, how in zip(parts, formats, strict=True):
        with r.graph.inserting_before(part):
            rounded = made if part is node else _projection(r.graph, made, part)
            rounded = r.call("cast", (rounded,), like=part, kwargs={"dtype": spec.value_of(part).dtype, **how})
        part.replace_all_uses_with(rounded)
        if part is not node:
            r.graph.erase_node(part)
    return True


def _cast(r: Rewriter, x: Node, wide: torch.dtype, static: bool) -> Node:
    """Return a tensor in a wider type. One of symbolic sizes becomes contiguous, because strides that depend on its own would be
    compared."""
    if static:
        made = r.call("cast", (x,), kwargs={"dtype": wide})
    else:
        made = r.call("cast", (x,), like=x, kwargs={"dtype": wide, "memory_format": torch.contiguous_format})
        made.meta["val"] = _in_type(spec.value_of(x), spec.value_of(x).dtype, wide)
    made.meta[COMPUTED_ONCE] = True
    return made


def _in_type(val: Any, narrow: torch.dtype, wide: torch.dtype) -> Any:
    """Return results as traced, those of type `narrow` as contiguous ones of type `wide`."""
    if isinstance(val, tuple | list):
        return tuple(_in_type(v, narrow, wide) for v in val)
    return _like(val, wide, torch.contiguous_format) if isinstance(val, torch.Tensor) and val.dtype is narrow else val


def _like(val: torch.Tensor, dtype: torch.dtype, how: torch.memory_format) -> torch.Tensor:
    with compat.fake_mode_of(val):
        return torch.empty(val.shape, dtype=dtype, device=val.device, memory_format=how)


def _projection(graph: Graph, made: Node, part: Node) -> Node:
    found = graph.call_function(operator.getitem, (made, part.args[1]))
    found.meta.update(part.meta, val=spec.value_of(made)[part.args[1]])
    return found


def _format(made: torch.Tensor, wanted: torch.Tensor) -> dict[str, torch.memory_format] | None:
    """Return what a cast must be told to give one tensor the strides of another; None if it cannot."""
    if spec.same_strides(made, wanted):
        return {}
    formats = (torch.contiguous_format, *(f for rank, f in CHANNELS_LAST.items() if rank == wanted.dim()))
    return next(({"memory_format": f} for f in formats if spec.same_strides(_like(wanted, wanted.dtype, f), wanted)), None)

"""Claimed ops that eager's own call computes after all, found from the instructions of a fragment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch.fx import Node

from fusewright.graph.view import GraphIndex
from fusewright.plan.build import aten_call
from fusewright.plan.ir import Call, Instruction, reads


def carried_ops(index: GraphIndex, nodes: Sequence[Node], instructions: Sequence[Instruction]) -> Iterator[int]:
    """Ids of the ops of a region that run as eager's own call at each call of the plan. Prepared constants do not count."""
    made = {o: i for i in instructions if isinstance(i, Call) for o in i.outs}
    named = {i.op_id: i for i in instructions if isinstance(i, Call) and i.op_id is not None}
    for node in nodes:
        own = aten_call(index, node)
        id = index.op_id(node)
        call = next((made[o] for o in own.outs if o in made), named.get(id))
        if call is not None and not index.constants.issuperset(own.outs) and same_call(index, call, own):
            yield id


def same_call(index: GraphIndex, call: Call, own: Call) -> bool:
    """Whether a call is eager's own, on the same values or on copies with other strides."""
    if call.target != own.target or len(call.outs) != len(own.outs):
        return False
    given, wanted = ([*reads(c), *c.outs] for c in (call, own))
    return len(given) == len(wanted) and all(_stands_for(index, a, b) for a, b in zip(given, wanted, strict=True))


def _stands_for(index: GraphIndex, value: int, wanted: int) -> bool:
    """Whether a value is the wanted one, or a temporary of its shape and dtype."""
    if value == wanted:
        return True
    spec, node = index.temporaries.get(value), index.node_by_value(wanted)
    if spec is None or node is None:
        return False
    theirs = next(v.spec for v in index.values(node) if v.id == wanted)
    return theirs is not None and (spec.shape, spec.dtype) == (theirs.shape, theirs.dtype)

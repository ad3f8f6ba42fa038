"""Attention sinks in spelled-out attention: one more score in each row of a softmax, which has no key and no value (Xiao et al.,
StreamingLLM, 2023, section 3.3): `softmax(cat([scores, sink], -1), -1)[..., :-1] @ value`."""

from __future__ import annotations

from fusewright.interface import OpView, Value
from fusewright.toolkit.region.graph import spec_of
from fusewright.toolkit.region.pattern import Match
from fusewright_triton.select.attention.decomposed_bias import made_for_one, shape_of
from fusewright_triton.select.calls import Calls


def drops_last(op: OpView, m: Match, c: Calls) -> bool:
    """Return whether an op is all but the last column of the weights."""
    rank, columns = spec_of(m.out).rank, shape_of(m.out)[-1]
    last = op.arg("dim") in (-1, rank - 1) and op.arg("step") == 1 and not op.arg("start")
    return last and op.arg("end") in (-1, columns - 1)


def without_sink(value: Value, c: Calls, ops: list[OpView]) -> tuple[Value, Value | None]:
    """Return scores [..., K] to which one score [..., 1] was appended, and that one; otherwise the value and None. What a softmax
    would subtract anyway may have been subtracted."""
    found: list[OpView] = []
    joined, readers = _unshifted(value, c, found)
    made = c.graph.producer(joined)
    if made is None or made.op != "cat" or c.graph.escapes(joined) or len(c.graph.users(joined)) != readers:
        return value, None
    parts, rank = made.arg("tensors"), spec_of(joined).rank
    if len(parts) != 2 or made.arg("dim") not in (-1, rank - 1) or shape_of(parts[1])[-1:] != (1,):
        return value, None
    if any(spec_of(x).dtype != spec_of(joined).dtype or shape_of(x)[:-1] != shape_of(joined)[:-1] for x in parts):
        return value, None
    ops += [*found, made]
    return parts[0], parts[1]


def _unshifted(value: Value, c: Calls, ops: list[OpView]) -> tuple[Value, int]:
    """Return what a row's maximum was subtracted from, else the value, and how often that is read for this."""
    made = made_for_one(value, c)
    if made is None or made.op != "sub" or made.arg("alpha") != 1 or not isinstance(made.arg("other"), Value):
        return value, 1
    most = c.graph.producer(made.arg("other"))
    if most is None or most.op not in ("max_with_indices", "amax") or most.arg("self") != made.arg("self"):
        return value, 1
    dim, last = most.arg("dim"), (-1, spec_of(made.out).rank - 1)
    along = dim in last if isinstance(dim, int) else len(dim) == 1 and dim[0] in last
    alone = c.graph.only_user(most.outs[0]) is made and all(map(c.graph.unused, most.outs[1:]))
    if not along or not most.arg("keepdim") or not alone:
        return value, 1
    ops += [made, most]
    return made.arg("self"), 2

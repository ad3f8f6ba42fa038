"""Convolutions of one input that are added up are one convolution, where their weights are constant: the branches of RepVGG and its
like, each with its own batch norm, and a skip connection beside them (X. Ding et al., "RepVGG: Making VGG-style ConvNets Great
Again", CVPR 2021). The largest window must cover the others. Weights are added in fp64 and rounded once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch.fx import Graph, Node

from fusewright import ops
from fusewright.graph.constants import COMPUTED_ONCE
from fusewright.graph.effects import drop_dead_code, has_writes
from fusewright.graph.spec import value_of
from fusewright.graph.view import is_op, is_projection
from fusewright.interface import RuleLog
from fusewright.rewrite.engine import READER, Rewriter
from fusewright.rewrite.loops.unrolled import alike

ID = "conv.branches"
"""The rule's id in reports, and for `disable_rules`."""

WIDE = torch.float64
"""The type in which weights are added up."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A summand: `source`, through a convolution and a batch norm, if there are these."""

    summand: Node
    source: Node
    conv: dict[str, Any] | None
    norm: dict[str, Any] | None


def merge(graph: Graph, weights: Collection[Node], dtypes: Collection[torch.dtype], log: RuleLog) -> None:
    """Merge branches of these types in a canonical inference graph, in place."""
    if not dtypes or ID in log.disabled or has_writes(graph):
        return
    r = Rewriter(graph, log)
    for root in [n for n in graph.nodes if _adds(n) and value_of(n).dtype in dtypes]:
        if _continues(root) or not log.allows(ID):
            continue
        made = r.attempt(root, _merged, r, root, weights)
        if made is not None and alike(value_of(made), value_of(root)):
            log.hit(ID)
            r.replace(root, made)
    drop_dead_code(graph)


def _call(node: Node) -> dict[str, Any]:
    row = ops.find(node.target)
    assert row is not None
    return row.bind(node.args, node.kwargs)


def _adds(node: Any) -> bool:
    """Match a sum of two tensors of the same type and sizes, or of a tensor and a number, as loops begin with 0."""
    if not isinstance(node, Node) or not is_op(node) or READER.name(node) != "add":
        return False
    call = _call(node)
    first, other = call["self"], call["other"]
    tensors = [value_of(x) for x in (node, first, other) if isinstance(x, Node)]  # numbers may be complex
    if call["alpha"] != 1 or not all(isinstance(t, torch.Tensor) for t in tensors):  # a size may be added, too
        return False
    return all(alike(t, tensors[0]) for t in tensors)


def _continues(node: Node) -> bool:
    """Whether another sum alone reads this one."""
    return len(node.users) == 1 and _adds(next(iter(node.users)))


def _summands(node: Node) -> Iterator[Any]:
    """What a sum adds up, in order: nodes and numbers."""
    for x in node.args[:2]:
        if isinstance(x, Node) and _adds(x) and len(x.users) == 1:
            yield from _summands(x)
        else:
            yield x


def _merged(r: Rewriter, root: Node, weights: Collection[Node]) -> Node | None:
    """Return the sum with fewer convolutions; None if there is nothing to merge."""
    summands = list(_summands(root))
    left, numbers = ([x for x in summands if isinstance(x, Node) is node] for node in (True, False))
    found = [b for x in left if (b := _branch(x, weights)) is not None]
    groups: dict[Any, list[Branch]] = defaultdict(list)
    for b in (b for b in found if b.conv is not None):
        groups[b.source, *(str(b.conv[n]) for n in ("stride", "groups"))].append(b)  # type: ignore[index]
    made: list[Node] = []
    for convs in groups.values():
        largest = max(convs, key=lambda b: value_of(b.conv["weight"]).numel())  # type: ignore[index]
        beside = [b for b in found if b.conv is None and b.source is convs[0].source]
        parts = [b for b in (*convs, *beside) if b.summand in left and _covers(largest, b)]
        biased = any(b.norm is not None or (b.conv is not None and b.conv["bias"] is not None) for b in parts)
        if len(parts) + (biased and len(numbers)) > 1:
            made.append(_as_one_convolution(r, largest, parts, numbers if biased else ()))
            numbers = [] if biased else numbers
            for b in parts:
                left.remove(b.summand)
    return reduce(lambda a, b: r.call("add", (a, b)), (*made, *left, *numbers)) if made else None


def _branch(node: Node, weights: Collection[Node]) -> Branch | None:
    """Return a summand as a branch. What it goes through, nothing else may read."""
    norm, source = _norm(node, weights)
    conv = _conv(source, weights) if norm is None or len(source.users) == 1 else None
    if (norm is not None or conv is not None) and len(node.users) > 1:
        norm, conv, source = None, None, node
    return Branch(node, source if conv is None else conv["input"], conv, norm)


def _norm(node: Node, weights: Collection[Node]) -> tuple[dict[str, Any] | None, Node]:
    """Return the batch norm of constants that makes a value, and its input; else None and the value."""
    made: Any = node.args[0] if is_projection(node) else None
    if made is None or node.args[1] != 0 or len(made.users) > 1 or not is_op(made) or READER.name(made) != "batch_norm":
        return None, node
    call = _call(made)
    of_constants = _all_in(weights, [call[n] for n in ("weight", "bias", "running_mean", "running_var")])
    return (call, call["input"]) if of_constants else (None, node)


def _conv(node: Node, weights: Collection[Node]) -> dict[str, Any] | None:
    if not is_op(node) or READER.name(node) != "conv":
        return None
    call = _call(node)
    plain = not call["transposed"] and value_of(call["weight"]).dtype == value_of(call["input"]).dtype
    return call if plain and _all_in(weights, [call["weight"], call["bias"]]) else None


def _all_in(weights: Collection[Node], values: Sequence[Node | None]) -> bool:
    return all(v is None or v in weights for v in values)


def _window(b: Branch) -> list[tuple[int, int, int]]:
    """Return the first tap of a branch in each dimension, relative to its pixel, how far taps are apart, and their number."""
    if b.conv is None:
        return [(0, 1, 1)] * (value_of(b.source).dim() - 2)
    rank = value_of(b.source).dim() - 2
    sizes = value_of(b.conv["weight"]).shape[2:]
    padding, dilation = ((*b.conv[n], *b.conv[n] * rank)[:rank] for n in ("padding", "dilation"))
    return [(-p, d, int(k)) for p, d, k in zip(padding, dilation, sizes, strict=True)]


def _covers(largest: Branch, b: Branch) -> bool:
    """Whether each tap of a branch is one of the largest window: zeros elsewhere would make NaN of an infinity."""
    assert largest.conv is not None
    if b.conv is None and (set(largest.conv["stride"]) != {1} or not alike(value_of(b.source), value_of(b.summand))):
        return False
    pairs = zip(_window(largest), _window(b), strict=True)
    return all(_within(x, range(first, first + step * n, step)) for x, (first, step, n) in pairs)


def _within(window: tuple[int, int, int], taps: range) -> bool:
    first, step, count = window
    return set(taps) <= set(range(first, first + step * count, step))


def _as_one_convolution(r: Rewriter, largest: Branch, parts: Sequence[Branch], numbers: Sequence[float]) -> Node:
    """Make one convolution that adds up branches; numbers go into its bias."""
    conv = largest.conv
    assert conv is not None
    pairs = [_folded(r, b, largest) for b in parts]
    like = value_of(conv["weight"]).dtype
    weight = _rounded(r, [w for w, _ in pairs], like)
    shifts = [s for _, s in pairs if s is not None]
    bias = _rounded(r, [*shifts, *numbers], like) if shifts else None
    made = r.call("conv", (conv["input"], weight, bias, *list(conv.values())[3:]))
    made.meta.update({k: v for k, v in largest.summand.meta.items() if k != "val"})
    return made


def _rounded(r: Rewriter, terms: Sequence[Any], dtype: torch.dtype) -> Node:
    return _made(r, "cast", (reduce(lambda a, b: _made(r, "add", (a, b)), terms),), {"dtype": dtype})


def _made(r: Rewriter, name: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Node:
    """Make a node that is computed once from weights."""
    made = r.call(name, args, kwargs=kwargs)
    made.meta[COMPUTED_ONCE] = True
    return made


def _folded(r: Rewriter, b: Branch, largest: Branch) -> tuple[Node, Node | None]:
    """Return weight and shift of a branch in fp64, the weight with zeros where only the largest window has taps."""
    weight, shift = _weight(r, b, largest), None if b.conv is None else b.conv["bias"]
    if b.norm is not None:
        wide = _made(r, "cast", (b.norm["running_var"],), {"dtype": WIDE})
        scale = _made(r, "rsqrt", (_made(r, "add", (wide, b.norm["eps"])),))
        if b.norm["weight"] is not None:
            scale = _made(r, "mul", (scale, b.norm["weight"]))
        column = [-1] + [1] * (value_of(weight).dim() - 1)
        weight = _made(r, "mul", (weight, _made(r, "view", (scale, column))))
        mean = b.norm["running_mean"]
        away = mean if shift is None else _made(r, "sub", (mean, shift))
        away = _made(r, "mul", (scale, away))
        shift = _made(r, "neg", (away,)) if b.norm["bias"] is None else _made(r, "sub", (b.norm["bias"], away))
    around = _around(largest, b)
    return _made(r, "constant_pad_nd", (weight, around)) if any(around) else weight, shift


def _weight(r: Rewriter, b: Branch, largest: Branch) -> Node:
    """Return the weight of a branch in fp64: of the input itself, ones on the diagonal of each group."""
    assert largest.conv is not None
    if b.conv is not None:
        return _made(r, "cast", (b.conv["weight"],), {"dtype": WIDE})
    like = value_of(largest.conv["weight"])
    channels, of_group = (int(n) for n in like.shape[:2])
    eye = _made(r, "eye", (of_group, of_group), {"dtype": WIDE, "device": like.device})
    groups = _made(r, "expand", (eye, [channels // of_group, of_group, of_group]))
    return _made(r, "reshape", (groups, [channels, of_group] + [1] * (like.dim() - 2)))


def _around(largest: Branch, b: Branch) -> list[int]:
    """Return how many taps of the largest window are before and behind those of a branch, the last dimension first."""
    around: list[int] = []
    for (first, step, count), (at, _, taps) in zip(_window(largest)[::-1], _window(b)[::-1], strict=True):
        before = (at - first) // step
        around += [before, count - taps - before]
    return around

"""The specification of a graph between stages, checked: definitions before uses, metadata that agrees with the opset's
rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from fusewright import _torch_compat as compat
from fusewright import ops
from fusewright.errors import FusewrightError
from fusewright.graph.spec import value_of
from fusewright.graph.view import is_op

UNTRUSTED = "fusewright_untrusted"
"""Key in `node.meta` of an op that the table does not describe as torch traced it, or that eager refuses: eager runs it,
nobody checks it. The value says why."""


class VerifyError(FusewrightError, AssertionError):
    """A stage left a graph that breaks the specification: a bug of Fusewright."""


def check(graph: Graph, stage: str) -> None:
    """Raise `VerifyError` with every problem found after `stage`."""
    problems = list(find_problems(graph))
    if problems:
        raise VerifyError(f"the graph is not valid after {stage}:\n  " + "\n  ".join(problems))


def find_problems(graph: Graph) -> Iterator[str]:
    """One line per violation."""
    seen: set[Node] = set()
    for node in graph.nodes:
        for used in node.all_input_nodes:
            if used not in seen:
                yield f"{node.name} uses {used.name} before it is defined"
        seen.add(node)
        if is_op(node) and UNTRUSTED not in node.meta:
            yield from op_problems(node)


def op_problems(node: Node) -> Iterator[str]:
    """One line per way in which an op's metadata is not what the table says."""
    row = ops.find(node.target)
    if row is None:
        return
    if "val" not in node.meta:
        yield f"{node.name}: {row.name} has no metadata"
        return
    vals = torch.fx.node.map_arg((node.args, dict(node.kwargs)), value_of)
    try:
        args: Any = vals[0]
        dtypes, shapes = row.types(args, vals[1])
    except TypeError as e:
        yield f"{node.name}: {row.name}: {e}"
        return
    results = [r for r in _flat(node.meta["val"])]
    for k, (r, dtype, shape) in enumerate(zip(results, dtypes, shapes, strict=False)):
        if not isinstance(r, torch.Tensor):
            continue
        if dtype is not None and r.dtype != dtype and k not in row.fake_differs:
            yield f"{node.name}: {row.name} result {k} is {r.dtype}; the table says {dtype}"
        if shape is not None and not _could_be(r.shape, shape):
            yield f"{node.name}: {row.name} result {k} has shape {tuple(r.shape)}; the table says {tuple(shape)}"


def _flat(val: Any) -> Iterator[Any]:
    if isinstance(val, tuple | list):
        for v in val:
            yield from _flat(v)
    else:
        yield val


def _could_be(actual: Any, expected: Any) -> bool:
    """Whether two shapes may be equal. Symbolic sizes that cannot be compared without a guard pass."""
    if len(actual) != len(expected):
        return False
    return not any(compat.statically_true(a != b) for a, b in zip(actual, expected, strict=True))

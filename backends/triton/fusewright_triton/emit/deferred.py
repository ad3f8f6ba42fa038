"""Stores of rows that are passed over in steps: a pass must not overwrite what a later pass reads again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fusewright.toolkit.ir.ir import Kernel, Node
from fusewright_triton.emit.operators import Unsupported


def deferred(kernel: Kernel) -> Kernel:
    """Move stores over elements that a later pass reads again, to compute row values again, into the last pass. There each step
    reads its elements first. An output overwrites an input where the two may alias.

    Raise `Unsupported` where the order of accesses to one buffer matters."""
    stage_of = {n.id: k for k, s in enumerate(kernel.stages) for n in s.nodes}
    late = [m for m in kernel.nodes() if m.op == "store" and _early(kernel, m, stage_of)]
    if not late:
        return kernel
    moved = {m.id for m in late}
    stages = [replace(s, nodes=tuple(n for n in s.nodes if n.id not in moved)) for s in kernel.stages]
    last = max(k for k, s in enumerate(stages) if s.over == "PR")
    stages[last] = replace(stages[last], nodes=(*stages[last].nodes, *late))
    return replace(kernel, stages=tuple(stages))


def _early(kernel: Kernel, m: Node, stage_of: dict[int, int]) -> bool:
    """Return whether a pass after this store reads again what it may overwrite."""
    at, loads = stage_of[m.id], [n for n in kernel.nodes() if n.op == "load"]
    again = {i for k in range(at + 1, len(kernel.stages)) for i in _recomputed(kernel, k, stage_of)}
    over = [n for n in loads if n.id in again and stage_of[n.id] <= at and _overwrites(kernel, m, n)]
    new = any(n.buffer == m.buffer and stage_of[n.id] > at for n in loads)
    if over and (new or m.how or any(n.index != m.index for n in over)):
        raise Unsupported("a long row is needed again after it was overwritten")
    return bool(over)


def _overwrites(kernel: Kernel, m: Node, n: Node) -> bool:
    if m.buffer is None or n.buffer is None:
        return False
    return m.buffer == n.buffer or kernel.may_share(m.buffer, n.buffer)


def _recomputed(kernel: Kernel, k: int, stage_of: dict[int, int]) -> Iterator[int]:
    """Yield the row values of earlier stages that stage `k` computes again."""
    if kernel.stages[k].over != "PR":
        return
    nodes, seen = kernel.node_map(), set[int]()
    todo = [u for n in kernel.stages[k].nodes for u in n.uses()]
    while todo:
        i = todo.pop()
        rowwise = kernel.stages[stage_of[i]].over == "PR" and nodes[i].op != "reduce"
        if i in seen or not rowwise:
            continue
        seen.add(i)
        todo.extend(nodes[i].uses())
        if stage_of[i] < k:
            yield i

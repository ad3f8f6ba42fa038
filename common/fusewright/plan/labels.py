"""Profiler labels for the instructions of a plan: their ops, and the model's line that they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Graph, Node

from fusewright.errors import counted
from fusewright.graph.origin import compiled_at
from fusewright.graph.view import GraphIndex, source_line
from fusewright.plan.ir import Call, CallPython, Instruction, Launch

MOST = 4
"""Maximum number of ops in a label."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an instruction comes from. `position` is that of a node of the traced graph with the same source line: a plan from
    disk may serve equal graphs in other files, and takes `line` from the current one."""

    ops: str
    position: int | None
    line: str = ""


def lines_of(graph: Graph) -> dict[str, int]:
    """Source lines of a graph, each with the position of its first node."""
    found: dict[str, int] = {}
    for k, n in enumerate(graph.nodes):
        if line := source_line(n):
            found.setdefault(line, k)
    return found


def origins(index: GraphIndex, instructions: Iterable[Instruction], lines: Mapping[str, int]) -> dict[int, Origin]:
    """The origin of each instruction, by the first value that it makes."""
    found: dict[int, Origin] = {}
    for i in instructions:
        nodes = _nodes(index, i)
        if i.outs and nodes:
            line = next((s for n in nodes if (s := source_line(n))), "")
            found[i.outs[0]] = Origin(_spelled([index.ops[n].op for n in nodes]), lines.get(line), line)
    return found


def _nodes(index: GraphIndex, i: Instruction) -> list[Node]:
    """The ops that an instruction computes, as far as it names them."""
    ids = i.op_ids if not isinstance(i, Call) else () if i.op_id is None else (i.op_id,)
    nodes = [index.node_of[k] for k in ids if k in index.node_of]
    made = (index.node_by_value(v) for v in i.outs)
    return [n for n in nodes or dict.fromkeys(made) if n is not None and n in index.ops]


def _spelled(ops: Sequence[str]) -> str:
    names = list(dict.fromkeys(ops))
    return "+".join(names[:MOST]) + (f"+{len(names) - MOST} more" if len(names) > MOST else "")


def with_lines(found: Mapping[int, Origin], graph: Graph) -> dict[int, Origin]:
    """The same origins with the source lines of this graph."""
    nodes = list(graph.nodes)
    return {
        v: replace(o, line=source_line(nodes[o.position])) if o.position in range(len(nodes)) else o  # type: ignore[index]
        for v, o in found.items()
    }


def plan_name(plan: Any) -> str:
    """The name of what a `Plan` was compiled from."""
    return compiled_at(plan.trace) or "a graph"


def replay_label(plan: Any) -> str:
    """The profiler label of a replay of a `Plan`."""
    return f"fusewright replay {plan_name(plan)}, {counted(len(plan.instructions), 'instruction')}"


def labeler(plan: Any) -> Callable[[Instruction], str]:
    """Return a function that labels instructions of a `Plan`."""

    def label(i: Instruction) -> str:
        origin = plan.origins.get(i.outs[0]) if i.outs else None
        ops, line = (origin.ops, origin.line) if origin else ("", "")
        return " ".join(filter(None, ("fusewright", ops, line, f"({_runner(i)})")))

    return label


def _runner(i: Instruction) -> str:
    """What runs the instruction: placed after the line, because profilers truncate names at the end."""
    return "kernel" if isinstance(i, Launch) else i.name if isinstance(i, CallPython) else i.target.removesuffix(".default")

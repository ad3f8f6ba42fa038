"""The plan as a drawing: a node for each computing instruction, arrows for values, and positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fusewright.graph.view import module_path
from fusewright.interface import TensorSpec
from fusewright.plan.build import Plan, operator_of
from fusewright.plan.ir import Call, CallPython, Instruction, Launch, reads
from fusewright.report import Kept, OpRecord


@dataclass
class Node:
    """An instruction. `at` is its position in the plan; `row` and `column` place it so that every arrow points to a higher row."""

    at: int
    kind: str
    label: str
    where: str
    ops: list[str]
    sources: list[str]
    module: str
    shape: str
    kernel: str = ""
    row: int = 0
    column: float = 0.0
    inputs: list[int] = field(default_factory=list)


def nodes(kept: Kept, records: Mapping[int, OpRecord]) -> list[Node]:
    """Every instruction except views, through which arrows pass, in the order of the plan."""
    plan: Plan = kept.plan
    makers: dict[int, tuple[int, ...]] = {}
    found: dict[int, Node] = {}
    owners = owned(kept, records)
    for k, i in enumerate(plan.instructions):
        made_by = tuple(dict.fromkeys(m for r in reads(i) for m in makers.get(r, ())))
        if k not in owners:
            makers.update(dict.fromkeys(i.outs, made_by))
            continue
        found[k] = _node(kept, k, i, owners[k])
        found[k].inputs = list(made_by)
        makers.update(dict.fromkeys(i.outs, (k,)))
    _arrange(found)
    return list(found.values())


def owned(kept: Kept, records: Mapping[int, OpRecord]) -> dict[int, list[OpRecord]]:
    """The ops that each instruction computes, by its position; none for views. An op whose result is a view of another
    instruction's result, e.g. one of several merged products, belongs to that instruction."""
    found: dict[int, list[OpRecord]] = {}
    makers: dict[int, int] = {}
    for k, i in enumerate(kept.plan.instructions):
        known = [records[o] for o in op_ids(i) if o in records]
        source = next((makers[r] for r in reads(i) if r in makers), None)
        part = isinstance(i, Call) and source is not None and _is_view(i) and {r.where for r in known} == {"lowered"}
        if part or any(r.where == "view" for r in known):
            if source is not None:
                found[source] += [r for r in known if r.where == "lowered" and r not in found[source]]
                makers.update(dict.fromkeys(i.outs, source))
            continue
        found[k] = known
        makers.update(dict.fromkeys(i.outs, k))
    return found


def _is_view(i: Call) -> bool:
    operator = operator_of(i.target)
    return operator is not None and any(
        r.alias_info is not None and not r.alias_info.is_write for r in operator._schema.returns
    )


def op_ids(i: Instruction) -> tuple[int, ...]:
    """The ops that an instruction computes, as far as it names them."""
    if isinstance(i, Call):
        return () if i.op_id is None else (i.op_id,)
    return i.op_ids


def _node(kept: Kept, k: int, i: Instruction, records: Sequence[OpRecord]) -> Node:
    spec = next((s for o in i.outs if (s := kept.plan.specs.get(o)) is not None), None)
    wheres = {r.where for r in records}
    where = next((w for w in ("lowered", "carried", "eager") if w in wheres), "lowered")
    sources, modules = _distinct(r.source for r in records), _distinct(module_of(kept, r.id) for r in records)
    return Node(
        k, _kind(i), label(i, kept), where, [r.op for r in records], sources, modules[-1] if modules else "", shape(spec),
        i.kernel if isinstance(i, Launch) else "",
    )  # fmt: skip


def _kind(i: Instruction) -> str:
    return {Call: "call", Launch: "kernel", CallPython: "opaque"}[type(i)]


def label(i: Instruction, kept: Kept) -> str:
    """A short name: of the called operator, or of the kernel."""
    if isinstance(i, Launch):
        code = kept.kernels.get(i.kernel)
        return str(getattr(getattr(code, "kernel", None), "name", "") or f"kernel {i.kernel[:8]}")
    return i.name if isinstance(i, CallPython) else i.target.removesuffix(".default")


def shape(spec: TensorSpec | None) -> str:
    if spec is None:
        return ""
    return f"{str(spec.dtype).removeprefix('torch.')}[{', '.join(map(str, spec.shape))}]"


def module_of(kept: Kept, op_id: int) -> str:
    """The path of the innermost module that an op came from; "" if unknown."""
    node = kept.index.node_of.get(op_id)
    return module_path(node) if node is not None else ""


def _distinct(texts: Any) -> list[str]:
    return [t for t in dict.fromkeys(texts) if t]


def _arrange(found: dict[int, Node]) -> None:
    """Assign rows by the longest path from an input. Within a row, place each node as close as possible to its inputs: one
    sweep of barycenters (Sugiyama et al., 1981)."""
    rows: dict[int, list[Node]] = {}
    for node in found.values():
        node.row = 1 + max((found[i].row for i in node.inputs), default=-1)
        rows.setdefault(node.row, []).append(node)
    for row in sorted(rows):
        wanted = [(_center([found[i].column for i in n.inputs]), n.at, n) for n in rows[row]]
        at = -1e9
        for target, _, node in sorted(wanted, key=lambda w: w[:2]):
            node.column = at = max(target, at + 1)
        shift = sum(n.column for n in rows[row]) / len(rows[row]) - _center([w[0] for w in wanted])
        for node in rows[row]:
            node.column = round(node.column - shift, 2)


def _center(columns: Sequence[float]) -> float:
    return sum(columns) / len(columns) if columns else 0.0

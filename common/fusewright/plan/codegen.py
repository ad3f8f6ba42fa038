"""A plan as the Python function that it is: what runs, and what `explain` prints."""

from __future__ import annotations

import keyword
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fusewright import _torch_compat as compat
from fusewright.plan.build import Plan, operator_of
from fusewright.plan.ir import Call, CallPython, Instruction, Launch, Ref, reads
from fusewright.plan.once import OnceCache

_MODULES = {"operator": operator, "math": math, "builtins": __import__("builtins")}


class Names:
    """The namespace of the generated code: operators under readable names, and objects that have no literal."""

    def __init__(self) -> None:
        self.space: dict[str, Any] = {"torch": torch, "inf": math.inf, "nan": math.nan}

    def function(self, target: str) -> str:
        """A name for a torch operator or Python function, bound to its fastest entry."""
        name = target.replace("::", "_").replace(".", "_")
        if name not in self.space:
            op = operator_of(target)
            if op is None:
                module, _, function = target.removeprefix("py::").partition(".")
                self.space[name] = getattr(_MODULES[module], function)
            else:
                self.space[name] = compat.bound_op(op)
        return name

    def object(self, prefix: str, value: Any) -> str:
        """A fresh name for an object."""
        name = "".join(c if c.isalnum() else "_" for c in prefix)
        name = f"{name or 'obj'}_{len(self.space)}"
        if keyword.iskeyword(name) or name[0].isdigit():
            name = f"o_{name}"
        self.space[name] = value
        return name

    def literal(self, x: Any) -> str:
        """Source text of an argument."""
        match x:
            case Ref():
                return f"v{x.id}"
            case tuple() | list():
                return "[" + ", ".join(self.literal(i) for i in x) + "]"
            case torch.device():
                return f"torch.device({str(x)!r})"
            case torch.dtype() | torch.layout() | torch.memory_format():
                return str(x)
            case bool() | int() | str() | None:
                return repr(x)
            case float():
                return repr(x)
            case complex():
                return f"complex({x.real!r}, {x.imag!r})"  # repr() of one with NaN or Inf is no Python
        return self.object("const", x)


def _call(i: Instruction, names: Names, kernels: Mapping[str, Callable[..., Any]]) -> str:
    match i:
        case Call():
            args = [names.literal(a) for a in i.args] + [f"{k}={names.literal(v)}" for k, v in i.kwargs]
            left = ", ".join(f"v{o}" for o in i.outs)
            if i.packed or len(i.outs) > 1:
                left += "," if len(i.outs) == 1 else ""
            text = f"{names.function(i.target)}({', '.join(args)})"
            return f"{left} = {text}" if left else text
        case Launch():
            args = [names.literal(a) for a in (*i.inputs, *i.sizes, *i.scalars)]
            left = ", ".join(f"v{o}" for o in i.outs) + ("," if len(i.outs) == 1 else "")
            return f"{left} = {names.object('kernel', kernels[i.kernel])}({', '.join(args)})"
        case CallPython():
            left = ", ".join(f"v{o}" for o in i.outs) + ("," if len(i.outs) == 1 else "")
            text = f"{names.object(i.name, i.fn)}({', '.join(names.literal(a) for a in i.args)})"
            return f"{left} = {text}" if left else text


def _comment(plan: Plan, i: Instruction) -> str:
    parts = []
    if i.outs and (spec := plan.specs.get(i.outs[0])) is not None:
        parts.append(f"{str(spec.dtype).removeprefix('torch.')}[{', '.join(map(str, spec.shape))}]")
    op_id = getattr(i, "op_id", None)
    if op_id is not None and plan.comments.get(op_id):
        parts.append(plan.comments[op_id])
    return "  # " + " ".join(parts) if parts else ""


def _last_reads(instructions: Sequence[Instruction], keep: set[int]) -> dict[int, list[int]]:
    """Instruction position -> ids that die after it. Results that nobody reads die where they are made."""
    last: dict[int, int] = {}
    for k, i in enumerate(instructions):
        for r in (*i.outs, *reads(i)):
            last[r] = k
    dead: dict[int, list[int]] = {}
    for r, k in last.items():
        if r not in keep:
            dead.setdefault(k, []).append(r)
    return dead


def _body(
    plan: Plan, instructions: Sequence[Instruction], keep: set[int], names: Names, kernels: Mapping[str, Callable[..., Any]]
) -> list[str]:
    dead = _last_reads(instructions, keep)
    lines = []
    for k, i in enumerate(instructions):
        lines.append(f"    {_call(i, names, kernels)}{_comment(plan, i)}")
        if k in dead:
            lines.append("    del " + ", ".join(f"v{r}" for r in sorted(dead[k])))
    return lines


def source(plan: Plan, names: Names, kernels: Mapping[str, Callable[..., Any]]) -> str:
    """The text of `prepare` (once per set of weights) and `run` (each call)."""
    lines = []
    if plan.once:
        kept = set(plan.once_outputs) | set(plan.attributes)
        lines.append(f"def prepare({', '.join(f'v{i}' for i in plan.once_inputs)}):")
        lines += _body(plan, plan.once, kept, names, kernels)
        lines.append(f"    return ({''.join(f'v{i}, ' for i in plan.once_outputs)})")
        lines.append("")
    lines.append("def run(args):")
    if plan.inputs:
        lines.append(f"    {', '.join(f'v{i}' for i in plan.inputs)}, = args")
    lines.append("    args.clear()")
    if plan.once:
        left = f"{', '.join(f'v{i}' for i in plan.once_outputs)}, = " if plan.once_outputs else ""
        lines.append(f"    {left}once({', '.join(f'v{i}' for i in plan.once_inputs)})")
    keep = {r.id for r in plan.outputs if isinstance(r, Ref)} | set(plan.attributes)
    lines += _body(plan, plan.instructions, keep, names, kernels)
    lines.append(f"    return ({''.join(names.literal(o) + ', ' for o in plan.outputs)})")
    return "\n".join(lines) + "\n"


def load(plan: Plan, kernels: Mapping[str, Callable[..., Any]] | None = None) -> tuple[Callable[[list[Any]], tuple[Any, ...]], str]:
    """The plan as a callable that takes (and empties) a list of inputs, and its source text."""
    names = Names()
    text = source(plan, names, kernels or {})
    names.space.update({f"v{i}": value for i, value in plan.attributes.items()})
    exec(compile(text, f"<fusewright plan {id(plan):x}>", "exec"), names.space)
    if plan.once:
        names.space["once"] = OnceCache(names.space["prepare"])
    return names.space["run"], text

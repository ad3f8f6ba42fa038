"""Plans as JSON, for the disk cache. Only data: operators by name, kernels as their own JSON, never pickle.

Arguments without a JSON form become tagged objects: `{"ref": 3}`, `{"dtype": "float32"}`, `{"float": "inf"}`, ...
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from fusewright.interface import Dim, TensorSpec
from fusewright.plan.build import Plan
from fusewright.plan.ir import Call, CallPython, Instruction, Launch, Ref
from fusewright.plan.labels import Origin
from fusewright.sizes.expr import Extent, SizeExpr
from fusewright.sizes.serial import from_data as size_from_data
from fusewright.sizes.serial import to_data as size_to_data

FORMAT = 8
"""Incremented when the JSON changes; entries of other formats are cache misses."""


class NotSerializable(Exception):
    """The plan holds something that is not data: an opaque callable, or a constant object."""


def to_data(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values. Raises `NotSerializable`."""
    return {
        "format": FORMAT,
        "inputs": list(plan.inputs),
        "outputs": [_arg(o) for o in plan.outputs],
        "instructions": [_instruction(i) for i in plan.instructions],
        "prepare": [_instruction(i) for i in plan.prepare],
        "prepare_inputs": list(plan.prepare_inputs),
        "prepare_outputs": list(plan.prepare_outputs),
        "specs": {str(i): _spec(s) for i, s in plan.specs.items()},
        "attributes": {str(i): name for i, (name, _) in plan.attributes.items()},
        "scalars": {str(i): symbol for i, symbol in plan.scalars.items()},
        "kernels": sorted(plan.kernels),
        "alone": plan.alone,
        "trains": plan.trains,
        "origins": {str(i): [o.ops, o.position] for i, o in plan.origins.items()},
    }


def from_data(data: dict[str, Any], attribute: Callable[[str], Any]) -> Plan:
    """Read a plan written by `to_data`; `attribute` finds tensors held by the traced graph by name.

    `vocabulary.find_problems` must check the content. Malformed data raises any exception.
    """
    if data["format"] != FORMAT:
        raise ValueError("a plan of another format")
    return Plan(
        inputs=tuple(data["inputs"]),
        outputs=tuple(_unarg(o) for o in data["outputs"]),
        instructions=[_uninstruction(i) for i in data["instructions"]],
        prepare=[_uninstruction(i) for i in data["prepare"]],
        prepare_inputs=tuple(data["prepare_inputs"]),
        prepare_outputs=tuple(data["prepare_outputs"]),
        specs={int(i): _unspec(s) for i, s in data["specs"].items()},
        attributes={int(i): (name, attribute(name)) for i, name in data["attributes"].items()},
        scalars={int(i): symbol for i, symbol in data["scalars"].items()},
        kernels=dict.fromkeys(data["kernels"]),
        alone=data["alone"] is True,
        trains=data["trains"] is True,
        origins={int(i): Origin(str(ops), position) for i, (ops, position) in data["origins"].items()},
    )


def _table(kind: type) -> dict[str, Any]:
    """All torch objects of a kind by name: `getattr(torch, name)` would expose more."""
    return {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, kind)}


DTYPES, _LAYOUTS, _FORMATS = map(_table, (torch.dtype, torch.layout, torch.memory_format))


def _name(x: Any) -> str:
    return str(x).removeprefix("torch.")


_NAMED: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "dtype": (torch.dtype, _name, DTYPES.__getitem__),
    "layout": (torch.layout, _name, _LAYOUTS.__getitem__),
    "format": (torch.memory_format, _name, _FORMATS.__getitem__),
    "device": (torch.device, str, torch.device),
}


def _arg(x: Any) -> Any:
    if isinstance(x, Ref):
        return {"ref": x.id}
    if isinstance(x, SizeExpr):
        return {"size": size_to_data(x)}
    if isinstance(x, tuple | list):
        return [_arg(a) for a in x]
    if x is None or isinstance(x, bool | int | str):
        return x
    if isinstance(x, float):
        return x if math.isfinite(x) else {"float": repr(x)}
    if isinstance(x, complex):
        return {"complex": [x.real, x.imag]}
    for tag, (kind, write, _) in _NAMED.items():
        if isinstance(x, kind):
            return {tag: write(x)}
    raise NotSerializable(f"an argument of type {type(x).__name__}")


def _unarg(x: Any) -> Any:
    if isinstance(x, list):
        return tuple(_unarg(a) for a in x)
    if not isinstance(x, dict):
        return x
    ((tag, value),) = x.items()
    if tag == "size":
        return size_from_data(value)
    if tag == "ref":
        return Ref(value)
    if tag == "float":
        return float(value)
    if tag == "complex":
        return complex(*value)
    return _NAMED[tag][2](value)


_KINDS: dict[str, type[Call] | type[Launch]] = {"call": Call, "launch": Launch}


def _instruction(i: Instruction) -> dict[str, Any]:
    if isinstance(i, CallPython):
        raise NotSerializable(f"{i.name} is an opaque callable")
    kind = "call" if isinstance(i, Call) else "launch"
    return {"kind": kind, **{f.name: _arg(getattr(i, f.name)) for f in dataclasses.fields(i)}}


def _uninstruction(data: dict[str, Any]) -> Instruction:
    kind = _KINDS[data["kind"]]
    return kind(**{k: _unarg(v) for k, v in data.items() if k != "kind"})


def _dim(s: int | Dim) -> Any:
    return s if isinstance(s, int) else [size_to_data(s.expr), s.hint, s.lo, s.hi]


def _undim(s: Any) -> int | Dim:
    if not isinstance(s, list):
        return int(s)
    expr, hint, lo, hi = s
    return Dim(_symbolic(size_from_data(expr)), hint, lo, hi)


def _symbolic(e: Extent) -> SizeExpr:
    if isinstance(e, int):
        raise ValueError("a symbolic size that is a number")
    return e


def _spec(s: TensorSpec) -> list[Any]:
    return [
        [_dim(d) for d in s.shape],
        [_dim(d) for d in s.stride],
        _name(s.dtype),
        s.device,
        s.const,
    ]


def _unspec(data: list[Any]) -> TensorSpec:
    shape, stride, dtype, device, const = data
    return TensorSpec(tuple(map(_undim, shape)), tuple(map(_undim, stride)), DTYPES[dtype], device, const)

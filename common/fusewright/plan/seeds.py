"""Seeds of attention's dropout.

Torch's memory-efficient attention returns them on the host, or on the device while a graph is captured, and its gradient reads
them as addresses of wherever it runs itself: those of the other side crash the process. Traces place them on the device, which is
true of a recording. So a recording of the gradient copies them there, and everything else brings them to the host first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fusewright.interface import HOST
from fusewright.machine import capturing
from fusewright.plan.build import Plan, operator_of
from fusewright.plan.ir import Call

_NAMES = ("philox_seed", "philox_offset")


def seeds(plan: Plan) -> frozenset[int]:
    """The values of a plan that are seeds."""
    calls = [i for i in plan.instructions if isinstance(i, Call)]
    made = {o for i in calls for o in _made(i)}
    return frozenset(made | {a.id for i in calls if _uses(i.target) for a in read(operator_of(i.target), i.args, dict(i.kwargs))})


def read(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Those arguments of a call that are seeds, unless nothing is dropped: then they are not read."""
    schema = getattr(operator, "_schema", None)
    if schema is None or not _uses(schema.name):
        return []
    given = {**{a.name: x for a, x in zip(schema.arguments, args, strict=False)}, **kwargs}
    return [given[name] for name in _NAMES if name in given] if given.get("dropout_p") else []


def _made(i: Call) -> list[int]:
    operator = operator_of(i.target) if _uses(i.target) else None
    returns = operator._schema.returns if operator is not None else ()
    return [o for o, r in zip(i.outs, returns, strict=False) if r.name in _NAMES]


def _uses(target: str) -> bool:
    """Whether an operator is of the attention whose seeds have no fixed place; others keep theirs on the device."""
    return "efficient_attention" in target


def on_host(seed: torch.Tensor) -> torch.Tensor:
    """The seed where the gradient reads it, unless the gradient is being captured."""
    return seed if seed.device.type == HOST or capturing(seed.device.type)() else seed.to(HOST)

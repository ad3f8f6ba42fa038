"""Runs of instructions whose launches may wait in a queue (`native.LaunchQueue`), since nothing among them looks at the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fusewright import _torch_compat as compat
from fusewright.interface import KernelCode
from fusewright.plan.build import operator_of
from fusewright.plan.execute.views import is_view
from fusewright.plan.ir import Call, Instruction, Launch
from fusewright.plan.native import queues

FEWEST = 4
"""Launches in a row that are worth a queue: graphs of two or three, which each call of a plan uses once, cost the host as much."""


def queued(
    instructions: Sequence[Instruction], kernels: Mapping[str, KernelCode], function: Callable[[str], Any]
) -> Iterator[range]:
    """Yield the longest runs of at least `FEWEST` launches, with the views between them. `function` gives what a call's target
    names."""
    start, launches = 0, 0
    for k, i in enumerate((*instructions, None)):
        launched = i is not None and _launches(i, kernels, function)
        if launched or (launches and isinstance(i, Call) and (is_view(i) or _makes_views(i.target))):
            start, launches = k if not launches else start, launches + launched
            continue
        if launches >= FEWEST:
            yield range(start, k)
        launches = 0


def _launches(i: Instruction, kernels: Mapping[str, KernelCode], function: Callable[[str], Any]) -> bool:
    """Whether an instruction only launches kernels, through the queue."""
    if isinstance(i, Launch):
        return kernels[i.kernel].address is None and queues(kernels[i.kernel].call)
    return isinstance(i, Call) and not is_view(i) and queues(function(i.target))


@functools.cache
def _makes_views(target: str) -> bool:
    """Whether an operator touches metadata alone. Composite ones that claim to may copy."""
    operator = operator_of(target)
    if operator is None or compat.is_composite(operator):
        return False
    returns = operator._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)

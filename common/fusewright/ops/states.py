"""Operators that draw random numbers from a generator of their own instead of the device's.

For every operator that draws in a checkpoint, AOTAutograd makes two generators of equal state: one for the operator in forward, the
other for its recomputation in backward. Both advance with each step, so that both draw the same. Other orders of forwards and
backwards are AOTAutograd's business, which sets the second one's state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fusewright import _torch_compat as compat


@dataclass(frozen=True)
class Stated:
    """A call of an operator, and the node of the generator that it draws from."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    generator: Any


def stated(node: Node) -> Stated | None:
    """The call that a node makes with a generator of its own, if it does."""
    target: Any = node.target
    if not compat.is_higher_order(target) or target.name() != "graphsafe_run_with_rng_state":
        return None
    (operator, *args), kwargs = node.args, dict(node.kwargs)
    generator = kwargs.pop("rng_state")
    return Stated(operator, tuple(args), kwargs, generator)


def draw(generator: torch.Generator, operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call an operator that draws from `generator`. Unlike torch's own function for this, it puts the device's generator back when
    the operator raises, too."""
    device = generator.device
    own = torch.get_device_module(device).default_generators[device.index]
    before = own.graphsafe_get_state()
    own.graphsafe_set_state(generator)
    try:
        return operator(*args, **kwargs)
    finally:
        own.graphsafe_set_state(before)

"""Calls of a model, in eager and compiled: seeds, gradients, other numbers, and what must be equal in any case."""

from __future__ import annotations

import copy
import random
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fusewright.bench.suite import Built, flatten_outputs

Outputs = list[Tensor]
DRAWS = 8
"""The number of draws of eager's error, where one draw is exceeded."""
APART = 1 / 64
"""The relative change of weights and inputs between draws of both errors: an element close to a kink, where the gradient jumps,
is close to it in one draw only."""


@dataclass
class Verdict:
    """`status`: right, wrong, wrong in aot_eager too, crashed, not built, not run (eager does not run this mode)."""

    model: str
    mode: str
    status: str
    reason: str = ""
    ratio: float = 0.0
    first_s: float = 0.0
    graphs: int = 0
    lowered: int = 0
    eager: int = 0
    bugs: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def gradients(own: nn.Module, fn: Callable[..., Any], given: dict[str, Any]) -> Outputs:
    """Return the mean of squares of all outputs, its gradients and what batch norms keep."""
    own.zero_grad(set_to_none=True)
    seed_all()
    loss = _loss(flatten_outputs(fn(**given)))
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in own.parameters() if p.grad is not None), *_buffers(own)]


def moved_module(module: nn.Module, seed: int, by: float | None = None) -> nn.Module:
    """Copy a module with its weights moved by at most one rounding, or by a fraction of themselves."""
    own = copy.deepcopy(module)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for p in own.parameters():
            p.copy_(_changed(p, by))
    return own


def moved_inputs(given: Mapping[str, Any], seed: int, by: float | None = None) -> dict[str, Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return {k: _changed(x, by) if floating(x) else x for k, x in given.items()}


def beginning(module: nn.Module) -> Callable[[], None]:
    """Return a function that gives a module its state back, and what it counts in Python: masks taken, the last batch's size."""
    state = copy.deepcopy(module.state_dict())
    counts = [(part, {k: n for k, n in vars(part).items() if isinstance(n, int | float)}) for part in module.modules()]

    def begin() -> None:
        module.load_state_dict(state)
        for part, numbers in counts:
            vars(part).update(numbers)

    return begin


def in_plain_ops(module: Any) -> nn.Module:
    """Copy a module without grouped products, which lack fp64."""
    own: nn.Module = copy.deepcopy(module)
    for part in own.modules():
        if hasattr(getattr(part, "config", None), "_experts_implementation"):
            part.config._experts_implementation = "eager"  # type: ignore[union-attr]
    return own


def _changed(x: Tensor, by: float | None) -> Tensor:
    if not x.is_floating_point():
        return x
    return x * (1 + (torch.rand(x.shape).to(x.device) - 0.5).to(x.dtype) * 2 * (torch.finfo(x.dtype).eps if by is None else by))


def layout(got: Outputs, eager: Outputs) -> str:
    """Describe what differs in number, shapes, dtypes or strides."""
    if len(got) != len(eager):
        return f"{len(got)} tensors, not {len(eager)}"
    for k, (g, e) in enumerate(zip(got, eager, strict=True)):
        if (g.shape, g.dtype) != (e.shape, e.dtype):
            return f"tensor {k} is {g.dtype} {tuple(g.shape)}, not {e.dtype} {tuple(e.shape)}"
        strides = [[s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] for t in (g, e)]
        if g.numel() and strides[0] != strides[1]:
            return f"strides of tensor {k} are {g.stride()}, not {e.stride()}"
    return ""


def seeded(built: Built, fn: Callable[..., Any] | None) -> Any:
    seed_all()
    return built.run(fn)


def seed_all() -> None:
    """Seed all generators that models use: LayerDrop uses Python's, masks of spectra use NumPy's."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


def _loss(outputs: Outputs) -> Tensor:
    parts = [x.float().square().mean() if x.dtype != torch.float64 else x.square().mean() for x in outputs if floating(x)]
    parts = [p for p in parts if p.requires_grad]
    if not parts:
        raise ValueError("no output depends on a parameter")
    return torch.stack(parts).sum()


def _buffers(module: nn.Module) -> Outputs:
    return [b.clone() for name, b in module.named_buffers() if "running_" in name]


def widened(given: Mapping[str, Any]) -> dict[str, Any]:
    return {k: x.double() if floating(x) else x for k, x in given.items()}


def floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def said(error: BaseException) -> str:
    """Describe the root cause of an error: its type, its text and where it was raised."""
    while (inner := getattr(error, "inner_exception", None) or error.__cause__) is not None:
        error = inner
    where = traceback.extract_tb(error.__traceback__)[-1:]
    place = "".join(f" ({Path(f.filename).name}:{f.lineno})" for f in where)
    return f"{type(error).__name__}: {str(error).strip()[:300]}{place}"

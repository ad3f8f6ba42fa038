"""Fusewright: a family of torch.compile backends on one shared lowering interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusewright.version import __version__

__all__ = ["__version__", "quantize", "refresh"]


def quantize(
    model: Any, calibration_inputs: Any = (), recipe: str = "static", *, backend: str | None = None, keep: Sequence[str] = (),
    dynamic_batch: bool = True,
) -> Any:
    """A copy of `model`, a `torch.nn.Module` in eval mode, that computes its linears and convolutions in 8 bits once it is
    compiled: `torch.compile(fusewright.quantize(model, inputs), backend=...)`. docs/quantization.md leads through it.

    calibration_inputs: some typical inputs, each a tensor, a tuple of arguments or a dict of keyword arguments.
    recipe: a name that the backend knows, say "static", "dynamic" or "weight_only".
    backend: whose; None for the best one here that quantizes.
    keep: names of modules that stay in floats, with wildcards: ["head", "blocks.*.attn"].
    dynamic_batch: let the first dimension of each input be of any size where the model allows it.

    Raises `fusewright.errors.QuantizationError` with what to do about it.
    """
    from fusewright import quantization  # here, because importing this package must not import torch

    return quantization.quantize(
        model, calibration_inputs, recipe, backend=backend, keep=keep, dynamic_batch=dynamic_batch
    )


def refresh(model: object = None) -> None:
    """Forget what compiled code made of the weights of `model`, a `torch.nn.Module` (None: of all models): the next call makes
    it anew.

    For writes that torch does not count: through `weight.data`, `weight.detach().numpy()`, or memory shared with others.
    """
    from fusewright.plan.execute.prepare import (
        refresh as forget,  # here, because importing this package must not import torch
    )

    forget(model)  # type: ignore[arg-type]

"""`fusewright.quantize`: select the quantizing backend and normalize its inputs; the backend does the rest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import torch

from fusewright import _torch_compat as compat
from fusewright import registry
from fusewright.errors import QuantizationError, nearest
from fusewright.interface import Quantization, QuantizationReport

MOST_INPUTS = 4096
"""Maximum number of calibration inputs that are read, since a data loader may be endless."""


def quantize(
    model: torch.nn.Module, calibration_inputs: Iterable[Any] | torch.Tensor = (), recipe: str = "static", *,
    backend: str | None = None, keep: Sequence[str] = (), dynamic_batch: bool = True,
) -> torch.nn.Module:  # fmt: skip
    """See `fusewright.quantize`."""
    by = quantization_of(backend)
    if recipe not in by.recipes:
        raise QuantizationError(f"there is no recipe {recipe!r}; {nearest(recipe, by.recipes)}")
    if not isinstance(model, torch.nn.Module):
        raise QuantizationError(f"a torch.nn.Module can be quantized, not {type(model).__name__}")
    if model.training and not isinstance(model, torch.fx.GraphModule):
        raise QuantizationError("the model is in training mode; call model.eval() first")
    return by.quantize(model, listed(calibration_inputs), recipe, keep=tuple(keep), dynamic_batch=dynamic_batch)


def report(model: torch.nn.Module, quantized: torch.nn.Module, inputs: Any, backend: str | None = None) -> QuantizationReport:
    """Report where quantization costs accuracy, layer by layer, on these inputs."""
    return quantization_of(backend).report(model, quantized, listed(inputs))


def load(file: str | Path | BinaryIO) -> torch.nn.Module:
    """Load a quantized model saved by `torch.export.save` or `fusewright quantize --save`, ready for `torch.compile`. Defines
    the quantized ops first, which torch needs to read the file; torchao is not needed."""
    compat.register_quantized_decomposed()
    return torch.export.load(file).module()


def listed(inputs: Iterable[Any] | torch.Tensor) -> list[Any]:
    """Calibration inputs as a list; one tensor is one input. At most `MOST_INPUTS` are read."""
    if isinstance(inputs, torch.Tensor):
        return [inputs]
    if isinstance(inputs, dict):
        raise QuantizationError("calibration inputs are a list; give [inputs] for one set of keyword arguments")
    if isinstance(inputs, str) or not isinstance(inputs, Iterable):
        raise QuantizationError(f"calibration inputs are a list of typical inputs, not {type(inputs).__name__}")
    return list(islice(inputs, MOST_INPUTS))


def quantization_of(backend: str | None = None) -> Quantization:
    """The quantization of a backend, or of the best one here by priority."""
    found = registry.get(backend or quantizing()).quantization()
    if found is None:
        raise QuantizationError(f"backend {backend!r} does not quantize; these do: {', '.join(_names()) or 'none here'}")
    return found


def quantizing() -> str:
    """The best backend here that quantizes."""
    for name in _names():
        return name
    raise QuantizationError("no backend that works here quantizes models; see: fusewright doctor")


def _names() -> list[str]:
    """Backends here that quantize, best first."""
    there = [i for i in registry.backends() if i.cls is not None and i.available and i.cls.quantization() is not None]
    return [i.name for i in sorted(there, key=lambda i: (-i.cls.priority if i.cls else 0, i.name))]

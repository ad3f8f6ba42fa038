"""Fusewright: a family of torch.compile backends on one shared lowering interface.

    model = torch.compile(model, backend="fusewright")        # the best backend that works on this machine
    model = torch.compile(model, backend="fusewright", options={"fallback": "error"})

No import is needed for that. The functions here cover what torch.compile does not. The command `fusewright` lists the backends
that work here (doctor), shows how a model is compiled (explain), times it (bench) and lists the options (config). Errors are in
`fusewright.errors`; backend authors start from `fusewright.interface`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusewright.version import __version__

__all__ = ["__version__", "load", "quantize", "refresh", "save"]


def quantize(
    model: Any, calibration_inputs: Any = (), recipe: str = "static", *, backend: str | None = None, keep: Sequence[str] = (),
    dynamic_batch: bool = True,
) -> Any:
    """Return a copy of `model`, a `torch.nn.Module` in eval mode, whose linears and convolutions run in 8 bits once compiled:
    `torch.compile(fusewright.quantize(model, inputs), backend=...)`. See docs/quantization.md.

    calibration_inputs: typical inputs, each a tensor, a tuple of arguments or a dict of keyword arguments.
    recipe: a recipe of the backend, e.g. "static", "dynamic" or "weight_only".
    backend: the backend to quantize for; None picks the best one here that quantizes.
    keep: names of modules that stay in floating point, with wildcards: ["head", "blocks.*.attn"].
    dynamic_batch: allow any size of the first dimension of each input where the model does.

    Raises `fusewright.errors.QuantizationError`, whose message says how to fix it.
    """
    from fusewright import quantization  # here, because importing this package must not import torch

    return quantization.quantize(
        model, calibration_inputs, recipe, backend=backend, keep=keep, dynamic_batch=dynamic_batch
    )


def save(
    model: Any, path: Any, *inputs: Any, backend: str | None = None, options: dict[str, Any] | None = None
) -> str:
    """Compile `model` for calls with `inputs` and write the result to the file `path`, for `load` in other processes. Return
    the SHA-256 of the file in hex. See docs/warm_starts.md.

    model: a `torch.nn.Module` in eval mode, or the result of `torch.compile`, whose backend and options are then used.
    inputs: the arguments of one call each, as a tensor, a tuple of arguments or a dict of keyword arguments. Shapes are fixed:
    give one entry for every shape that will be served.

    The file holds plans and machine code for this machine and this installation, but no weights. Raises
    `fusewright.errors.ArtifactError` for a model that cannot be saved.
    """
    from fusewright.aot.save import save as write  # here, because importing this package must not import torch

    return write(model, path, inputs, backend, options)


def load(model: Any, path: Any, *, sha256: str | None = None, otherwise: Any = "error", warm_up: bool = True) -> Any:
    """Return a callable that runs `model`, with its own weights, from a file written by `save`; nothing is traced or compiled.
    For inference only: results carry no gradients.

    sha256: the digest that `save` returned. Without it, only files written by this user on this machine are accepted, since
    they hold machine code.
    otherwise: "error", or "compile" to warn and use `torch.compile` for calls that no saved program fits.
    warm_up: run each program once, so that the first request pays no setup cost.

    Raises `fusewright.errors.ArtifactError` for a file that was changed or was made for another model, machine or installation.
    """
    from fusewright.aot.load import load as read  # here, because importing this package must not import torch

    return read(model, path, sha256, otherwise, warm_up)


def refresh(model: object = None) -> None:
    """Discard everything that compiled code derived from the weights of `model`, a `torch.nn.Module` (None: of all models); the
    next call computes it again.

    Needed after writes that torch does not count: through `weight.data`, `weight.detach().numpy()`, or memory shared with
    others.
    """
    from fusewright.plan.execute.prepare import (
        refresh as forget,  # here, because importing this package must not import torch
    )

    forget(model)  # type: ignore[arg-type]

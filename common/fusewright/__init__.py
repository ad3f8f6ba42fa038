"""Fusewright: a family of torch.compile backends on one shared lowering interface.

    model = torch.compile(model, backend="fusewright")        # the best backend that works on this machine
    model = torch.compile(model, backend="fusewright", options={"fallback": "error"})

Nothing has to be imported for that. Functions of this package are for what torch.compile does not do. The command
`fusewright` says what backends work here (doctor), what becomes of a model (explain), how fast it is (bench) and what options
there are (config); errors are in `fusewright.errors`, what a backend of your own needs is in `fusewright.interface`.
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


def save(
    model: Any, path: Any, *inputs: Any, backend: str | None = None, options: dict[str, Any] | None = None
) -> str:
    """Write what `model` is compiled to for calls with `inputs` into the file `path`, for `load` in other processes; the SHA-256 of
    the file, in hex. docs/warm_starts.md leads through it.

    model: a `torch.nn.Module` in eval mode, or what `torch.compile` made of one, whose backend and options are then taken.
    inputs: the arguments of a call each, given as a tensor, a tuple of arguments or a dict of keyword arguments. Shapes are fixed:
    give one for every shape that will be served.

    The file holds plans and machine code for this machine and this installation, and no weights. Raises
    `fusewright.errors.ArtifactError` for a model that cannot be saved.
    """
    from fusewright.aot.save import save as write  # here, because importing this package must not import torch

    return write(model, path, inputs, backend, options)


def load(model: Any, path: Any, *, sha256: str | None = None, otherwise: Any = "error", warm_up: bool = True) -> Any:
    """`model`, with its own weights, as a callable that runs the programs of a file that `save` wrote: nothing is traced, nothing
    compiled. For inference: results have no gradients.

    sha256: what `save` returned. Without it only files of this user's, from this machine, are taken: they hold machine code.
    otherwise: "error", or "compile" to warn and let `torch.compile` do what no program of the file fits.
    warm_up: run each program once, so that the first request finds everything made.

    Raises `fusewright.errors.ArtifactError` for a file that was changed or was made for another model, machine or installation.
    """
    from fusewright.aot.load import load as read  # here, because importing this package must not import torch

    return read(model, path, sha256, otherwise, warm_up)


def refresh(model: object = None) -> None:
    """Forget what compiled code made of the weights of `model`, a `torch.nn.Module` (None: of all models): the next call makes
    it anew.

    For writes that torch does not count: through `weight.data`, `weight.detach().numpy()`, or memory shared with others.
    """
    from fusewright.plan.execute.prepare import (
        refresh as forget,  # here, because importing this package must not import torch
    )

    forget(model)  # type: ignore[arg-type]

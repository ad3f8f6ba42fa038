"""Fusewright: a family of torch.compile backends on one shared lowering interface."""

from fusewright.version import __version__

__all__ = ["__version__", "refresh"]


def refresh(model: object = None) -> None:
    """Forget what compiled code made of the weights of `model`, a `torch.nn.Module` (None: of all models): the next call makes
    it anew.

    For writes that torch does not count: through `weight.data`, `weight.detach().numpy()`, or memory shared with others.
    """
    from fusewright.plan.execute.prepare import (
        refresh as forget,  # here, because importing this package must not import torch
    )

    forget(model)  # type: ignore[arg-type]

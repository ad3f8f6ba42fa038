"""fp64 results of the suite's models, to judge others by (`fusewright.accuracy`)."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fusewright.accuracy import Accuracy, compare
from fusewright.bench.device import computes_fp64
from fusewright.bench.suite import Built, TrainStep, cast_inputs, flatten_outputs, on_device
from fusewright.interface import HOST

__all__ = ["Accuracy", "compare", "reference", "train_reference"]

_NARROW = (torch.float32, torch.bfloat16, torch.float16)


class _Widen(TorchFunctionMode):
    """Models may cast to fp32 explicitly (`x.float()`, `softmax(dtype=torch.float32)`); in the reference those casts go to
    fp64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.float, torch.Tensor.bfloat16, torch.Tensor.half):
            func = torch.Tensor.double
        args = tuple(self._widen(arg) for arg in args)
        return func(*args, **{key: self._widen(value) for key, value in (kwargs or {}).items()})

    @staticmethod
    def _widen(value: Any) -> Any:
        return torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value


def reference(built: Built) -> list[torch.Tensor]:
    """Outputs of the call in fp64: the same rounded weights and inputs, in wider arithmetic, on the host if the device has no
    fp64."""
    built = replace(built, fn=copy.deepcopy(built.fn) if built.module is not None else built.fn)
    if not computes_fp64(built.device):
        built = on_device(built, HOST)
    if built.module is not None:
        built.module.double()
    wide = replace(cast_inputs(built, torch.float64), dtype="fp32")
    with torch.no_grad(), wide_arithmetic():
        return flatten_outputs(wide.run())


def train_reference(step: TrainStep) -> list[torch.Tensor]:
    """Loss and gradients of the step in fp64, on the host if the device has no fp64."""
    wide = step.repeatable()
    if not computes_fp64(step.device):
        wide = wide.to(HOST)
    wide.module.double()
    wide.batch = {name: _wide(value) for name, value in wide.batch.items()}
    wide.args, wide.dtype = tuple(map(_wide, wide.args)), "fp32"
    with wide_arithmetic():
        return wide.loss_and_grads()


def _wide(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


class wide_arithmetic:
    def __enter__(self) -> None:
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        self._mode = _Widen()
        self._mode.__enter__()

    def __exit__(self, *exc: Any) -> None:
        self._mode.__exit__(*exc)
        torch.set_default_dtype(self._default)

"""The backend's `Quantization`: recipes, `quantize`, `report`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fusewright.errors import QuantizationError
from fusewright.interface import QuantizationReport
from fusewright_int8.flow.recipes import RECIPES


class Int8Quantization:
    """Quantization by torchao, which is imported only when needed."""

    recipes: Mapping[str, str] = {r.name: r.about for r in RECIPES.values()}

    def quantize(
        self,
        model: torch.nn.Module,
        inputs: Sequence[Any],
        recipe: str,
        *,
        keep: Sequence[str] = (),
        dynamic_batch: bool = True,
    ) -> torch.nn.Module:
        need_torchao()
        from fusewright_int8.flow import convert

        return convert.quantize(model, inputs, recipe, keep=keep, dynamic_batch=dynamic_batch)

    def report(self, model: torch.nn.Module, quantized: torch.nn.Module, inputs: Sequence[Any]) -> QuantizationReport:
        need_torchao()
        from fusewright_int8.flow.report import report

        return report(model, quantized, inputs)

    def kernels(self, op: str, sizes: Sequence[Any]) -> Mapping[str, Callable[[], Any]]:
        from fusewright_int8.engines import bare

        return bare(op, sizes)


def need_torchao() -> None:
    """Raise QuantizationError if torchao, an optional dependency, is missing."""
    try:
        import torchao.quantization.pt2e  # noqa: F401
    except ImportError as e:
        raise QuantizationError(
            f"quantizing needs torchao ({e}); install it: pip install 'fusewright-int8[quantize]'"
        ) from e

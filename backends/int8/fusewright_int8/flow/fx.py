"""The FX quantization calls of old PyTorch (the removed `torch.ao.quantization`), on top of `fusewright.quantize`, for code that is
being migrated:

    mapping = get_default_qconfig_mapping("x86")
    prepared = prepare_fx(model, mapping, (x,))
    for x in calibration: prepared(x)
    quantized = convert_fx(prepared)                  # then torch.compile(quantized, backend="x86_int8")
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from fusewright.errors import QuantizationError, nearest
from fusewright_int8.flow.api import need_torchao
from fusewright_int8.flow.recipes import RECIPES

ENGINES = {"x86": "static", "fbgemm": "static", "onednn": "static"}
"""torch's engines -> recipes; their default configurations were static."""
_META = "fusewright_prepared"


@dataclass(frozen=True)
class QConfigMapping:
    """Holds the recipe that a model is quantized by."""

    recipe: str


def get_default_qconfig_mapping(backend: str = "x86", version: int = 0) -> QConfigMapping:
    """Return the recipe that corresponds to a torch engine's default."""
    if backend not in ENGINES:
        raise QuantizationError(f"there is no recipe for the engine {backend!r}; {nearest(backend, ENGINES)}")
    return QConfigMapping(ENGINES[backend])


def prepare_fx(
    model: torch.nn.Module, qconfig_mapping: Any, example_inputs: tuple[Any, ...], *_: Any, **__: Any
) -> GraphModule:
    """Return the model with observers, to be run on typical inputs."""
    _say(
        "prepare_fx",
        f"fusewright.quantize(model, calibration_inputs, {getattr(qconfig_mapping, 'recipe', 'static')!r})",
    )
    if not isinstance(qconfig_mapping, QConfigMapping):
        raise QuantizationError(
            f"a {type(qconfig_mapping).__name__} cannot be taken over; use fusewright.quantize(model, inputs, recipe, keep=[...]), "
            f"whose recipes are {', '.join(RECIPES)} and whose `keep` names modules that stay in floats"
        )
    if model.training:
        raise QuantizationError("the model is in training mode; call model.eval() first")
    need_torchao()
    from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e

    from fusewright_int8.flow.convert import as_call, export
    from fusewright_int8.flow.quantizer import Int8Quantizer

    quantizer = Int8Quantizer(RECIPES[qconfig_mapping.recipe])
    prepared: GraphModule = prepare_pt2e(export(model, as_call(example_inputs), dynamic_batch=True), quantizer)
    prepared.meta[_META] = qconfig_mapping.recipe, quantizer.stayed
    return prepared


def convert_fx(graph_module: GraphModule, *_: Any, **__: Any) -> GraphModule:
    """Return the observed model, quantized. Raise QuantizationError if it has seen no input."""
    _say("convert_fx", "fusewright.quantize, which calibrates and converts")
    if _META not in getattr(graph_module, "meta", {}):
        raise QuantizationError("convert_fx takes what prepare_fx gave")
    need_torchao()
    from fusewright_int8.flow.convert import finished

    recipe, stayed = graph_module.meta.pop(_META)
    return finished(graph_module, RECIPES[recipe], stayed)


def _say(old: str, new: str) -> None:
    warnings.warn(
        f"{old} is a call of torch.ao.quantization's FX mode, which torch no longer has; write {new} (docs/quantization.md)",
        FutureWarning, stacklevel=3,
    )  # fmt: skip

"""The models and how to build them: architectures of `transformers`, families of `timm`, and handmade models.

A model is named `source/name`. Nothing is downloaded: weights are random, geometries small.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.zoo import geometry, handmade, inputs, particular

LARGEST = 60e6
"""The most parameters of a model that counts as small."""

Resize = Callable[[int], dict[str, Any]]

def _declare_what_torchvision_misses() -> None:
    """Declare operators that torchvision, which timm and transformers import, expects. Its C++ part does not load with a torch
    that it was not built for."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError:  # it registers a fake of a missing operator
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


if importlib.util.find_spec("torchvision"):
    _declare_what_torchvision_misses()


class NotBuilt(Exception):
    """No small geometry of this model was found; the text is the error of the last attempt."""


@dataclass(frozen=True)
class Example:
    """A module in eval mode and keyword inputs that it accepts in eager. `resized(k)` returns inputs of the k-th other size if
    sizes can vary."""

    module: nn.Module
    inputs: dict[str, Any]
    resized: Resize | None = None


def names() -> list[str]:
    """All models that the installed packages allow."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    out = [f"transformers/{n}" for n in MODEL_MAPPING_NAMES]
    if all(map(importlib.util.find_spec, ("timm", "torchvision"))):
        out += [f"timm/{n}" for n in _timm_families()]
    return out + [f"handmade/{n}" for n in handmade.MODELS]


def build(name: str) -> Example:
    """Build the model in a small geometry. Raises `NotBuilt`."""
    source, _, rest = name.partition("/")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return {"transformers": _transformers, "timm": _timm, "handmade": _handmade}[source](rest)


# ---------------------------------------------------------------- transformers


def _transformers(name: str) -> Example:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    said: list[str] = []
    tried: list[tuple[str, Mapping[str, Any]]] = [(kind, {}) for kind, _ in geometry.GEOMETRIES]
    if name in particular.GEOMETRIES:
        tried.insert(0, (geometry.AS_WHOLE, particular.GEOMETRIES[name]))
    for kind, values in tried:
        try:
            config = geometry.small(CONFIG_MAPPING[name], kind, values)
            return accepted(config, LARGEST)
        except Exception as error:  # classes reject a geometry with various errors: try the next
            said.append(str(error) if isinstance(error, NotBuilt) else _in_brief(error))
    raise NotBuilt("; ".join(dict.fromkeys(said)))


def accepted(config: Any, largest: float, length: int = inputs.LENGTH, batch: int = inputs.BATCH) -> Example:
    """Build the causal language model, or else the base model, of a configuration, with inputs that it accepts. Raises `NotBuilt`,
    or what the model's class raises."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    base = MODEL_MAPPING[type(config)]
    try:
        module = _module(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), base), config, largest)
    except AttributeError:  # of some, the causal or even the base model takes a part of the configuration
        module = _module(base, _part_for(base, config), largest)
    said = []
    for given in inputs.candidates(module, length, batch):
        try:
            with torch.no_grad():
                module(**given)
        except Exception as error:  # forwards reject inputs with various errors: try the next
            said.append(f"given {', '.join(given)}: {_in_brief(error)}")
            continue
        return Example(module, given, _resized(module, tuple(given)))
    raise NotBuilt("; ".join(dict.fromkeys(said)) or "its forward takes nothing that is known here")


def _part_for(cls: Any, config: Any) -> Any:
    """The configuration, or the part of it that a class takes."""
    wanted = getattr(cls, "config_class", None) or type(config)
    parts = [config, *(getattr(config, n) for n in getattr(config, "sub_configs", {}))]
    return next((p for p in parts if isinstance(p, wanted)), config)


def _in_brief(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"


def _module(cls: Any, config: Any, largest: float) -> nn.Module:
    cls = cls[0] if isinstance(cls, (tuple, list)) else cls
    with torch.device("meta"):
        size = sum(p.numel() for p in cls(config).parameters())
    if size > largest:
        raise NotBuilt(f"{size / 1e6:.0f} M parameters")
    module: nn.Module = cls(config).eval()
    perturb(module)
    return module


def _resized(module: nn.Module, keys: tuple[str, ...]) -> Resize | None:
    """Return a function for other lengths and batch sizes of text."""
    if not any(k.endswith("input_ids") for k in keys):
        return None

    def other(k: int) -> dict[str, Any]:
        made = inputs.candidates(module, length=inputs.LENGTH - 5 + 6 * k, batch=inputs.BATCH + k % 2)
        return next(given for given in made if tuple(given) == keys)

    return other


def perturb(module: nn.Module) -> None:
    """Perturb fresh weights: zero biases and identity norms would hide a wrong bias, fold or scale."""
    with torch.no_grad():
        for p in module.parameters():
            if p.dim() <= 1 and p.is_floating_point():
                p.add_(torch.randn_like(p), alpha=0.1)
        for name, buffer in module.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(std=0.1)
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 1.5)


# ---------------------------------------------------------------- timm


def _timm_families() -> list[str]:
    """The first model of each `timm` module whose name does not suggest a huge one."""
    import timm

    out = []
    for module in timm.list_modules():
        small = sorted(timm.list_models(module=module), key=lambda n: (not _says_small(n), len(n), n))
        out += small[:1]
    return out


def _says_small(name: str) -> bool:
    return any(word in name for word in ("nano", "atto", "tiny", "small", "_s", "mini", "_xs", "18", "b0", "050", "26", "50"))


def _timm(name: str) -> Example:
    import timm

    said = ""
    for size, how in itertools.product((64, 96, 128, 224), ({"depth": 2}, {})):
        for given in ({"img_size": size, **how}, how):
            try:
                module = timm.create_model(name, num_classes=10, **given).eval()
                x = torch.randn(2, 3, size, size)
                with torch.no_grad():
                    module(x)
            except Exception as error:  # the architecture rejects an argument or a size: try the next
                said = f"{type(error).__name__}: {str(error)[:200]}"
                continue
            perturb(module)
            return Example(module, {"x": x})
    raise NotBuilt(said)


# ---------------------------------------------------------------- by hand


def _handmade(name: str) -> Example:
    module, given, resized = handmade.MODELS[name]()
    perturb(module)
    return Example(module.eval(), given, resized)


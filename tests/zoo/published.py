"""Published geometries: architectures of `transformers` in their default configuration, and the models of `timm`.

A function for each, for `fusewright bench` and `ci.gpu.profiles`: `tests/zoo/published.py:clip` has one image and 128 tokens
(fewer where it takes no more), `tests/zoo/published.py:clip@8` eight of each, `tests/zoo/published.py:xcit_tiny_12_p16_224@8`
eight images. Of architectures with more than `LARGEST` parameters two layers of the default width are built, with a small
vocabulary. Weights are random; nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.zoo import catalog, geometry

LENGTHS = (128, 64, 16)
"""Numbers of tokens, the first that fits."""
LARGEST = 3e9
"""The most parameters of a model."""

Call = tuple[nn.Module, tuple[torch.Tensor, ...], dict[str, Any]]


def __getattr__(name: str) -> Callable[[], Call]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model, _, batch = name.partition("@")
    if model in CONFIG_MAPPING:
        return partial(_built, model, int(batch or 1))
    if importlib.util.find_spec("timm") and importlib.import_module("timm").is_model(model):
        return partial(_images, model, int(batch or 1))
    raise AttributeError(f"neither transformers nor timm (where it is installed) has an architecture {model!r}")


def _built(name: str, batch: int) -> Call:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    cls, said = CONFIG_MAPPING[name], list[str]()
    for made in (cls, partial(geometry.small, cls, "shallow")):
        torch.manual_seed(0)
        config = made()
        if hasattr(config, "use_cache"):
            config.use_cache = False
        for length in LENGTHS:
            try:
                found = catalog.accepted(config, LARGEST, length, batch)
            except catalog.NotBuilt as error:
                said.append(f"{length} tokens: {error}")
                continue
            return found.module, (), found.inputs
    raise catalog.NotBuilt(f"{name}: {'; '.join(dict.fromkeys(said))}")


def _images(name: str, batch: int) -> Call:
    import timm

    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    return model, (torch.randn(batch, *model.default_cfg["input_size"]),), {}

"""Architectures of `transformers` in the geometry of their default configuration, which is a published one for most.

A function for each, for `fusewright bench` and `ci.gpu.profiles`: `tests/zoo/published.py:clip` has one image and 128 tokens
(fewer where it takes no more), `tests/zoo/published.py:clip@8` eight of each. Weights are random; nothing is downloaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.zoo import catalog

LENGTHS = (128, 64, 16)
"""Numbers of tokens, the first that fits."""
LARGEST = 600e6
"""The most parameters of a model."""

Call = tuple[nn.Module, tuple[()], dict[str, Any]]


def __getattr__(name: str) -> Callable[[], Call]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model, _, batch = name.partition("@")
    if model not in CONFIG_MAPPING:
        raise AttributeError(f"transformers has no architecture {model!r}")
    return partial(_built, model, int(batch or 1))


def _built(name: str, batch: int) -> Call:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(0)
    config = CONFIG_MAPPING[name]()
    if hasattr(config, "use_cache"):
        config.use_cache = False
    for length in LENGTHS:
        with contextlib.suppress(catalog.NotBuilt):
            found = catalog.accepted(config, LARGEST, length, batch)
            return found.module, (), found.inputs
    raise catalog.NotBuilt(f"{name} accepts none of these lengths: {LENGTHS}")

"""Nets as people write them, at the sizes at which they are used, with random weights.

A function for each, for `fusewright bench` and `ci.gpu.profiles`: `tests/zoo/written/images.py:denoiser`. The shapes are those of
the papers that the classes name. Records up to 2026-11-28 name the first two modules `written.py` and `written_sequences.py`.
"""

from __future__ import annotations

from torch import Tensor, nn

from tests.zoo.published import Call


def call(module: nn.Module, *inputs: Tensor) -> Call:
    return module.eval(), inputs, {}

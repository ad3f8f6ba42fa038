"""Recipes: what is quantized how, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Recipe:
    """`inputs`: how the inputs of products are quantized. "static": uint8, one scale and zero point per tensor, from calibration.
    "row": int8, one scale per row, computed at run time. None: not at all. Weights are int8, one scale per output channel.

    `ops`: the quantized ops. `residuals`: operands added to convolutions are quantized too, so that no float image is stored.
    """

    name: str
    inputs: Literal["static", "row"] | None
    ops: frozenset[str]
    residuals: bool
    about: str


RECIPES: Mapping[str, Recipe] = {
    r.name: r
    for r in (
        Recipe(
            "static", "static", frozenset({"linear", "conv2d"}), True,
            "8-bit weights and activations, scales from calibration inputs: the fastest, for CNNs and large batches",
        ),
        Recipe(
            "dynamic", "row", frozenset({"linear"}), False,
            "8-bit weights and activations, scales found for each row as it comes: no calibration, for transformers",
        ),
        Recipe(
            "weight_only", None, frozenset({"linear"}), False,
            "8-bit weights, float activations: the most accurate, for small batches, where memory is the limit",
        ),
    )
}  # fmt: skip

"""Compile a model for inference in one line, with eager's results up to rounding."""

from __future__ import annotations

import torch
from torch import nn


def main() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    x = torch.randn(2, 16, 64)
    fast = torch.compile(
        model, backend="fusewright"
    )  # the best backend that works here; `fusewright doctor` lists them

    with torch.no_grad():
        difference = (fast(x) - model(x)).abs().max().item()
        model.linear1.weight.mul_(2)  # the next call sees a weight changed in place
        after = (fast(x) - model(x)).abs().max().item()
    print(f"largest difference from eager: {difference:.1e}, after a weight has changed: {after:.1e}")
    assert max(difference, after) < 1e-4


if __name__ == "__main__":
    main()

"""Quantize a model to int8 and compile it. Needs an x86-64 CPU with int8 instructions and torchao (`fusewright-int8[quantize]`).

docs/quantization.md explains the recipes and their costs.
"""

from __future__ import annotations

import torch
from torch import nn

import fusewright


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).eval()
    typical = [torch.randn(32, 64) for _ in range(4)]
    quantized = fusewright.quantize(model, typical, "static", backend="x86_int8")
    fast = torch.compile(quantized, backend="x86_int8")
    with torch.no_grad():
        floats, ints = model(typical[0]), fast(typical[0])
    signal = floats.square().mean() / (floats - ints).square().mean()
    print(f"signal over noise of 8 bits: {10 * signal.log10().item():.0f} dB")
    assert signal > 100


if __name__ == "__main__":
    main()

"""Compile once for all batch sizes, and count the compiled graphs."""

from __future__ import annotations

import torch
from torch import nn

from fusewright import report


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 8), nn.Softmax(-1)).eval()
    fast = torch.compile(model, backend="fusewright", dynamic=True)  # without it, the second size triggers a dynamic graph
    with torch.no_grad(), report.recording() as graphs:
        for batch in (4, 7, 64, 1000):
            x = torch.randn(batch, 32)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    print(f"4 batch sizes, {len(graphs)} graph compiled")
    assert len(graphs) == 1


if __name__ == "__main__":
    main()

"""Train with a compiled model: forward and backward are compiled together, the rest of the loop is unchanged."""

from __future__ import annotations

import torch
from torch import nn


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
    x, labels = torch.randn(64, 16), torch.randint(4, (64,))

    @torch.compile(backend="fusewright")
    def loss_of(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(x), labels)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(x, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    assert losses[-1] < losses[0] / 2


if __name__ == "__main__":
    main()

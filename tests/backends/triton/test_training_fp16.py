"""Training in fp16 with a gradient scaler, and compiled optimizer steps, on CPU tensors in Triton's interpreter."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusewright import report

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

STEPS = 6
TOO_LARGE = 2.0**20
"""An initial scale at which fp16 gradients overflow: steps are skipped until it has shrunk."""


class Classifier(nn.Module):
    """An embedding, a pre-norm MLP block and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 32)
        self.norm, self.up, self.down, self.head = (
            nn.LayerNorm(32),
            nn.Linear(32, 64),
            nn.Linear(64, 32),
            nn.Linear(32, 50),
        )

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten())


def compiled(fn: Any, backend: str = "nvidia_triton") -> Any:
    return torch.compile(fn, backend=backend, options={"simulate": True, "strict": True})


def train(module: nn.Module, fn: Any) -> tuple[list[float], list[float]]:
    """Run a few steps of fp16 autocast with a scaler; return losses and scales."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 50, (4, 8), generator=g)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=TOO_LARGE, growth_interval=3, backoff_factor=2.0**-4)
    losses, scales = [], []
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = fn(ids, ids)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return losses, scales


@pytest.mark.parametrize("backend", ["nvidia_triton", "rocm_triton"])
def test_the_loss_curve_and_the_scales_are_eagers(backend: str) -> None:
    module = Classifier()
    twin = copy.deepcopy(module)
    expected, scales = train(module, module)
    with report.recording() as reports:
        got, got_scales = train(twin, compiled(twin, backend))
    assert got_scales == scales
    assert scales[0] == TOO_LARGE / 16 and expected[1] == expected[0], "the first step was to overflow and be skipped"
    assert expected[-1] < expected[0] - 0.3, "the model was to learn"
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
    assert [r.phase for r in reports] == ["forward", "backward"]


def test_infinite_gradients_stay_infinite() -> None:
    """The scaler sees them only if no kernel clamps or drops them."""
    module = Classifier()
    fn = compiled(module)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = fn(torch.arange(8).view(2, 4), torch.arange(8).view(2, 4))
    (loss * 2.0**30).backward()
    grads = [p.grad for p in module.parameters()]
    assert all(g is not None for g in grads)
    assert any(not torch.isfinite(g).all() for g in grads if g is not None)


# ---------------------------------------------------------------- optimizer steps

OPTIMIZERS: dict[str, Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw, foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw, one by one": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "adamw, rate as a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw, amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, foreach=True),
    "sgd, momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=True),
    "sgd, nesterov": lambda p: torch.optim.SGD(
        p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=1e-2, foreach=False
    ),
}


def stepped(make: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer], how: Callable[[Any], Any]) -> list[Tensor]:
    """Return the parameters after five steps with random gradients."""
    g = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(s, generator=g)) for s in ((8, 16), (16,), (4, 8, 3), (33,))]
    optimizer = make(params)
    step = how(optimizer.step)
    for _ in range(5):
        for p in params:
            p.grad = torch.randn(p.shape, generator=g)
        step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_compiled_optimizer_step_gives_eagers_parameters(name: str) -> None:
    for got, expected in zip(stepped(OPTIMIZERS[name], compiled), stepped(OPTIMIZERS[name], lambda f: f), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6)

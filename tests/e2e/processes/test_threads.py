"""Several Python threads call one compiled function at once: each gets the right result."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from fusewright import registry

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.skipif(not registry.info("x86_onednn").available, reason="no x86_onednn here"),
]

THREADS, CALLS, TRIES = 4, 25, 20
TORCHS_OWN = ("symbolically trace a dynamo-optimized function", "already been set in the current context")
"""Errors that torch sometimes raises with any backend when threads compile at once: fx's tracing flag was global before 2.15,
Dynamo's metrics in 2.10."""
CRASHES = torch.__version__.startswith("2.10.")
"""In this release the process crashes when threads compile at once, with `aot_eager` as well."""


class Block(nn.Module):
    """Kernels, library calls with prepacked weights, and values in the arena."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.a(x)).tanh()
        return (self.b(y * y.amax(-1, keepdim=True)) + x).softmax(-1)


@pytest.mark.parametrize("warm", [False, True], ids=["first calls together", "after a first call"])
@pytest.mark.parametrize("train", [False, True], ids=["inference", "gradients"])
def test_threads_get_their_own_answers(warm: bool, train: bool) -> None:
    if CRASHES and not warm:
        pytest.skip("torch 2.10 crashes when threads compile one function at once; a newer one does not")
    torch.manual_seed(0)
    net = Block()
    compiled = torch.compile(net, backend="x86_onednn", dynamic=False)
    inputs = [torch.randn(16, 32) * (k + 1) for k in range(THREADS)]
    together = threading.Barrier(THREADS)

    def answer(f: nn.Module, x: Tensor) -> Tensor:
        for _ in range(TRIES):
            try:
                return once(f, x)
            except RuntimeError as e:
                if not any(words in str(e) for words in TORCHS_OWN):
                    raise
                time.sleep(0.5)
        return once(f, x)

    def once(f: nn.Module, x: Tensor) -> Tensor:
        if not train:
            with torch.no_grad():
                return f(x)
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(f(x).square().sum(), x)
        return grad

    if warm:
        answer(compiled, inputs[0])

    def calls(x: Tensor) -> list[Tensor]:
        together.wait()
        return [answer(compiled, x) for _ in range(CALLS)]

    with ThreadPoolExecutor(THREADS) as pool:
        answers = list(pool.map(calls, inputs))
    for x, got in zip(inputs, answers, strict=True):
        want = answer(net, x)
        for g in got:
            torch.testing.assert_close(g, want, rtol=1e-4, atol=1e-5)

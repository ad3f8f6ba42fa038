"""`torch.compile(..., fullgraph=True).aot_compile`: what it returns runs, can be saved, and is right where it is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

BACKENDS = ["fusewright_interp", "x86_onednn"]


@pytest.fixture(autouse=True)
def _allowed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch 2.10 and 2.11 have it behind a switch. 2.10 guards on the grad mode of whatever Dynamo compiled before (a global that
    later versions restore), and refuses its own result where that was another."""
    monkeypatch.setattr(torch._dynamo.convert_frame, "initial_global_state", None)
    with torch._dynamo.config.patch({k: True for k in ("enable_aot_compile",) if hasattr(torch._dynamo.config, k)}):
        yield


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.norm = nn.Linear(8, 24), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _grads(model: nn.Module, y: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(y.square().sum(), [*model.parameters()]))


def _loaded(made: Any, path: Path) -> Any:
    made.save_compiled_function(str(path))
    torch.compiler.reset()
    with path.open("rb") as file:
        return torch.compiler.load_compiled_function(file)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("grad", [False, True])
def test_runs_and_is_loaded(name: str, grad: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(2, 5, 8)
    with torch.set_grad_enabled(grad):
        made = torch.compile(model, backend=name, fullgraph=True).forward.aot_compile(((x,), {}))
    for fn in (made, _loaded(made, tmp_path / "saved")):
        with torch.set_grad_enabled(grad):
            y = fn(model, x)
        torch.testing.assert_close(y, model(x))
        assert y.requires_grad == grad
        if grad:
            torch.testing.assert_close(_grads(model, y), _grads(model, model(x)))


def test_sizes_stay_symbolic(tmp_path: Path) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.softmax(-1) @ x.t()

    x = torch.randn(3, 8)
    torch._dynamo.mark_dynamic(x, 0)
    made = torch.compile(f, backend="x86_onednn", fullgraph=True).aot_compile(((x,), {}))
    for fn in (made, _loaded(made, tmp_path / "saved")):
        for rows in (3, 7):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(fn(x), f(x))


def test_options_are_kept(tmp_path: Path) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.qr(x).R.sin()

    x = torch.randn(4, 4)
    made = torch.compile(f, backend="x86_onednn", fullgraph=True, options={"fallback": "allow"}).aot_compile(((x,), {}))
    loaded = _loaded(made, tmp_path / "saved")
    assert loaded._artifacts.compiled_fn.compiler.keywords["options"] == {"fallback": "allow"}
    torch.testing.assert_close(loaded(x), f(x))

"""Calls that eager ran once: kernels compute them, forward and backward, with eager's results and strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusewright.report import recording

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.hardware("x86_onednn")]

ROWS, IMAGE, VOLUME = torch.rand(8, 5), torch.rand(2, 4, 16, 16), torch.rand(2, 3, 8, 8, 8)
PLACES = torch.rand(2, 7, 9, 2) * 2.4 - 1.2
LEFT = {"adaptive_max_pool2d_backward", "aten.grid_sampler_2d_backward.default", "upsample_nearest2d_backward"}
"""Gradients for which eager's kernels are faster, or which have no other."""

CALLS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "logit": (lambda x: torch.logit(x, 1e-2), (ROWS,)),
    "nan_to_num": (lambda x: torch.nan_to_num(torch.where(x > 0.5, torch.inf, x), posinf=2.0), (ROWS,)),
    "xlogy": (torch.xlogy, (ROWS, ROWS + 1)),
    "bce": (F.binary_cross_entropy, (ROWS, torch.rand(8, 5))),
    "bce_weighted": (lambda x, w: F.binary_cross_entropy(x, x.detach(), w.detach()), (ROWS, torch.rand(5))),
    "pos_weight": (
        lambda x, w: F.binary_cross_entropy_with_logits(x, x.detach(), pos_weight=w.detach()), (ROWS, torch.rand(5)),
    ),
    "rot90": (lambda x: torch.rot90(x, 1, (2, 3)), (IMAGE,)),
    "diagonals": (lambda x: torch.diag_embed(x) + torch.diagonal_copy(x[:5])[0], (ROWS,)),
    "resized_to_any_size": (lambda x: F.interpolate(x, size=(13, 27)), (IMAGE,)),
    "nearest_exact": (lambda x: F.interpolate(x, size=(13, 27), mode="nearest-exact"), (IMAGE,)),
    "trilinear": (lambda x: F.interpolate(x, scale_factor=1.5, mode="trilinear"), (VOLUME,)),
    "adaptive_max": (lambda x: F.adaptive_max_pool2d(x, 5), (IMAGE,)),
    "adaptive_max_of_all": (lambda x: F.adaptive_max_pool2d(x, 1), (IMAGE,)),
    "adaptive_avg": (lambda x: F.adaptive_avg_pool2d(x, 5), (IMAGE,)),
    "adaptive_avg_of_volumes": (lambda x: F.adaptive_avg_pool3d(x, 1), (VOLUME,)),
    "sampled": (lambda x, g: F.grid_sample(x, g.detach(), align_corners=False), (IMAGE, PLACES)),
    "sampled_nearest": (lambda x, g: F.grid_sample(x, g.detach(), "nearest", "border", True), (IMAGE, PLACES)),
}


def _wide(t: Tensor) -> Tensor:
    return t.double()


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_kernels_compute_what_eager_did(name: str, train: bool) -> None:
    call, args = CALLS[name]

    def fn(x: Tensor, *rest: Tensor) -> Tensor:
        return call(x * 0.9, *rest) * 1.5  # type: ignore[no-any-return]

    def run(fn: Callable[..., Tensor], args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, *rest = (a.detach().clone() for a in args)
        if not train:
            return (fn(x, *rest),)
        out = fn(x.requires_grad_(), *rest)
        out.square().sum().backward()
        assert x.grad is not None
        return out.detach(), x.grad

    with recording() as reports:
        got = run(torch.compile(fn, backend="x86_onednn", options={"cache": False, "never_slower": False}), args)
    assert {r.op for report in reports for r in report.by_eager} <= LEFT
    for made, want, true in zip(got, run(fn, args), run(fn, tuple(map(_wide, args))), strict=True):
        assert (made.dtype, made.shape, made.stride()) == (want.dtype, want.shape, want.stride())
        wrong, eagers = ((t.double() - true).abs().max().item() for t in (made, want))
        assert wrong <= 2 * eagers + 1e-6 * true.abs().max().item()


def _compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(fn, backend="x86_onednn", options={"cache": False, "never_slower": False})


@pytest.mark.parametrize("padding", ["zeros", "border"])
@pytest.mark.parametrize("image", [IMAGE, VOLUME], ids=["image", "volume"])
def test_places_that_are_no_numbers(image: Tensor, padding: str) -> None:
    """At the border NaN is the first element; weights of zeros are NaN only where eager computes vectors."""
    dims = image.dim() - 2
    places = torch.rand(2, *(4,) * dims, dims) * 2.4 - 1.2
    places[0, 0, ..., 0], places[0, 1, ..., -1], places[0, 2, ..., 0] = torch.nan, torch.inf, -torch.inf

    def fn(x: Tensor, places: Tensor) -> list[Tensor]:
        return [F.grid_sample(x * 1, places, mode, padding, False) for mode in ("bilinear", "nearest")]

    for made, want in zip(_compiled(fn)(image, places), fn(image, places), strict=True):
        torch.testing.assert_close(made, want, equal_nan=True)


def test_nearest_places_of_volumes_in_a_half_type_are_rounded_as_eager_does() -> None:
    def fn(x: Tensor, places: Tensor) -> Tensor:
        return F.grid_sample(x * 1, places, "nearest", "border", False)

    args = torch.randn(2, 3, 9, 9, 9).bfloat16(), (torch.rand(2, 8, 8, 8, 3) * 2 - 1).bfloat16()
    assert torch.equal(_compiled(fn)(*args), fn(*args))


@pytest.mark.parametrize("eps", [None, 0.0])
def test_the_gradient_of_a_logit_is_plus_infinity_at_both_zeros(eps: float | None) -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.logit(x, eps)

    x = torch.tensor([0.0, -0.0, 1.0, 0.5], requires_grad=True)
    (grad,) = torch.autograd.grad(_compiled(fn)(x).sum(), x)
    assert grad.tolist() == [torch.inf, torch.inf, torch.inf, 4.0]


def test_a_loss_of_each_probability_lies_as_its_operand() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy(x, y, reduction="none")

    x = torch.rand(7, 5).t()
    assert _compiled(fn)(x, torch.rand(5, 7)).stride() == x.stride()

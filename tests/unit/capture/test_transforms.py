"""Transforms of `torch.func` inside of a compiled function: gradients of each sample, as private training takes them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusewright.capture import layouts

pytestmark = [pytest.mark.usefixtures("fresh_dynamo")]


def each(first: Tensor, second: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
    def loss(first: Tensor, second: Tensor, image: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(image[None], first).relu(), second).float().square().mean()

    return torch.func.vmap(torch.func.grad(loss, (0, 1)), (None, None, 0))(first, second, images)


@pytest.mark.parametrize("attempted", [False, True], ids=["eager's layouts", "others fail"])
def test_gradients_of_each_sample_are_eagers(attempted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images are not laid otherwise there: torch.func differentiates no function of autograd. Where tracing fails, no level of a
    transform stays entered, which would break every later call of the process."""
    if attempted:
        monkeypatch.setattr(layouts, "transforms", lambda node: False)
    torch.manual_seed(0)
    given = [torch.randn(shape).bfloat16() for shape in ((4, 3, 3, 3), (4, 4, 3, 3), (2, 3, 8, 8))]
    with torch.no_grad():
        compiled = torch.compile(each, backend="nvidia_triton", options={"simulate": True, "fallback": "allow"})
        for got, want in zip(compiled(*given), each(*given), strict=True):
            assert (got - want).float().norm() <= 0.02 * want.float().norm()
    assert torch._C._functorch.peek_interpreter_stack() is None

"""Functions called by a plan can tell whether it was compiled with `strict`."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from fusewright.strict import is_strict, strictly


def test_it_ends_with_the_run_and_is_the_threads_own() -> None:
    seen: list[bool] = []

    def run(args: list[Any]) -> None:
        other = threading.Thread(target=lambda: seen.append(is_strict()))
        other.start()
        other.join()
        strictly(lambda args: None)([])
        seen.append(is_strict())
        raise ValueError

    with pytest.raises(ValueError):
        strictly(run)([])
    assert seen == [False, True] and not is_strict()


@pytest.mark.parametrize("strict", [False, True])
def test_forward_and_backward_of_a_compiled_model(strict: bool) -> None:
    seen: list[bool] = []

    @torch.library.custom_op("fusewright_tests::told", mutates_args=())
    def told(x: torch.Tensor) -> torch.Tensor:
        seen.append(is_strict())
        return x.clone()

    told.register_fake(torch.empty_like)
    told.register_autograd(lambda ctx, grad: torch.ops.fusewright_tests.told(grad))

    torch.compiler.reset()
    options: dict[str, Any] = {"strict": strict, "cache": False, "fallback": "allow"}
    fast = torch.compile(lambda x: told(x).sum(), backend="fusewright_null", options=options)
    fast(torch.ones(3, requires_grad=True)).backward()
    assert seen == [strict] * 2

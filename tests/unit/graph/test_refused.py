"""Whether eager refuses a call is asked of eager, but only if a number, a 0-dim tensor or a dim gives reason to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusewright import _torch_compat as compat
from fusewright.graph import refused
from fusewright.graph.refused import refusal

aten = torch.ops.aten


def fake(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return compat.fake_mode().from_tensor(torch.zeros(shape, dtype=dtype))


HALF, INT8, BOOL = fake(torch.float16, 3, 4), fake(torch.int8, 3, 4), fake(torch.bool, 3, 4)
F32, NUMBER = fake(torch.float32, 3, 4), fake(torch.float32)

IMAGE, BF16 = fake(torch.float32, 3, 4, 5, 5), fake(torch.bfloat16, 3, 4)
INT64, SIGNAL = fake(torch.int64, 3, 4), fake(torch.int64, 3, 4, 5)
HALF_ROW, ROW_PLACES = fake(torch.float16, 4), fake(torch.int64, 3)
LONG = compat.fake_mode().from_tensor(torch.zeros(1, 1, 4).expand(4096, 512, 4))

REFUSED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "too large for half": (aten.masked_fill.Scalar, (HALF, BOOL, -1e9)),
    "too large for int8": (aten.masked_fill.Scalar, (INT8, BOOL, 1000)),
    "a 0-dim tensor that may be": (aten.masked_fill.Tensor, (HALF, BOOL, NUMBER)),
    "too large for float32": (aten.clamp.default, (F32, 1e39)),
    "no such dim": (aten._softmax.default, (fake(torch.float32, 3), 10, False)),
    "the largest of bools": (aten.argmax.default, (BOOL, 1)),
    "bools rounded": (aten.floor.default, (BOOL,)),
    "a softmax of integers": (aten._softmax.default, (INT64, -1, False)),
    "a softmax of bools": (aten._softmax.default, (BOOL, -1, False)),
    "integers enlarged": (aten.upsample_nearest1d.vec, (SIGNAL, None, [2.0])),
    "a piecewise function of integers": (aten.hardswish.default, (INT64,)),
    "a bool from a half": (aten.rsub.Scalar, (HALF, True)),
    "a layer norm's weight of another dtype": (aten.native_layer_norm.default, (F32, [4], HALF_ROW, HALF_ROW, 1e-5)),
    "one behind many rows": (aten.native_layer_norm.default, (LONG, [4], HALF_ROW, HALF_ROW, 1e-5)),
    "a group norm's": (aten.native_group_norm.default, (IMAGE, HALF_ROW, HALF_ROW, 3, 4, 25, 2, 1e-5)),
    "a batch norm's": (aten.native_batch_norm.default, (IMAGE, HALF_ROW, HALF_ROW, None, None, True, 0.1, 1e-5)),
    "a loss's": (aten.nll_loss_forward.default, (F32, ROW_PLACES, HALF_ROW, 1, -100)),
    "a written half among floats": (aten.index_put.default, (F32, [ROW_PLACES], HALF)),
    "an added one": (aten.index_add.default, (F32, 0, ROW_PLACES, HALF)),
    "values that a loss compares with, of another dtype": (aten.binary_cross_entropy.default, (F32, HALF)),
    "classes in place of them": (aten.binary_cross_entropy.default, (F32, INT64)),
    "classes beside doubles": (aten.binary_cross_entropy.default, (fake(torch.float64, 3, 4), INT64)),
    "one that is folded": (aten.index_reduce.default, (F32, 0, ROW_PLACES, HALF, "amax")),
}
ALLOWED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "a sum of bools": (aten.sum.default, (BOOL,)),
    "a product of integers": (aten.mm.default, (fake(torch.int64, 4, 4), fake(torch.int64, 4, 4))),
    "bytes enlarged": (aten.upsample_nearest1d.vec, (fake(torch.uint8, 3, 4, 5), None, [2.0])),
    "a function of integers that are promoted": (aten.exp.default, (INT64,)),
    "a view of integers whose stand-in has other sizes": (aten.view.default, (INT64, [12])),
    "a half beside a float": (aten.cat.default, ([HALF, F32],)),
    "a layer norm of bf16 with a weight of fp32": (aten.native_layer_norm.default, (BF16, [4], fake(torch.float32, 4), None, 1e-5)),
    "a backward with statistics as they are traced": (
        aten.native_layer_norm_backward.default,
        (BF16, BF16, [4], *[fake(torch.bfloat16, 3, 1)] * 2, fake(torch.float32, 4), None, [True, True, False]),
    ),
    "a loss that promotes what it compares with": (aten.mse_loss.default, (F32, HALF)),
    "classes": (aten.nll_loss_forward.default, (F32, ROW_PLACES, fake(torch.float32, 4), 1, -100)),
    "a half and a float": (aten.add.Tensor, (HALF, F32)),
    "a view whose stand-in has other sizes": (aten.view.default, (BOOL, [12])),
    "infinity": (aten.masked_fill.Scalar, (HALF, BOOL, float("-inf"))),
    "comparisons wrap": (aten.eq.Scalar, (INT8, 1000)),
    "products are infinite": (aten.mul.Tensor, (HALF, 1e9)),
    "a fraction of an integer": (aten.add.Tensor, (INT8, 1.5)),
    "a 0-dim tensor in a sum": (aten.add.Tensor, (HALF, NUMBER)),
    "a dim from the end": (aten._softmax.default, (F32, -2, False)),
}


def asked(target: Any, args: tuple[Any, ...]) -> str | None:
    return refusal(target, args, {}, args[0])


@pytest.mark.parametrize("name", REFUSED)
def test_what_eager_refuses(name: str) -> None:
    why = asked(*REFUSED[name])
    assert why is not None and why.startswith("eager refuses this call: ")


@pytest.mark.parametrize("name", ALLOWED)
def test_what_eager_allows(name: str) -> None:
    assert asked(*ALLOWED[name]) is None


def test_nobody_is_asked_without_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refused, "_asked", pytest.fail)
    for target, args in (
        (aten.masked_fill.Scalar, (HALF, BOOL, -1e4)), (aten.add.Tensor, (F32, 1)), (aten.sum.dim_IntList, (F32, [-1])),
    ):  # fmt: skip
        assert asked(target, args) is None


def test_asking_draws_no_numbers() -> None:
    refused._answers.clear()
    before = torch.get_rng_state()
    asked(aten.randint_like.default, (INT64, 5))
    asked(aten.bernoulli.p, (INT64, 0.5))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("sizes", [lambda n: (n - 1, 4), lambda n: (4, n - 1), lambda n: (2, n - 1, n - 2)])
def test_asking_assumes_nothing_of_sizes(sizes: Callable[[Any], tuple[Any, ...]]) -> None:
    x = compat.symbolic_mode().from_tensor(torch.empty(7, dtype=torch.int64))
    operand = x.new_empty(sizes(x.shape[0])).transpose(0, 1)
    env = x.shape[0].node.shape_env
    before = len(env.guards)
    refused._answers.clear()
    assert asked(aten._softmax.default, (operand, -1, False)) is not None
    assert env.guards[before:] == []


def test_a_number_of_many_elements_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refused, "_asked", pytest.fail)
    large = fake(torch.int8, 1 << 20)
    assert refusal(aten.arange.start_step, (0, 1 << 20), {"dtype": torch.int8}, large) is not None


SIZE = compat.symbolic_mode().from_tensor(torch.empty(7)).shape[0]
ROW, PLACE = fake(torch.float16, 4), fake(torch.int64)

SIZED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "rows of a table": (aten.embedding_dense_backward.default, (ROW, PLACE, SIZE, -1, False)),
    "rows that are known": (aten.embedding_dense_backward.default, (ROW, PLACE, 1 << 40, -1, False)),
    "a slice's input": (aten.slice_backward.default, (fake(torch.float16), [SIZE], 0, 0, 1, 1)),
    "padding": (aten.constant_pad_nd.default, (HALF, [0, SIZE], 1e9)),
    "padding that is known": (aten.constant_pad_nd.default, (HALF, [0, 1 << 40], 1e9)),
    "a new tensor": (aten.new_full.default, (HALF, [SIZE], 1e9)),
}


class Largest(TorchDispatchMode):
    """Records the element count of the largest tensor that an operator makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.device.type != "meta":
            self.elements = max(self.elements, made.numel())
        return made


@pytest.mark.parametrize("name", SIZED)
def test_asking_takes_no_memory(name: str) -> None:
    """Sizes may be huge: on systems that overcommit memory, asking with a large one would kill the process."""
    target, args = SIZED[name]
    refused._answers.clear()
    with Largest() as seen:
        why = refusal(target, args, {}, args[0])
    assert seen.elements <= refused.MOST_ASKED
    assert why is None or "DefaultCPUAllocator" not in why


def test_the_gradient_of_a_table_of_any_size_is_not_refused() -> None:
    assert asked(*SIZED["rows of a table"]) is None

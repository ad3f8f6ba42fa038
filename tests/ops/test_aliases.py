"""Every alias against its own overload: the canonical call returns the same bits, dtype and strides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusewright import ops
from fusewright.conformance.ops.cases import SPECIAL, V, X, Y
from fusewright.conformance.ops.samples import BF16, F32, I64, T, c, given, index, mask, t
from fusewright.ops.aliases import ALIASES, Alias
from fusewright.ops.core import resolve
from fusewright.ops.oracle import flat

POSITIVE = t(3, 4, low=1, high=5)
IMAGE = t(2, 4, 6, 6, channels_last=True)
BINARY = (
    c(X, 2),
    c(SPECIAL, 0.1),
    c(t(3, 4, dtype=I64), 2),
    c(t(3, 4, dtype=I64), 1.5),
    c(t(3, 4, dtype=BF16), 0.3),
)

CALLS = {
    **{f"{n}.Scalar": BINARY for n in ("add", "sub", "mul", "div")},
    "rsub.Tensor": (c(X, Y), c(X, V, alpha=2)),
    "div.Scalar_mode": (c(X, 0.3, rounding_mode="floor"), c(X, 2, rounding_mode="trunc")),
    "div.Scalar_mode to div": (c(X, 0.3, rounding_mode=None), c(t(3, 4, dtype=I64), 2, rounding_mode=None)),
    "div.Tensor_mode": (c(X, POSITIVE, rounding_mode=None), c(t(4, dtype=I64), T((4,), I64, 1, 5), rounding_mode=None)),
    "floor_divide": (c(X, POSITIVE), c(t(3, 4, dtype=I64), T((4,), I64, 1, 5))),
    "floor_divide.Scalar": (c(X, 0.3), c(t(3, 4, dtype=I64), 2)),
    "true_divide.Tensor": (c(X, POSITIVE), c(t(3, 4, dtype=I64), T((4,), I64, 1, 5))),
    **{f"{n}.Tensor": (c(t(3, 4, dtype=I64), T((4,), I64, 0, 9)),) for n in ("__lshift__", "__rshift__")},
    **{f"{n}.Scalar": (c(t(3, 4, dtype=I64), 4), c(t(3, 4, dtype=torch.uint8), 4)) for n in ("__lshift__", "__rshift__")},
    "max.other": (c(X, Y),),
    "min.other": (c(X, Y),),
    **{f"clamp_{n}": (c(X, 0.1), c(SPECIAL, 0.5), c(t(4, dtype=I64), 1)) for n in ("min", "max")},
    **{f"clamp_{n}.Tensor": (c(X, V), c(SPECIAL, t())) for n in ("min", "max")},
    "hardtanh": (c(X), c(SPECIAL, -2, 2)),
    "relu6": (c(X), c(SPECIAL)),
    "square": (c(X), c(t(3, dtype=I64))),
    "celu": (c(X), c(SPECIAL, 0.5)),
    "norm.ScalarOpt_dim": (c(X, None, [1]), c(X, 1, [0], True), c(X, 3.0, [0, 1])),
    "special_erf": (c(X), c(t(3, dtype=I64))),
    "special_expit": (c(X),),
    "lift_fresh_copy": (c(X),),
    "prims::convert_element_type": (c(X, BF16), c(IMAGE, I64), c(X, F32)),
    "detach": (c(X),),
    **{n: (c(X), c(SPECIAL), c(t(3, dtype=I64))) for n in ("sum", "max", "min", "any", "all")},
    "mean": (c(X), c(SPECIAL), c(t(3, dtype=I64), dtype=F32)),
    **{f"{n}.dim": (c(X, 1), c(X, 0, True)) for n in ("any", "all")},
    **{n: (c(X), c(X, False)) for n in ("var", "std", "var_mean")},
    **{f"{n}.dim": (c(X, [1]), c(X, [0], False, True)) for n in ("var", "std", "var_mean")},
    "sort": (c(X), c(X, 0, True)),
    "softmax.int": (c(X, -1), c(SPECIAL, 0)),
    "log_softmax.int": (c(X, -1),),
    "native_batch_norm": (c(IMAGE, t(4), t(4), t(4), t(4, low=0.5, high=2), False, 0.1, 1e-5),),
    "native_batch_norm to batch_norm_no_stats": (c(IMAGE, t(4), t(4), None, None, True, 0.1, 1e-5),),
    "conv1d": (c(t(2, 4, 9), t(6, 4, 3), t(6), [2], [1]), c(t(2, 4, 9), t(6, 2, 3), None, [1], [0], [2], 2)),
    "conv2d": (
        c(IMAGE, t(8, 4, 3, 3), t(8), [2, 2], [1, 1]),
        c(IMAGE, t(8, 1, 3, 3), None, [1, 1], [0, 0], [1, 1], 4),
    ),
    "conv3d": (c(t(1, 2, 4, 4, 4), t(3, 2, 2, 2, 2)),),
    "conv_transpose1d": (c(t(2, 4, 9), t(4, 6, 3), t(6), [2]),),
    "conv_transpose2d.input": (c(IMAGE, t(4, 3, 3, 3), None, [2, 2], [1, 1], [1, 1]),),
    "_unsafe_view": (c(X, [2, 6]),),
    "unsafe_split.Tensor": (c(X, 2, 1), c(X, 2, -1)),
    "unsafe_split_with_sizes": (c(X, [1, 3], 1),),
    "squeeze": (c(t(1, 3, 1)), c(t(2, 3)), c(t(1, 1)), c(torch.ones(()))),
    "squeeze.dim": (c(t(1, 3), 0), c(t(1, 3), 1)),
    "swapaxes": (c(X, 0, 1),),
    "narrow": (c(X, 1, 1, 2), c(X, 0, -2, 1)),
    "arange": (c(5), c(2.5), c(4, dtype=F32)),
    "arange.start": (c(1, 5), c(0.5, 3)),
    **{n: (c([2, 3]), c([2], dtype=I64)) for n in ("zeros", "ones")},
    **{n: (c(X), c(IMAGE), c(X, dtype=I64)) for n in ("zeros_like", "ones_like")},
    "zero": (c(X), c(IMAGE), c(SPECIAL), c(t(3, dtype=I64))),
    **{n: (c(X, [2, 3]), c(X, [2], dtype=I64)) for n in ("new_zeros", "new_ones")},
    "eye": (c(3),),
    "randint": (c(9, [5]),),
    "_unsafe_index.Tensor": (c(X, [index(2, size=3)]),),
    "_unsafe_index_put": (c(X, [given(2, 0, dtype=I64)], t(2, 4)),),
}


def _short(alias: Alias) -> str:
    """The name of the overload, and for all but its first row that of the row."""
    name = alias.qualname.removeprefix("aten::")
    first = next(a for a in ALIASES if a.qualname == alias.qualname)
    return name if first is alias else f"{name} to {alias.op}"


def test_every_alias_has_calls() -> None:
    assert sorted(CALLS) == sorted(_short(a) for a in ALIASES)
    assert all(a.op in ops.OPS for a in ALIASES)


@pytest.mark.parametrize("alias", ALIASES, ids=_short)
def test_alias_is_bitwise_its_row(alias: Alias) -> None:
    target = resolve(alias.qualname)
    for case in CALLS[_short(alias)]:
        args, kwargs = case.make(F32)
        found = ops.canonical(target, args, kwargs)
        assert found is not None and found[0].name == alias.op
        torch.manual_seed(0)
        want = flat(target(*args, **kwargs))
        torch.manual_seed(0)
        got = flat(found[0].target(*found[1], **found[2]))
        assert [_bits(x) for x in got] == [_bits(x) for x in want]


def _bits(x: Any) -> tuple[Any, ...]:
    return (
        x.dtype,
        tuple(x.shape),
        x.stride(),
        x.contiguous().view(torch.uint8).tolist() if x.dim() else repr(x.item()),
    )


def test_hardtanh_of_integers_is_not_clamp() -> None:
    hardtanh = torch.ops.aten.hardtanh.default
    assert ops.canonical(hardtanh, (torch.tensor([2]),), {}) is None
    assert ops.canonical(hardtanh, (torch.tensor([2.0]),), {}) is not None


def test_calls_outside_the_opset_are_unknown() -> None:
    x = torch.randn(2, 3)
    aten = torch.ops.aten
    assert ops.canonical(aten.softmax.int, (x, -1, torch.float64), {}) is None
    assert ops.canonical(aten.nonzero.default, (x,), {}) is None
    assert ops.canonical(aten.add_.Tensor, (x, x), {}) is None


def test_canonical_fills_in_defaults() -> None:
    x, aten = object(), torch.ops.aten
    op, args, kwargs = ops.canonical(aten.max_pool2d_with_indices.default, (x, 2), {"padding": 1}) or pytest.fail()
    assert op.name == "max_pool2d"
    assert args == (x, [2, 2], [], [1, 1], [1, 1], False)
    assert kwargs == {}
    op, args, kwargs = ops.canonical(aten.sum.default, (x,), {}) or pytest.fail()
    assert (op.name, args, kwargs) == ("sum", (x, None, False), {"dtype": None})


def test_arguments_that_fit_no_schema_are_refused() -> None:
    with pytest.raises(TypeError, match="no argument is called scale"):
        ops.canonical(torch.ops.aten.relu.default, (1,), {"scale": 2})
    with pytest.raises(TypeError, match="'other' is missing"):
        ops.canonical(torch.ops.aten.add.Tensor, (1,), {})


def test_find_knows_canonical_overloads_only() -> None:
    assert ops.find(torch.ops.aten.add.Tensor) is ops.OPS["add"]
    assert ops.find(torch.ops.aten.add.Scalar) is None
    assert all(ops.find(op.target) is op for op in ops.OPS.values())


def test_flags_come_from_schemas() -> None:
    aten = torch.ops.aten
    assert ops.is_view(aten.view.default) and not ops.is_view(aten.clone.default)
    assert ops.is_mutating(aten.add_.Tensor) and not ops.is_mutating(aten.add.Tensor)
    assert not ops.is_view(aten.add_.Tensor)
    assert ops.is_random(aten.rand.default) and not ops.is_random(aten.relu.default)


def test_attention_without_dropout_draws_nothing() -> None:
    sdpa = ops.OPS["sdpa"]
    q = torch.randn(1, 1, 2, 4)
    assert not ops.draws(sdpa, [q, q, q], {})
    assert ops.draws(sdpa, [q, q, q, None, 0.1], {})
    assert ops.draws(ops.OPS["rand"], [[2]], {})
    assert not ops.draws(ops.OPS["add"], [q, q], {})


def test_mask_indices_have_no_static_shape() -> None:
    x, hits = torch.randn(3, 4), mask(3, 4).make(F32, torch.Generator().manual_seed(0))
    assert ops.OPS["index"].shapes([x, [hits]]) == (None,)

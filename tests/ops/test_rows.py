"""Every row against eager: dtype rule, shape rule, reference, decomposition."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fusewright import _torch_compat as compat
from fusewright import ops
from fusewright.conformance.ops.calls import UNDEFINED, arguments, dtypes_of, mapped, with_tensors
from fusewright.conformance.ops.cases import CASES
from fusewright.conformance.ops.samples import F32, FLOATS, Case, NotFinite
from fusewright.ops import Kind, Op, rules
from fusewright.ops.dtype_rules import result_type
from fusewright.ops.oracle import evaluate, flat

compat.register_quantized_decomposed()

NO_CPU_KERNEL = ("rms_norm_backward",)


def _params(rows: list[Op]) -> list[Any]:
    found = [
        (op, d, k)
        for op in rows
        for d in dtypes_of(op)
        for k, case in enumerate(CASES.get(op.name, ()))
        if _exists(case, d)
    ]
    return [pytest.param(op, d, CASES[op.name][k], id=f"{op.name}-{str(d)[6:]}-{k}") for op, d, k in found]


def _exists(case: Case, dtype: torch.dtype) -> bool:
    try:
        case.make(dtype)
    except NotFinite:
        return False
    return True


ULPS = {torch.float64: 16, torch.float32: 16, torch.bfloat16: 1}
"""Allowed rounding error, in units in the last place of the largest value. Half types compute in fp32 and round about once."""


MORE_ULPS = {"prod_all": 6, "bce": 2, "adaptive_avg_pool2d_backward": 2, **{f"replication_pad{n}d_backward": 8 for n in (1, 2, 3)}}
"""Rows whose eager kernels round at every step."""


def _close(got: torch.Tensor, want: torch.Tensor, computed_in: torch.dtype, more: int = 1) -> None:
    """Check that `got` equals `want` (fp64) up to rounding in the coarser of its dtype and `computed_in`."""
    if not (got.is_floating_point() or got.is_complex()):
        assert torch.equal(got, want.to(got.dtype))
        return
    finite = want[torch.isfinite(want)]
    size = max(1.0, finite.abs().max().item()) if finite.numel() else 1.0
    dtypes = [d for d in (got.dtype, computed_in) if d in ULPS]
    tolerance = max(ULPS[d] * torch.finfo(d).eps for d in dtypes) * size * more
    torch.testing.assert_close(got.to(want.dtype), want, rtol=0, atol=tolerance, equal_nan=True)


def test_every_row_has_samples() -> None:
    assert sorted(CASES) == sorted(op.name for op in ops.ROWS)
    assert all(CASES.values())


@pytest.mark.parametrize(("op", "dtype", "case"), _params([o for o in ops.OPS.values() if o.name not in NO_CPU_KERNEL]))
def test_row_follows_eager(op: Op, dtype: torch.dtype, case: Case) -> None:
    args, kwargs = arguments(op, case, dtype)
    torch.manual_seed(0)
    outs = flat(op.target(*args, **kwargs))
    assert op.dtypes(args, kwargs) == tuple(None if o is None else o.dtype for o in outs)
    assert op.shapes(args, kwargs) == tuple(None if o is None else tuple(o.shape) for o in outs)
    torch.manual_seed(0)
    for i, (got, want) in enumerate(zip(outs, evaluate(op, args, kwargs), strict=True)):
        if got is not None and i not in UNDEFINED.get(op.name, ()):
            assert want is not None and want.shape == got.shape
            _close(got, want, dtype, MORE_ULPS.get(op.name, 1))


MIXED = (torch.bfloat16, torch.float64, torch.int64)
NEVER_MIXED = ("dropout_backward", "conv_backward", "quantize_tensor")
"""Rows without such calls: masks of dropout are bool, eager refuses the convolution before its gradient, and a scale of an integer
type would be zero."""


@pytest.mark.parametrize("op", [o for o in ops.OPS.values() if o.name not in NEVER_MIXED], ids=lambda o: o.name)
def test_dtypes_of_mixed_operands_are_eagers(op: Op) -> None:
    for args, kwargs in _with_an_operand_of_another_dtype(op):
        try:
            outs = flat(op.target(*mapped(args, torch.clone), **kwargs))
        except (RuntimeError, IndexError, AssertionError):
            continue  # eager refuses these dtypes
        assert op.dtypes(args, kwargs) == tuple(None if o is None else o.dtype for o in outs)


def _with_an_operand_of_another_dtype(op: Op) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    args, kwargs = arguments(op, CASES[op.name][0], dtypes_of(op)[0])
    given = list(rules.tensors(args))
    for k, dtype in itertools.product(range(len(given)), MIXED if len(given) > 1 else ()):
        if given[k].is_floating_point():
            yield with_tensors(args, iter([*given[:k], given[k].to(dtype), *given[k + 1 :]])), kwargs


COMPOSITES = [op for op in ops.OPS.values() if op.decompose is not None]


@pytest.mark.parametrize(("op", "dtype", "case"), [p for p in _params(COMPOSITES) if p.values[1] in FLOATS])
def test_decomposition_agrees(op: Op, dtype: torch.dtype, case: Case) -> None:
    args, kwargs = arguments(op, case, dtype)
    assert op.decompose is not None
    outs = flat(op.decompose(*args, **kwargs))
    for got, want, d in zip(outs, evaluate(op, args, kwargs), op.dtypes(args, kwargs), strict=True):
        if d is not None:
            assert got is not None and want is not None and got.dtype == d
            _close(got, want, dtype)


@pytest.mark.parametrize("op", COMPOSITES, ids=lambda op: op.name)
def test_a_decomposition_stays_on_the_device_of_its_tensors(op: Op) -> None:
    assert op.decompose is not None
    for case in CASES[op.name]:
        args, kwargs = arguments(op, case, F32)
        given, named = mapped([args, list(kwargs.values())], lambda t: t.to("meta"))
        outs = flat(op.decompose(*given, **dict(zip(kwargs, named, strict=True))))
        assert {o.device.type for o in outs if o is not None} == {"meta"}


@pytest.mark.parametrize("op", COMPOSITES, ids=lambda op: op.name)
def test_decomposition_ends_in_primitives(op: Op) -> None:
    args, kwargs = arguments(op, CASES[op.name][0], F32)

    def run(*tensors: torch.Tensor) -> Any:
        assert op.decompose is not None
        return op.decompose(*with_tensors(args, iter(tensors)), **kwargs)

    graph = make_fx(run, tracing_mode="fake")(*rules.tensors(args)).graph
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            found = ops.canonical(node.target, node.args, node.kwargs)
            assert found is not None, f"{node.target} is outside the opset"
            assert found[0].kind is not Kind.COMPOSITE, f"{node.target} is {found[0].name}"


# Packed weights have no symbolic sizes.
SHAPED = [op for op in ops.OPS.values() if op.kind is not Kind.RANDOM and not op.qualname.startswith("onednn")]


@pytest.mark.parametrize("op", SHAPED, ids=lambda op: op.name)
def test_rules_hold_for_symbolic_sizes(op: Op) -> None:
    args, kwargs = arguments(op, CASES[op.name][0], F32)
    seen: list[tuple[Any, Any]] = []

    def run(*tensors: torch.Tensor) -> Any:
        call = with_tensors(args, iter(tensors))
        seen.extend(zip(flat(op.target(*call, **kwargs)), op.shapes(call, kwargs), strict=True))
        return [o for o, _ in seen if o is not None]

    make_fx(run, tracing_mode="symbolic")(*rules.tensors(args))
    for out, shape in seen:
        if out is not None:
            assert [int(n) for n in out.shape] == [int(n) for n in shape]


def test_rules_read_specs_of_the_interface() -> None:
    from fusewright.interface import TensorSpec

    x = TensorSpec((2, 3), (3, 1), torch.bfloat16)
    layer_norm = ops.OPS["layer_norm"]
    assert ops.OPS["add"].dtypes([x, 1.5, 1]) == (torch.bfloat16,)
    assert layer_norm.shapes([x, [3], None, None, 1e-5]) == ((2, 3), (2, 1), (2, 1))
    assert layer_norm.dtypes([x, [3], None, None, 1e-5]) == (torch.bfloat16,) * 3


def test_a_convolution_of_no_channels_makes_none() -> None:
    """Whatever its weight says."""
    args = (torch.randn(2, 0, 5), torch.randn(4, 0, 2), None, (1,), (1,), (1,), False, (0,), 1)
    assert ops.OPS["conv"].shapes(args) == (tuple(torch.convolution(*args).shape),) == ((2, 0, 6),)


def test_reference_keeps_nan_and_infinity() -> None:
    op = ops.OPS["amax"]
    (out,) = evaluate(op, [torch.tensor([1.0, math.nan]), [], False], {})
    assert out is not None and out.isnan()


def test_a_row_whose_overload_comes_later_is_found_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package imported later may provide the overload, so its absence is not cached."""
    monkeypatch.setattr(ops, "_ENTRIES", {})
    with monkeypatch.context() as before:
        before.setattr(ops.Op, "available", property(lambda self: False))
        assert ops.find(torch.ops.aten.relu.default) is None
    assert ops.find(torch.ops.aten.relu.default) is ops.OPS["relu"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool])
@pytest.mark.parametrize("other", [1j, torch.tensor(1j), torch.tensor(1j, dtype=torch.complex128)], ids=["number", "c64", "c128"])
def test_a_complex_operand_of_lower_rank_promotes_as_in_torch(dtype: torch.dtype, other: Any) -> None:
    x = torch.ones(2, dtype=dtype)
    assert result_type([x, other]) == torch.result_type(x, other)

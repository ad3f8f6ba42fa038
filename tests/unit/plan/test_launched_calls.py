"""Calls of operators that plans launch (`launch_directly`), with a C function made by ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from fusewright.interface import DevicePolicy, KernelCode, TensorSpec
from fusewright.plan.build import Plan
from fusewright.plan.execute import codegen
from fusewright.plan.ir import BINDS, Bound, Call, Ref
from fusewright.plan.memory import place

NEG, F32 = "aten::neg.default", torch.float32
VECTOR = TensorSpec((4,), (1,), F32)


@ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.POINTER(ctypes.c_int64), ctypes.c_int64)
def _negate_and_add(block: Any, workers: int) -> int:
    """Words: x, out, a length, a summand (none of which the operator has, so it shows who computed)."""
    if block[2] != 4:
        return 3
    x, out = (ctypes.cast(block[k], ctypes.POINTER(ctypes.c_float)) for k in (0, 1))
    summand = ctypes.c_double.from_buffer(ctypes.c_int64(block[3])).value
    for k in range(4):
        out[k] = summand - x[k]
    return 0


def _error(code: int, block: Sequence[int]) -> Exception:
    return ValueError(f"code {code}, length {block[2]}")


CODE = KernelCode(lambda *_: None, ctypes.cast(_negate_and_add, ctypes.c_void_p).value, _error)


@pytest.fixture(params=["native", "python"], autouse=True)
def _by_both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEWRIGHT_NATIVE", str(int(request.param == "native")))


def _loaded(monkeypatch: pytest.MonkeyPatch, length: int = 4, typed: bool = False) -> Any:
    """A plan of two launched calls: the first result is a temporary."""

    def bind(call: Call, specs: Mapping[int, TensorSpec]) -> Bound:
        (x,) = call.args
        return Bound(CODE, (x, Ref(call.outs[0]), length, 100.0), ((x, F32),) if typed else ())

    monkeypatch.setitem(BINDS, NEG, bind)
    calls = [Call(NEG, (Ref(1),), (2,)), Call(NEG, (Ref(2),), (3,))]
    policy = DevicePolicy(arena=64)
    plan = Plan((1,), (Ref(3),), calls, [], (), (), dict.fromkeys((1, 2, 3), VECTOR), policy=policy)
    assert place(plan).offset.keys() == {2}, "temporaries lie in the arena, results do not"
    return codegen.load(plan)


def test_the_function_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    run, x = _loaded(monkeypatch), torch.arange(4.0)
    (first,), (second,) = run([x]), run([x + 1])
    assert first.tolist() == [0, 1, 2, 3] and second.tolist() == [1, 2, 3, 4]


def test_a_tensor_of_another_type_is_left_to_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = _loaded(monkeypatch, typed=True)([torch.arange(4)])
    assert found.tolist() == [100, 101, 102, 103] and found.dtype is F32


def test_an_error_code_is_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="code 3, length 5"):
        _loaded(monkeypatch, length=5)([torch.arange(4.0)])

"""Run compiled programs: torch's memory passes in and out through DLPack, with one program per set of sizes and layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import torch

from fusewright.interface import HOST, Device, Region, TensorSpec, Value, hint
from fusewright_xla_cpu.emitter import emit
from fusewright_xla_cpu.target import COMPILER_OPTIONS, DTYPES

Order: TypeAlias = tuple[int, ...]
"""Dimensions from the slowest-varying in memory to the fastest."""


class Program:
    """A region as a callable from tensors of `Region.inputs` to fresh tensors of `Region.outputs`.

    Shapes, numbers (symbolic sizes) and the order of dimensions in memory are fixed in a program: each combination is compiled
    when first seen.
    """

    def __init__(self, region: Region) -> None:
        self.region = region
        self.wanted = [_wanted(v) for v in region.outputs]
        self._functions: dict[Any, tuple[Any, list[Exception]]] = {}

    def __call__(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        tensors = [_dense(x) for x in inputs if isinstance(x, torch.Tensor)]
        numbers = tuple(x for x in inputs if not isinstance(x, torch.Tensor))
        orders = tuple(_order(t.shape, t.stride()) for t in tensors)
        function, errors = self._function(tuple(t.shape for t in tensors), numbers, orders)
        with jax.enable_x64(True):
            arrays = [jax.dlpack.from_dlpack(t.permute(o)) for t, o in zip(tensors, orders, strict=True)]
            results, flags = jax.block_until_ready(function(*arrays))
            _raise_first(flags, errors)
        return self._owned(results, tensors)

    def refusal(self) -> str:
        """Return JAX's objection to a region of static sizes, or "". Torch traces some calls that no kernel accepts; eager raises
        their errors."""
        specs = [v.spec for v in self.region.inputs]
        if not all(s is not None and s.static for s in specs):
            return ""
        shapes = [tuple(map(hint, s.shape)) for s in specs if s is not None]
        orders = tuple(_order_of(s) for s in specs if s is not None)
        dtypes = [DTYPES[s.dtype] for s in specs if s is not None]
        function, _ = self._function(tuple(map(torch.Size, shapes)), (), orders)
        try:
            with jax.enable_x64(True):
                function.eval_shape(
                    *(
                        jax.ShapeDtypeStruct([n[d] for d in o], t)
                        for n, o, t in zip(shapes, orders, dtypes, strict=True)
                    )
                )
        except (TypeError, ValueError) as e:
            return str(e).partition("\n")[0]
        return ""

    def _function(
        self, shapes: tuple[torch.Size, ...], numbers: tuple[Any, ...], orders: tuple[Order, ...]
    ) -> tuple[Any, list[Exception]]:
        """Return the jitted function, and the errors that its flags stand for."""
        key = (shapes, numbers, tuple(map(type, numbers)), orders)
        if key not in self._functions:
            errors: list[Exception] = []
            traced = _traced(self.region, numbers, orders, self.wanted, errors)
            self._functions[key] = (jax.jit(traced, compiler_options=COMPILER_OPTIONS), errors)
        return self._functions[key]

    def _owned(self, results: Sequence[Any], inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return results as tensors without aliases: XLA may return the same buffer for two equal results."""
        taken = {t.data_ptr() for t in inputs}
        made = []
        for result, order, value in zip(results, self.wanted, self.region.outputs, strict=True):
            t = torch.from_dlpack(result)
            t = t.clone() if t.data_ptr() in taken else t
            taken.add(t.data_ptr())
            made.append(_strided(t.permute(_inverse(order)), value.spec))
        return tuple(made)


def _traced(
    region: Region, numbers: Sequence[Any], orders: Sequence[Order], wanted: Sequence[Order], errors: list[Exception]
) -> Callable[..., Any]:
    """Return the region as a JAX function of arrays that are dense in the order of their dimensions."""
    device = Device(HOST, "xla")

    def function(*arrays: Any) -> tuple[list[Any], list[Any]]:
        logical = iter([jnp.transpose(a, _inverse(o)) for a, o in zip(arrays, orders, strict=True)])
        scalars = iter(numbers)
        given = {v.id: next(scalars) if v.spec is None else next(logical) for v in region.inputs}
        outputs, checks = emit(region, given, device)
        errors[:] = [error for _, error in checks]
        return [jnp.transpose(x, o) for x, o in zip(outputs, wanted, strict=True)], [flag for flag, _ in checks]

    return function


def _raise_first(flags: Sequence[Any], errors: Sequence[Exception]) -> None:
    for flag, error in zip(flags, errors, strict=True):
        if bool(flag):
            raise type(error)(*error.args)


def _dense(t: torch.Tensor) -> torch.Tensor:
    """Return `t` detached, with memory that holds its values, dense in some order of its dimensions."""
    t = t.detach().resolve_neg().resolve_conj()
    return t if _is_dense(t.shape, t.stride()) else t.contiguous()


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    step = 1
    for n, s in sorted(((n, s) for n, s in zip(shape, stride, strict=True) if n != 1), key=lambda p: p[1]):
        if s != step:
            return False
        step *= n
    return True


def _order(shape: Sequence[int], stride: Sequence[int]) -> Order:
    """Return the memory order of dimensions. Those of size 1 keep their place, because their strides mean nothing."""
    moved = [d for d, n in enumerate(shape) if n != 1]
    ordered = iter(sorted(moved, key=lambda d: -stride[d]))
    return tuple(d if n == 1 else next(ordered) for d, n in enumerate(shape))


def _order_of(spec: TensorSpec) -> Order:
    """Return the order in which a tensor of static size is passed to a program."""
    shape, stride = ([hint(n) for n in numbers] for numbers in (spec.shape, spec.stride))
    return _order(shape, stride) if _is_dense(shape, stride) else tuple(range(len(shape)))


def _inverse(order: Order) -> Order:
    return tuple(order.index(d) for d in range(len(order)))


def _wanted(value: Value) -> Order:
    """Return the order of dimensions in eager's layout of a result."""
    spec = value.spec
    assert spec is not None
    return _order([hint(n) for n in spec.shape], [hint(s) for s in spec.stride])


def _strided(t: torch.Tensor, spec: TensorSpec | None) -> torch.Tensor:
    """Return `t` with eager's strides where no order of dense dimensions has them (overlaps or gaps)."""
    assert spec is not None
    if not t.numel():
        stride: Any = spec.stride
        return torch.empty_strided(t.shape, stride, dtype=t.dtype) if spec.static else torch.empty(t.shape, dtype=t.dtype)
    if not spec.static or t.stride() == spec.stride:
        return t
    steps = zip(t.shape, t.stride(), spec.stride, strict=True)
    if all(n == 1 or ours == theirs for n, ours, theirs in steps):
        return t
    shared = [d for d, (n, s) in enumerate(zip(t.shape, spec.stride, strict=True)) if s == 0 and n > 1]
    one = t
    for d in shared:
        one = one.narrow(d, 0, 1)
    out = torch.empty_strided(tuple(one.shape), spec.stride, dtype=t.dtype)  # type: ignore[arg-type]
    return out.copy_(one).expand(t.shape) if shared else out.copy_(one)

"""Sample calls of the opset's rows as graphs, with static and symbolic sizes, and calls of other sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fusewright import _torch_compat as compat
from fusewright import ops
from fusewright.conformance.ops.cases import DTYPES
from fusewright.conformance.ops.samples import ANY, FLOATS, Case, T
from fusewright.ops import Kind, Op, rules
from fusewright.ops.oracle import flat

UNDEFINED = {
    "empty": (0,),
    "empty_like": (0,),
    "empty_strided": (0,),
    "new_empty": (0,),
    "new_empty_strided": (0,),
    "log_sigmoid": (1,),
}
"""Outputs with undefined values, by row."""

Arguments = tuple[list[Any], dict[str, Any]]


def dtypes_of(op: Op) -> tuple[torch.dtype, ...]:
    """The dtypes that a row is tested with."""
    default = ANY if op.kind in (Kind.CREATION, Kind.RANDOM) else FLOATS
    return DTYPES.get(op.name, default)


def arguments(op: Op, case: Case, dtype: torch.dtype, seed: int = 0) -> Arguments:
    """The canonical arguments of a sample. NotFinite if the dtype cannot represent its values."""
    found = ops.canonical(op.target, *case.make(dtype, seed))
    assert found is not None and found[0] is op
    return list(found[1]), found[2]


def traced(op: Op, args: list[Any], kwargs: dict[str, Any], symbolic: bool) -> GraphModule:
    """The call as an ATen graph, whose inputs are the tensors of `args`. Results that are views are read by an op, because no
    backend lowers views alone."""

    def run(*tensors: torch.Tensor) -> list[Any]:
        outs = [o for o in flat(op.target(*with_tensors(args, iter(tensors)), **kwargs)) if o is not None]
        return [read(o) for o in outs] if op.kind is Kind.VIEW else outs

    tensors = list(rules.tensors(args))
    if symbolic:
        mode = compat.symbolic_mode()
        tensors = [mode.from_tensor(t) for t in tensors]
    found: GraphModule = make_fx(run, tracing_mode="symbolic" if symbolic else "fake")(*tensors)
    return found


def read(o: torch.Tensor) -> torch.Tensor:
    """Read a view, by one op on its elements."""
    if o.dtype.is_complex:
        return torch.ops.aten.view_as_real(o)
    return torch.ops.aten.logical_not(o) if o.dtype == torch.bool else torch.ops.aten.neg(o)


def with_tensors(args: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """`args` with its tensors replaced, in order."""
    if isinstance(args, list | tuple):
        return [with_tensors(a, tensors) for a in args]
    return next(tensors) if isinstance(args, torch.Tensor) else args


def mapped(args: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`args` with `change` applied to each tensor."""
    return with_tensors(args, iter([change(t) for t in rules.tensors(args)]))


def placed(t: torch.Tensor, device: Any) -> torch.Tensor:
    """Copy a tensor to a device, with the same values, strides and offset, in its own memory. RuntimeError if that is
    impossible, e.g. for a tensor packed by a library of the host."""
    if t.layout is not torch.strided:
        if torch.device(device).type != t.device.type:
            raise RuntimeError(f"{t.layout} is of the {t.device.type} alone")
        return t.clone()
    memory = torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.detach().untyped_storage())
    moved = memory.to(device, copy=True).untyped_storage()
    return torch.empty(0, dtype=t.dtype, device=device).set_(moved, t.storage_offset(), t.shape, t.stride())


def copied(t: torch.Tensor) -> torch.Tensor:
    """`placed` on the same device."""
    return placed(t, t.device)


def valid(op: Op, args: list[Any], kwargs: dict[str, Any]) -> bool:
    """Whether eager runs the call."""
    try:
        op.target(*args, **kwargs)
    except (RuntimeError, IndexError, NotImplementedError, ValueError):
        return False
    return True


def bad_values(op: Op, args: list[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the host's eager rejects the call for its tensors' values: an index that is too large, a source that is too
    short.

    A GPU's eager asserts on such values inside a kernel, after which the process cannot use the GPU any more.
    """
    try:
        op.target(*args, **kwargs)
    except NotImplementedError:
        return False
    except (RuntimeError, IndexError, ValueError) as e:
        return "not implemented" not in str(e)
    return False


# ---------------------------------------------------------------- other sizes


def guards(gm: GraphModule) -> Callable[[Sequence[torch.Tensor]], bool] | None:
    """Return a function that tells whether a traced graph is valid for other tensors; None for a graph of fixed sizes."""
    env = compat.shape_env_of(gm)
    fakes = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
    if env is None:
        return None
    return lambda tensors: compat.guards_hold(env, fakes, tensors)


def resized(case: Case, size: Callable[[int], int]) -> Case:
    """The case with `size` applied to every size; equal sizes stay equal."""

    def changed(x: Any) -> Any:
        if isinstance(x, list):
            return [changed(y) for y in x]
        if not isinstance(x, T) or x.values is not None:
            return x
        return replace(x, shape=tuple(map(size, x.shape)))

    return replace(case, args=tuple(map(changed, case.args)), kwargs={k: changed(v) for k, v in case.kwargs.items()})


def larger(case: Case) -> Case:
    """The case with every size above one increased by two."""
    return resized(case, lambda n: n + 2 if n > 1 else n)

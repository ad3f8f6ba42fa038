"""Operators: what their schemas, tags and namespaces tell, and torch's decompositions and samples of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusewright._torch_compat.runtime import several_processes


def bound_op(op: Any) -> Callable[..., Any]:
    """The C++ entry point of an OpOverload, which saves one Python frame per call."""
    return getattr(op, "_op", op)


def is_overload(target: object) -> bool:
    """Whether an FX target is an ATen-style operator overload."""
    return isinstance(target, torch._ops.OpOverload)


def is_higher_order(target: object) -> bool:
    """Whether an FX target is a higher-order operator (cond, while_loop, ...)."""
    return isinstance(target, torch._ops.HigherOrderOperator)


METADATA_OPS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "sym_size",
        "sym_stride",
        "sym_numel",
        "sym_storage_offset",
        "size",
        "stride",
        "numel",
        "dim",
        "is_contiguous",
    )
    if hasattr(getattr(torch.ops.aten, name, None), "default")
)
"""ATen overloads that only read metadata."""

_FROM_DATA = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


def depends_on_data(op: Any, args: Sequence[Any]) -> bool:
    """Whether a result's size, or a result that is a number, depends on the values of tensors."""
    if op is torch.ops.aten.index.Tensor:  # integer indices give a known number of elements, masks do not
        return any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return not _FROM_DATA.isdisjoint(op.tags)


def may_return_alias(op: Any) -> bool:
    """Whether a result of the operator may share memory with an argument.

    True if the schema says so, and for composite operators, whose schemas do not cover the operators that they call.
    """
    if any(r.alias_info is not None for r in op._schema.returns):
        return True
    return is_composite(op)


def is_composite(op: Any) -> bool:
    """Whether an operator only calls others, so that its schema does not describe their effects."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"))


def has_python_form(op: Any) -> bool:
    """Whether this torch has a Python form of a composite operator, which AOTAutograd traces."""
    import torch._decomp  # registers them

    return torch._C.DispatchKey.CompositeImplicitAutograd in op.py_kernels


def decomposition(target: Any) -> Callable[..., Any]:
    """Torch's decomposition of an ATen overload into simpler ones. LookupError if there is none."""
    from torch._decomp import decomposition_table

    if target not in decomposition_table:
        raise LookupError(f"torch has no decomposition of {target}")
    return decomposition_table[target]


def register_quantized_decomposed() -> None:
    """Define the `quantized_decomposed` ops, as importing torchao does."""
    import torch.ao.quantization.fx._decomposed  # noqa: F401


_NOT_ELEMENTWISE = frozenset(
    "copy_ set_ as_strided_ resize_ resize_as_ detach_ requires_grad_ t_ transpose_ unsqueeze_ squeeze_".split()
)
"""In-place ops that change more than values: their out-of-place form means something else."""


def out_of_place(op: Any) -> Any | None:
    """`aten.add.Tensor` for `aten.add_.Tensor`; None for other kinds of mutating ops (out=, copy_, set_, random ones)."""
    base, _, overload = op._schema.name.partition("::")[2], "", op._overloadname
    if op.namespace != "aten" or not base.endswith("_") or torch.Tag.nondeterministic_seeded in op.tags:
        return None
    if base in _NOT_ELEMENTWISE:
        return None
    packet = getattr(torch.ops.aten, base[:-1], None)
    names = [] if packet is None else sorted(packet.overloads(), key=lambda name: name != overload)
    # `pow_.Scalar` corresponds to `pow.Tensor_Scalar`: `pow.Scalar` has the same argument names, but a number as its base
    return next((f for f in (getattr(packet, n) for n in names) if _taken(f) == _taken(op)), None)


def _taken(op: Any) -> list[tuple[str, str]]:
    """Names and types of an operator's arguments."""
    return [(a.name, str(a.type)) for a in op._schema.arguments]


_COLLECTIVE = frozenset({
    "c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor",
})  # fmt: skip
"""Namespaces of operators for communication between processes."""

_LOCAL = frozenset({
    "aten", "prims", "prim", "quantized", "_quantized", "quantized_decomposed", "mkldnn", "mkldnn_prepacked", "mkl", "onednn",
    "inductor", "profiler", "rngprims", "debugprims", "torchvision", "torchaudio", "torchao", "cudnn", "sparse", "_test",
})  # fmt: skip
"""Namespaces of operators that do not communicate."""


def communicates(namespace: str, unknown: bool = True) -> bool:
    """Whether operators of a namespace may wait for other processes. Unknown ones may, unless there is only one process."""
    if namespace in _COLLECTIVE:
        return True
    return unknown and not only_computes(namespace) and several_processes()


def only_computes(namespace: str) -> bool:
    """Whether operators of a namespace are known to have no effect besides their results, writes and random numbers."""
    return namespace in _LOCAL or namespace.startswith("fusewright")


def op_database_lacks() -> str:
    """A package that torch's OpInfo database needs and that is not installed, or ""."""
    from importlib.util import find_spec

    return next((name for name in ("expecttest", "pytest") if find_spec(name) is None), "")


def op_database() -> Sequence[Any]:
    """Torch's OpInfo database: operators with samples, dtypes and errors, used for torch's own tests."""
    from torch.testing._internal.common_methods_invocations import op_db

    found: Sequence[Any] = op_db
    return found


def is_elementwise_entry(op: Any) -> bool:
    """Whether an entry of the database is an elementwise operator of one or two tensors."""
    from torch.testing._internal.common_methods_invocations import BinaryUfuncInfo, UnaryUfuncInfo

    return isinstance(op, UnaryUfuncInfo | BinaryUfuncInfo)

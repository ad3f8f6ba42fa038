"""What namespaces of operators tell of effects."""

from __future__ import annotations

from fusewright import machine

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
    return unknown and not only_computes(namespace) and machine.several_processes()


def only_computes(namespace: str) -> bool:
    """Whether operators of a namespace are known to have no effect besides their results, writes and random numbers."""
    return namespace in _LOCAL or namespace.startswith("fusewright")


def may_keep(namespace: str) -> bool:
    """Whether operators of a namespace may keep tensors that they are given, or return some that they keep, as tables."""
    return not only_computes(namespace) and namespace not in _COLLECTIVE

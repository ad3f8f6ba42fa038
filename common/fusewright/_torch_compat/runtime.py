"""The state of a running process: modes, autocast, profilers, storages, GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


def intercepted() -> bool:
    """Whether a mode sees every operator that runs now (a counter of flops, a tracer)."""
    return bool(torch._C._len_torch_dispatch_stack())


def dispatch_mode(handler: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> Any:
    """A context manager under which every ATen call goes through `handler(op, args, kwargs)`, below autograd and
    autocast.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return handler(func, args, kwargs or {})

    return Mode()


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """A context with torch's own operators, outside the caller's modes and dispatcher: with a FakeTensor, or by an operator's
    Python form, a view may exist that a real tensor of the same strides does not have."""
    from torch._dispatch.python import no_python_dispatcher
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), no_python_dispatcher():
        yield


def python_dispatcher() -> Any:
    """A context manager that selects torch's Python forms of operators, as in AOTAutograd's tracing."""
    from torch._dispatch.python import enable_python_dispatcher

    return enable_python_dispatcher()


def autocast_enabled() -> bool:
    """Whether autocast is on for any device type."""
    return bool(torch._C._is_any_autocast_enabled())


def disable_autocast() -> Any:
    """A context manager that switches autocast off for every device type."""
    return torch._C._DisableAutocast()


PROFILING = "_is_profiler_enabled"
"""The argument for `profiler_flag`'s result."""


def profiler_flag() -> Callable[[str], bool]:
    """Return a function that, given PROFILING, tells whether a profiler is active (`torch.profiler` or `emit_nvtx`). Plans call
    it at every call, so it is not Python code."""
    return vars(torch.autograd.profiler).__getitem__


def profiling() -> bool:
    """Whether a profiler is active."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def storage_id(t: torch.Tensor) -> int:
    """Identity of the memory behind a (fake) tensor: equal for a tensor and its views."""
    return int(t.untyped_storage()._cdata)


def storage_uses(storage: Any) -> int:
    """The reference count of a storage, including the given Python object."""
    return int(torch._C._storage_Use_Count(storage._cdata))


FROM_A_POINTER = ("cpu", "cuda")
"""Device types on which torch can wrap externally owned memory in a storage."""


def unowned(t: torch.Tensor) -> torch.Tensor:
    """A tensor that shares the memory of `t` without keeping it alive."""
    storage = t.untyped_storage()
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), t.device, storage.nbytes())
    empty = torch.empty(0, dtype=t.dtype, device=t.device)
    return empty.set_(memory, t.storage_offset(), t.shape, t.stride())


current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""The index of the current GPU, without a Python frame."""

current_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda k: torch.cuda.current_stream(k).cuda_stream
)
"""The handle of a GPU's current stream, by GPU index, without allocating an object."""

empty_strided_on_device: Callable[..., torch.Tensor] = getattr(
    torch._C._dynamo.guards, "_empty_strided_cuda", lambda n, s, dtype: torch.empty_strided(n, s, dtype=dtype, device="cuda")
)
"""Allocate sizes, strides and a dtype on the current GPU, without the dispatcher."""


def clear_workspaces() -> None:
    """Free the memory that torch keeps for cuBLAS or hipBLAS, as Inductor's graph trees do around each of their graphs."""
    torch._C._cuda_clearCublasWorkspaces()


def several_processes() -> bool:
    """Whether this process belongs to a group of several."""
    d = torch.distributed
    return d.is_available() and d.is_initialized() and d.get_world_size() > 1

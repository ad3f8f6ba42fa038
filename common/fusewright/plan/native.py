"""The optional extension `fusewright-native`: hot-path code in C++, each part faster than a single Python statement.

Every user has a Python version for when it is missing, and tests compare the two.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from fusewright import _torch_compat as compat
from fusewright.config import env_or_default
from fusewright.errors import without_memory

log = logging.getLogger("fusewright")

dispatch_mode = compat.dispatch_mode
"""For the traces of `call_cache`, which vendors make."""

_EXTENSION = "fusewright_native._core"
_INTERFACE = 4
"""The extension's version of what is used here."""
_REMEDY = "install a C++20 compiler (apt install g++) and then fusewright-native; until then Python does its part"


def extension() -> Any | None:
    """The extension; None if it is not installed or `FUSEWRIGHT_NATIVE=0`."""
    return _load()[0] if env_or_default("NATIVE") else None


def absent() -> str | None:
    """Why the extension is missing and how to get it; None if it is present."""
    return _load()[1] if env_or_default("NATIVE") else "FUSEWRIGHT_NATIVE=0 turns it off"


def device_launch(driver: LaunchFunctions, errors: int) -> Any | None:
    """A launcher that calls the driver as long as the word at `errors` (0: none) is 0; None without the extension. See `device.h`
    of the extension."""
    core = extension()
    return None if core is None else core.Device(driver, errors, _current_device(core), torch.uint8)


LaunchFunctions: TypeAlias = tuple[int, int, int, int, int, int, int, int]
"""Addresses of a driver's functions, of which the first launches a kernel. See `launch_queue.h` of the extension."""


class LaunchQueue(NamedTuple):
    """Between `open` and `close`, this thread's launches of device kernels are queued, and given to the driver a few at a time."""

    open: Callable[[], None]
    close: Callable[[], None]


def launch_queue() -> LaunchQueue | None:
    """None without the extension. See `launch_queue.h` of the extension."""
    core = extension()
    return None if core is None else LaunchQueue(core.open_queue, core.close_queue)


@dataclass(frozen=True)
class CopyNode:
    """A copy that a graph of the driver makes: its node (0: an empty tensor, nothing to copy), the node's parameters, and where in
    them the address lies that each call sets."""

    node: int
    parameters: bytes
    offset: int


@dataclass(frozen=True)
class KernelNode:
    """A kernel of a driver's graph that writes results of each call or takes numbers: its node; the node's parameters, and where in
    them the address of the array of arguments lies; the arguments' bytes, and where in these each begins. `patches`: where the
    arguments hold an address, which result it is in, and the distance from its start; numbers count behind the results."""

    node: int
    parameters: bytes
    pointer_at: int
    arguments: bytes
    places: tuple[int, ...]
    patches: tuple[tuple[int, int, int], ...]


WRITTEN = CopyNode(0, bytes(8), 0)
"""For a result that kernels write: there is nothing to copy."""


def graph_replay(
    graph: tuple[int, int, int, int, int], device: int, inputs: Mapping[int, CopyNode],
    results: Sequence[tuple[CopyNode, torch.Tensor]], kernels: Sequence[KernelNode] = (),
    numbers: Sequence[tuple[int, int]] = (),
) -> Callable[[list[Any]], list[torch.Tensor] | None] | None:  # fmt: skip
    """A call of an instantiated graph that takes a list of arguments, copies those at the positions `inputs`, and returns tensors
    like those in `results`, filled by the graph's copies or its `kernels`. `numbers` are the positions of arguments that kernels
    take, and the most that each may be. It does nothing and returns None if another device is current, a number is negative or
    larger, or an address is refused. `graph` holds the addresses of cuGraphLaunch, cuGraphExecMemcpyNodeSetParams and
    cuGraphExecKernelNodeSetParams, the graph and its context. None without the extension. See `replay.h` of the extension."""
    core = extension()
    if core is None:
        return None
    copied = [(k, astuple(c)) for k, c in inputs.items()]
    returned = [(astuple(c), tuple(t.shape), t.stride(), t.dtype) for c, t in results]
    made: Callable[[list[Any]], list[torch.Tensor] | None] = core.replay(
        graph, device, _current_device(core), copied, returned, list(numbers), list(map(astuple, kernels))
    )
    return made


def _current_device(core: Any) -> Any:
    """Torch's functions for the current GPU, as the extension takes them: see `current_device.h`."""
    return core.CurrentDevice(compat.current_device, compat.current_stream, compat.empty_strided_on_device)


def call_cache(
    run: Callable[..., Any], trace: Callable[..., Any], driver: LaunchFunctions, encode: int, at_once: bool = False
) -> Callable[..., Any] | None:
    """`run`, whose repeated calls skip Python: `trace` tells once for each layout of the arguments what a call does (with
    `dispatch_mode`), in the second call or `at_once`. `encode` is the address of cuTensorMapEncodeTiled (0: none). None without the
    extension. See `call_cache.h` of the extension."""
    core = extension()
    if core is None:
        return None
    made: Callable[..., Any] = core.call_cache(run, trace, driver, encode, _current_device(core), at_once)
    return made


def queues(function: Any) -> bool:
    """Whether all that a function puts on a device's stream goes through the launch queue."""
    core = extension()
    return core is not None and (isinstance(function, core.Call) or getattr(function, "queues", False))


@functools.cache
def _load() -> tuple[Any | None, str | None]:
    try:
        module = importlib.import_module(_EXTENSION)
        if getattr(module, "INTERFACE", 1) != _INTERFACE:
            raise ImportError("it is of another version")
        module.bind_tensors(torch.Tensor, torch.nn.Parameter, without_memory, compat.tensor_queries())
    except ModuleNotFoundError as e:
        if e.name not in (_EXTENSION, _EXTENSION.partition(".")[0]):
            raise
        return None, f"fusewright-native is not installed, or was without a C++ compiler; {_REMEDY}"
    except ImportError as e:
        reason = f"its extension does not load ({e}); {_REMEDY}"
        log.warning("fusewright: fusewright-native: %s", reason)
        return None, reason
    return module, None

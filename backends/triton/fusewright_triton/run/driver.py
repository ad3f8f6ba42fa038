"""Load and launch machine code through the GPU driver's own C interface, by ctypes.

This starts no compiler (Triton would build a C launcher per signature) and does not import Triton:
stored kernels run without it. CUDA: "CUDA Driver API", module and execution control. HIP: "HIP module API",
the same shape.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from fusewright.plan.native import LaunchFunctions

MAX_DYNAMIC_SHARED = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, and its HIP counterpart."""
DEFAULT_SHARED = 48 * 1024
"""Dynamic shared memory beyond this must be asked for."""
NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING, and its HIP counterpart."""
THREAD_LOCAL = 1
"""CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, and its HIP counterpart."""
RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED, and its HIP counterpart."""

DESCRIPTOR = 128
"""Size (bytes) of a tensor descriptor (CUtensorMap), which is aligned to 64 bytes."""
_ELEMENTS = {8: 10, 9: 8, 10: 9}
"""Types whose number in the compiler's metadata differs from the driver's."""
_L2_128_BYTES = 2
_NO_CONTEXT = 201
"""CUDA_ERROR_INVALID_CONTEXT."""


class DriverError(RuntimeError):
    """The driver refused; the message has its error code and text."""


class Driver:
    """The few driver functions that kernels need. Functions are handles (ints) of the current device."""

    def __init__(self, kind: Literal["cuda", "hip"]) -> None:
        self.kind = kind
        self.lib = ctypes.CDLL(_library(kind))
        found = (getattr(self.lib, name) for name in _NAMES[kind])
        self._load, self._function, self._launch, self._attribute, self._stream, self._mode, *self._capture = found
        uint, pointer = ctypes.c_uint, ctypes.c_void_p
        self._launch.argtypes = [pointer, *[uint] * 7, pointer, pointer, pointer]

    def load(self, code: bytes, name: str, shared: int) -> int:
        """Return the function `name` of a cubin or code object, for torch's current device."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        with self._relaxed():
            self.call(f"load {name}", self._load, ctypes.byref(module), code)
        self.call(f"find {name}", self._function, ctypes.byref(function), module, name.encode())
        if shared > DEFAULT_SHARED:
            self.call(f"give {name} {shared} bytes", self._attribute, function, MAX_DYNAMIC_SHARED, shared)
        return int(function.value or 0)

    @contextlib.contextmanager
    def _relaxed(self) -> Iterator[None]:
        """Allow this thread what may not be done while it captures: loading code."""
        mode = ctypes.c_int(RELAXED)
        self.call("change the mode of captures", self._mode, ctypes.byref(mode))  # and get the mode that there was
        try:
            yield
        finally:
            self._mode(ctypes.byref(mode))

    def describe(
        self, to: int, address: int, shape: Sequence[int], stride: Sequence[int], how: Mapping[str, Any]
    ) -> None:
        """Write to `to` the descriptor of a matrix of any rank, dense in its last dimension. `how` comes from the compiler: the
        block of one transfer, the swizzle and the type. Reads beyond the matrix give zeros."""
        element, sizes, steps, block, swizzle = encoding(shape, stride, how)
        rank = len(shape)
        wide, narrow = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
        self.call(
            f"describe {tuple(shape)} of strides {tuple(stride)} by {how}", self.lib.cuTensorMapEncodeTiled,
            ctypes.c_void_p(to), element, rank, ctypes.c_void_p(address), wide(*sizes), wide(*steps), narrow(*block),
            narrow(*[1] * rank), 0, swizzle, _L2_128_BYTES, 0,
        )  # fmt: skip

    def stream(self) -> int:
        """Create a stream of torch's current device that does not wait for the default one and that torch hands out to nobody.
        It is never destroyed: a later stream at its address would inherit what torch keeps under the old one."""
        made = ctypes.c_void_p()
        self.call("make a stream", self._stream, ctypes.byref(made), NON_BLOCKING)
        return int(made.value or 0)

    def restart_capture(self, stream: int) -> None:
        """End the capture on a stream, whatever its state, and begin an empty one in this thread."""
        graph = ctypes.c_void_p()
        self._capture[0](ctypes.c_void_p(stream), ctypes.byref(graph))  # returns an error if the capture is broken
        if graph.value:
            self._capture[1](graph)
        self.call("begin a capture", self._capture[2], ctypes.c_void_p(stream), THREAD_LOCAL)

    def launcher(self) -> Callable[..., int]:
        """Return `f(function, gx, gy, gz, bx, by, bz, shared, stream, params, None)`; 0 is success, else `relaunch` says why."""
        launch: Callable[..., int] = self._launch
        return launch

    def launch_functions(self) -> LaunchFunctions:
        """Return the addresses of the functions that launch kernels, for callers that do without ctypes."""
        launch = ctypes.cast(self._launch, ctypes.c_void_p).value or 0
        queue = _QUEUE if self.kind == "cuda" and all(hasattr(self.lib, name) for name in _QUEUE) else ()
        first, *others = (launch, *map(self.address, queue), *[0] * (len(_QUEUE) - len(queue)))
        return first, *others  # type: ignore[return-value]  # eight of them

    def encode_address(self) -> int:
        """Return the address of the function that `describe` calls; 0 where there are no descriptors."""
        return self.address("cuTensorMapEncodeTiled") if self.kind == "cuda" else 0

    def address(self, name: str) -> int:
        """Return the address of one of the driver's functions."""
        return ctypes.cast(getattr(self.lib, name), ctypes.c_void_p).value or 0

    def relaunch(self, name: str, *arguments: Any) -> None:
        """Retry a launch that failed. Raise `DriverError` when it fails again."""
        self.call(f"launch {name}", self._launch, *arguments)

    def call(self, what: str, function: Callable[..., int], *arguments: Any) -> None:
        """Call a function of the driver. Raise `DriverError` when it refuses.

        A new thread, or autograd's own, that torch's allocator has served from cached memory has no context yet: it
        gets that of torch's current device.
        """
        code = function(*arguments)
        if code == _NO_CONTEXT and self.kind == "cuda":
            self._enter_context()
            code = function(*arguments)
        self._check(code, what)

    def _enter_context(self) -> None:
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._check(self.lib.cuDeviceGet(ctypes.byref(device), torch.cuda.current_device()), "find the device")
        self._check(self.lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "find its context")
        self._check(self.lib.cuCtxSetCurrent(context), "enter its context")

    def _check(self, code: int, what: str) -> None:
        if code:
            raise self.error(code, what)

    def error(self, code: int, what: str) -> DriverError:
        """Return an error with the driver's text for a code."""
        text: Any = ctypes.c_char_p()
        if self.kind == "cuda":
            self.lib.cuGetErrorString(code, ctypes.byref(text))
            words = text.value
        else:
            self.lib.hipGetErrorString.restype = ctypes.c_char_p
            words = self.lib.hipGetErrorString(code)
        return DriverError(f"cannot {what}: {(words or b'unknown').decode()} ({code})")


def encoding(
    shape: Sequence[int], stride: Sequence[int], how: Mapping[str, Any]
) -> tuple[int, list[int], list[int], list[int], int]:
    """Return a descriptor's type, sizes, strides in bytes (all but the first), block and swizzle, the innermost dimension first."""
    steps = [s * how["elem_size"] for s in reversed(stride[:-1])]
    element = _ELEMENTS.get(how["elem_type"], how["elem_type"])
    return element, list(reversed(shape)), steps, list(reversed(how["block_size"])), how["swizzle"]


_QUEUE = (
    "cuCtxGetCurrent", "cuStreamIsCapturing", "cuGraphCreate", "cuGraphAddKernelNode_v2", "cuGraphInstantiateWithFlags",
    "cuGraphExecKernelNodeSetParams_v2", "cuGraphLaunch",
)  # fmt: skip
"""Functions of graphs that launches in a row are made of (CUDA 12). HIP's have other structures."""

_NAMES = {
    "cuda": (
        "cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel", "cuFuncSetAttribute", "cuStreamCreate",
        "cuThreadExchangeStreamCaptureMode", "cuStreamEndCapture", "cuGraphDestroy", "cuStreamBeginCapture_v2",
    ),
    "hip": (
        "hipModuleLoadData", "hipModuleGetFunction", "hipModuleLaunchKernel", "hipFuncSetAttribute", "hipStreamCreateWithFlags",
        "hipThreadExchangeStreamCaptureMode", "hipStreamEndCapture", "hipGraphDestroy", "hipStreamBeginCapture",
    ),
}  # fmt: skip


def _library(kind: str) -> str:
    windows = sys.platform == "win32"
    if kind == "cuda":
        return "nvcuda.dll" if windows else "libcuda.so.1"
    return "amdhip64.dll" if windows else "libamdhip64.so"


@functools.cache
def driver(kind: Literal["cuda", "hip"]) -> Driver:
    """Return the driver of this process. Raise OSError when it is not installed."""
    return Driver(kind)

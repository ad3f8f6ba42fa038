"""Record the work of a stream on its own private side stream, and in memory that stays.

cuBLAS and hipBLAS use workspaces that torch keeps for each pair of a handle and a stream. A recording holds a workspace's address
but does not own it: code that clears these workspaces (`torch.compile(mode="reduce-overhead")` does, before and after each of its
own graphs) frees the memory, and the next replay would write into memory of others, or into none. So workspaces come from a pool of
this module, for a private stream: memory returned to that pool is reused only by recordings of the same stream,
which run one after the other.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from fusewright_triton.run.driver import driver


class Pool:
    """The memory of everything that is recorded together. It is freed with its last graph, and so is its handle."""

    def __init__(self) -> None:
        self.graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._handle: Any = None

    def handle(self) -> Any:
        if not self.graphs:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle


class SideStream:
    """What recordings of one stream of the current device share. They run in order, and nothing in the pool is needed after
    the work that follows a replay on its stream."""

    def __init__(self, device: int) -> None:
        self.pool = Pool()
        self._driver = driver("cuda" if torch.version.hip is None else "hip")
        self.side = torch.cuda.ExternalStream(self._driver.stream(), device=device)
        self._workspaces = torch.cuda.MemPool()
        self._device = device
        self._turn = threading.RLock()

    @contextlib.contextmanager
    def beside(self, current: torch.cuda.Stream) -> Iterator[None]:
        """Enter the side stream after the work of the current one, which then waits for it. Threads take turns: work that another
        thread starts there would become part of the recording."""
        with self._turn:
            self.side.wait_stream(current)
            try:
                with torch.cuda.stream(self.side):
                    self._take_workspaces()
                    yield
            finally:  # what failed has queued work that reads memory, which the current stream is about to reuse
                current.wait_stream(self.side)

    @contextlib.contextmanager
    def capturing(self, graph: torch.cuda.CUDAGraph, **how: Any) -> Iterator[None]:
        """Capture into `graph` on the side stream. Torch cleans up its part of a capture (its generator, its allocator) only if
        the driver's part ends well, so a broken capture is first replaced by an empty one."""
        graph.capture_begin(capture_error_mode="thread_local", **how)  # other threads may go on allocating and synchronizing
        try:
            yield
            graph.capture_end()
        except BaseException:  # an interrupt too must not leave the stream capturing
            with contextlib.suppress(RuntimeError), warnings.catch_warnings(action="ignore"):  # the original error is raised
                self._driver.restart_capture(self.side.cuda_stream)
                graph.capture_end()
            raise

    def _take_workspaces(self) -> None:
        """Make the libraries request their workspaces: by a product, and by one with a bias, which has its own workspace."""
        with torch.cuda.use_mem_pool(self._workspaces, self._device), torch.autocast("cuda", enabled=False):
            x = torch.zeros(16, 16, dtype=torch.bfloat16, device=self.side.device)
            torch.addmm(x[0], torch.mm(x, x), x)


_sides: dict[tuple[int, int], SideStream] = {}
_creation = threading.Lock()


def side_of(current: torch.cuda.Stream) -> SideStream:
    """Return the side stream that records the work of a stream of the current device."""
    key = (current.device_index, current.cuda_stream)
    with _creation:
        if key not in _sides:
            _sides[key] = SideStream(current.device_index)
        return _sides[key]

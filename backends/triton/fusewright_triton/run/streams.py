"""Where the work of a stream is recorded: on a stream beside it that nobody else has, and in memory that stays.

cuBLAS and hipBLAS work in memory that torch keeps for each pair of a handle and a stream, and a recording holds its address. It is
outside of the recording: whoever clears these workspaces (`torch.compile(mode="reduce-overhead")` does, before and after each graph
of its own) gives the memory back, and the next replay would write into somebody else's, or into none. So they are taken from
a pool of this module's, for a stream of its own: what is given back to that pool is handed out to recordings of the same stream
alone, which run one after the other.
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
    """The memory of everything that is recorded together. It goes with its last graph, and so does its handle."""

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
        """The side stream, after the work of the current one, which then waits for it. Threads take turns: what another one
        began there would become a part of what is being recorded."""
        with self._turn:
            self.side.wait_stream(current)
            with torch.cuda.stream(self.side):
                self._take_workspaces()
                yield
            current.wait_stream(self.side)

    @contextlib.contextmanager
    def capturing(self, graph: torch.cuda.CUDAGraph, **how: Any) -> Iterator[None]:
        """Captures into `graph` on the side stream. Torch ends its own part of a capture (its generator, its allocator) only where
        the driver's part ends well, so a broken one is first replaced by an empty one."""
        graph.capture_begin(capture_error_mode="thread_local", **how)  # other threads may go on allocating and waiting
        try:
            yield
            graph.capture_end()
        except BaseException:  # an interrupt too must not leave the stream capturing
            with contextlib.suppress(RuntimeError), warnings.catch_warnings(action="ignore"):  # what broke it is raised
                self._driver.restart_capture(self.side.cuda_stream)
                graph.capture_end()
            raise

    def _take_workspaces(self) -> None:
        """Has the libraries ask for their memory: by a product, and one with a bias, which has a workspace of its own."""
        with torch.cuda.use_mem_pool(self._workspaces, self._device), torch.autocast("cuda", enabled=False):
            x = torch.zeros(16, 16, dtype=torch.bfloat16, device=self.side.device)
            torch.addmm(x[0], torch.mm(x, x), x)


_sides: dict[tuple[int, int], SideStream] = {}
_creation = threading.Lock()


def side_of(current: torch.cuda.Stream) -> SideStream:
    """Where the work of a stream of the current device is recorded."""
    key = (current.device_index, current.cuda_stream)
    with _creation:
        if key not in _sides:
            _sides[key] = SideStream(current.device_index)
        return _sides[key]

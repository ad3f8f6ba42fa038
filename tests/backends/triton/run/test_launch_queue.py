"""Launches that are queued and given to the driver as graphs, by a driver that only records."""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusewright.plan import native
from fusewright.toolkit.ir import Builder, symbol
from fusewright_triton.emit.schedule import Config, Tile
from fusewright_triton.run.launch import GpuLauncher
from tests.backends.triton.run import test_launch
from tests.backends.triton.run.test_launch import launcher

WORD, COUNT, VOID, INT = ctypes.c_void_p, ctypes.c_uint, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int
TYPES = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_double, ctypes.c_int32, ctypes.c_uint64]
FEWEST, LONGEST, SEEN = 4, 8, 8
"""Of `launch_queue.cpp`: launches in a graph, and how often the same kernels come before they get one."""


NUMBERS = itertools.count(1)
"""Of functions: graphs are known by them in the whole process."""


class Node(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS."""

    _fields_ = (
        ("function", WORD), ("blocks", COUNT * 3), ("threads", COUNT * 3), ("shared", COUNT), ("parameters", VOID),
        ("extra", WORD), ("kernel", WORD), ("context", WORD),
    )  # fmt: skip


class Recorder(test_launch.Recorder):
    """A driver that also has graphs: chains of kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.types = TYPES
        self.graphs: list[dict[int, Any]] = []
        self.runs = 0
        self.capturing, self.context, self.refuses_graphs = 0, 1, 0

    def load(self, code: bytes, name: str, shared: int) -> int:
        return next(NUMBERS)

    def launch_functions(self) -> native.LaunchFunctions:
        made: list[tuple[Any, list[Any]]] = [
            (self.current, [VOID]), (self.captures, [WORD, ctypes.POINTER(INT)]), (self.create, [VOID, COUNT]),
            (self.add, [VOID, WORD, VOID, ctypes.c_size_t, ctypes.POINTER(Node)]),
            (self.instantiate, [VOID, WORD, ctypes.c_ulonglong]), (self.set, [WORD, WORD, ctypes.POINTER(Node)]),
            (self.run, [WORD, WORD]),
        ]  # fmt: skip
        self._functions = [ctypes.CFUNCTYPE(INT, *types)(f) for f, types in made]
        first, *_ = super().launch_functions()
        addresses = [ctypes.cast(f, WORD).value or 0 for f in self._functions]
        return (first, *addresses)  # type: ignore[return-value]

    def current(self, to: Any) -> int:
        to[0] = self.context
        return 0

    def captures(self, stream: int | None, to: Any) -> int:
        to[0] = self.capturing
        return 0

    def create(self, to: Any, flags: int) -> int:
        self.graphs.append({})
        to[0] = len(self.graphs)
        return 0

    def add(self, to: Any, graph: int, after: Any, count: int, how: Any) -> int:
        nodes = self.graphs[graph - 1]
        assert [after[k] for k in range(count)] == list(nodes)[-1:], "each kernel waits for the one before"
        to[0] = 1000 * graph + len(nodes)
        nodes[to[0]] = self.read(how[0])
        return self.refuses_graphs

    def instantiate(self, to: Any, graph: int, flags: int) -> int:
        to[0] = graph
        return 0

    def set(self, graph: int, node: int, how: Any) -> int:
        self.graphs[graph - 1][node] = self.read(how[0])
        return 0

    def run(self, graph: int, stream: int | None) -> int:
        self.runs += 1
        self.launches += [(*how, stream, values) for *how, values in self.graphs[graph - 1].values()]
        return 0

    def read(self, how: Node) -> tuple[Any, ...]:
        """The arguments, which the driver copies at once."""
        values = [t.from_address(how.parameters[k]).value for k, t in enumerate(self.types)]
        return how.function, how.blocks[0], how.threads[0], how.shared, values


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    if native.absent():
        pytest.skip(f"no extension, runs with fusewright-native built: {native.absent()}")
    monkeypatch.setattr(test_launch, "Recorder", Recorder)
    request: Any = type("Request", (), {"param": "native"})
    found: Recorder = test_launch.recorder.__wrapped__(monkeypatch, request)  # type: ignore[attr-defined]
    return found


@pytest.fixture
def queue(recorder: Recorder) -> native.LaunchQueue:
    found = native.launch_queue()
    assert found is not None
    return found


def scale() -> GpuLauncher:
    """Return a kernel whose second launch is by address."""
    n = symbol("n")
    b = Builder("scale", p=[n], symbols={"n": 1000})
    x, out, a = b.input("x", "f32"), b.output("out", "f32"), b.scalar("alpha", "f64")
    (i,) = b.axes
    b.store(out, i, b.load(x, i) * a.to("f32"))
    return launcher(b.build(), Config((Tile((0,), 128),), 0, False, 1, 4))


def chain(run: GpuLauncher, sizes: list[int], alpha: float) -> list[tuple[Any, ...]]:
    """Launch once for each size, and return what the driver has to get."""
    wanted = []
    for n in sizes:
        data = torch.zeros(n), torch.zeros(n)
        run(data, (n,), (alpha,))
        function = run._free[-1, False, True, False][0].functions[0][0]
        values = [data[0].data_ptr(), data[1].data_ptr(), alpha, n, 0]
        wanted.append((function, -(-n // 128), 128, 64, 77, values))
    return wanted


def learned(recorder: Recorder, sizes: list[int]) -> GpuLauncher:
    run = scale()
    chain(run, sizes, 0.5)
    recorder.launches.clear()
    recorder.by_address = 0
    return run


@pytest.mark.parametrize("count", [2, FEWEST, LONGEST, LONGEST + 1, 2 * LONGEST + FEWEST])
def test_queued_launches_come_in_order_with_their_arguments(recorder: Recorder, queue: native.LaunchQueue, count: int) -> None:
    sizes = [128 * k + 1 for k in range(count)]
    run = learned(recorder, sizes)
    for turn in range(3 * SEEN):
        queue.open()
        wanted = chain(run, sizes, turn / 4)
        queue.close()
        assert recorder.launches == wanted
        recorder.launches.clear()
    before = recorder.by_address, recorder.runs
    queue.open()
    chain(run, sizes, 2.0)
    queue.close()
    left = count % LONGEST
    alone = left if left < FEWEST else 0
    graphs = count // LONGEST + (left >= FEWEST)
    assert (recorder.by_address - before[0], recorder.runs - before[1]) == (alone, graphs)


def test_nothing_is_queued_before_open_or_after_close(recorder: Recorder, queue: native.LaunchQueue) -> None:
    run = learned(recorder, [5])
    wanted = chain(run, [5], 1.0)
    assert recorder.launches == wanted
    queue.open()
    later = chain(run, [5, 5], 2.0)
    assert recorder.launches == wanted, "the driver has none of them yet"
    queue.close()
    wanted += later + chain(run, [5], 3.0)
    assert recorder.launches == wanted


def test_memory_is_kept_until_it_is_used(recorder: Recorder, queue: native.LaunchQueue) -> None:
    run = learned(recorder, [5])
    data = torch.zeros(5), torch.zeros(5)
    storages = [weakref.ref(t) for t in data]
    queue.open()
    run(data, (5,), (1.0,))
    del data
    assert all(s() is not None for s in storages)
    queue.close()
    assert all(s() is None for s in storages)


def test_large_memory_is_not_kept(recorder: Recorder, queue: native.LaunchQueue) -> None:
    many = (9 << 20) + 1  # 72 MiB, and not even, as the others
    run = learned(recorder, [5, many])
    queue.open()
    wanted = chain(run, [5, many], 1.0)
    assert recorder.launches == wanted
    later = chain(run, [5], 1.0)
    assert recorder.launches == wanted, "the queue is still open"
    queue.close()
    assert recorder.launches == wanted + later


@pytest.mark.parametrize("why", ["capturing", "context"])
def test_captures_and_threads_without_a_context_do_not_wait(recorder: Recorder, queue: native.LaunchQueue, why: str) -> None:
    run = learned(recorder, [5])
    setattr(recorder, why, int(why == "capturing"))
    queue.open()
    wanted = chain(run, [5, 5], 1.0)
    assert recorder.launches == wanted
    queue.close()


def test_what_python_launches_comes_after_the_queue(recorder: Recorder, queue: native.LaunchQueue) -> None:
    run, other = learned(recorder, [5]), scale()
    queue.open()
    wanted = chain(run, [5, 5], 1.0) + chain(other, [5], 2.0) + chain(run, [5], 3.0)
    queue.close()
    assert recorder.launches == wanted
    recorder.launches.clear()
    queue.open()
    wanted = chain(run, [5, 5], 1.0) + chain(run, [700], 2.0)  # a size that the extension has to learn
    queue.close()
    assert recorder.launches == wanted


def test_a_graph_that_is_refused_is_launched_kernel_by_kernel(recorder: Recorder, queue: native.LaunchQueue) -> None:
    sizes = [5, 6, 7, 8]
    run = learned(recorder, sizes)
    recorder.refuses_graphs = 1
    for _ in range(3 * SEEN):
        recorder.launches.clear()
        queue.open()
        wanted = chain(run, sizes, 1.0)
        queue.close()
        assert recorder.launches == wanted
    assert len(recorder.graphs) == 1, "the driver is asked once"


def test_a_launch_that_is_refused_is_an_error_and_leaves_an_empty_queue(recorder: Recorder, queue: native.LaunchQueue) -> None:
    run = learned(recorder, [5])
    queue.open()
    chain(run, [5, 5], 1.0)
    recorder.result = 700
    with pytest.raises(RuntimeError, match="error 700"):
        queue.close()
    recorder.result = 0
    recorder.launches.clear()
    queue.close()
    assert not recorder.launches


def test_each_thread_has_its_own_queue(recorder: Recorder, queue: native.LaunchQueue) -> None:
    run = learned(recorder, [5])
    queue.open()
    mine = chain(run, [5, 5], 1.0)
    theirs: list[Any] = []
    other = threading.Thread(target=lambda: theirs.extend(chain(run, [5, 5], 2.0)))
    other.start()
    other.join()
    assert recorder.launches == theirs
    queue.close()
    assert recorder.launches == theirs + mine


def test_graphs_of_other_kernels_are_told_apart(recorder: Recorder, queue: native.LaunchQueue) -> None:
    one, two = learned(recorder, [5]), learned(recorder, [5])
    calls: list[Callable[[], list[tuple[Any, ...]]]] = [
        lambda: chain(one, [5, 5], 1.0) + chain(two, [5, 5], 2.0),
        lambda: chain(two, [5, 5], 3.0) + chain(one, [5, 5, 5], 4.0),
    ]
    for _ in range(3 * SEEN):
        for call in calls:
            recorder.launches.clear()
            queue.open()
            wanted = call()
            queue.close()
            assert recorder.launches == wanted

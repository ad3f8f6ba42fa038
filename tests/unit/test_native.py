"""The native extension against its Python replacement."""

from __future__ import annotations

import contextlib
import ctypes
import struct
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fusewright import _torch_compat
from fusewright.cache.tune import Tuner
from fusewright.errors import FreedStorageError
from fusewright.plan import native
from fusewright.plan.execute import codegen
from fusewright.plan.execute.prepare import PreparedCache, Samples, watch

KERNEL = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)


@pytest.fixture(params=["python", "native"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with the extension and without."""
    by_native = request.param == "native"
    if by_native and native.absent():
        pytest.skip(f"no extension, runs with fusewright-native built: {native.absent()}")
    monkeypatch.setenv("FUSEWRIGHT_NATIVE", str(int(by_native)))
    assert (native.extension() is not None) == by_native
    return str(request.param)


@pytest.fixture
def core() -> Any:
    if native.absent():
        pytest.skip(f"no extension, runs with fusewright-native built: {native.absent()}")
    return native.extension()


def _moved(w: torch.Tensor) -> None:
    w.data = w.data.clone()


@pytest.mark.skipif(sys.platform != "linux", reason="Python answers elsewhere; runs on Linux, whose C++ names are known")
@pytest.mark.parametrize("around", [contextlib.nullcontext, torch.inference_mode, FakeTensorMode, lambda: torch.device("meta")])
def test_torchs_own_queries_are_found_whatever_mode_is_on(around: Any) -> None:
    with around():
        assert all(_torch_compat.tensor_queries())


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "in place": lambda w: w.add_(1),
    "elsewhere": _moved,
    "filled with what it holds": lambda w: w.copy_(w.clone()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_watch_sees_what_torch_counts(either: str, change: str) -> None:
    weights = [torch.randn(3, 3), torch.nn.Parameter(torch.randn(5)), torch.randn(0)]
    same = watch(weights)
    assert same(weights) and same(tuple(weights)) and same(weights)
    with torch.no_grad():
        CHANGES[change](weights[1])
    assert not same(weights)


def test_a_watch_sees_other_tensors_and_another_number_of_them(either: str) -> None:
    weights = [torch.randn(3), torch.randn(3)]
    same = watch(weights)
    assert not same(weights[::-1]) and not same(weights[:1]) and not same([*weights, weights[0]])
    assert not same([weights[0], weights[1].view(3)]), "another object with the same memory"


def test_a_tensor_without_versions_is_an_error_and_its_constants_are_not_kept(either: str) -> None:
    """The process ended: torch's exception met another unwinder."""
    with torch.inference_mode():
        w = torch.ones(3)
    with pytest.raises(RuntimeError, match="do not track version"):
        watch([w])
    cache = PreparedCache(lambda w: (w * 2,))
    assert cache(w)[0].tolist() == [2.0] * 3
    with torch.inference_mode():
        w.mul_(5)
    assert cache(w)[0].tolist() == [10.0] * 3


def test_a_watch_of_nothing_sees_something_else(either: str) -> None:
    same = watch([])
    assert same([]) and same(()) and not same([torch.ones(1)])


def test_a_watch_holds_no_tensor(either: str) -> None:
    w = torch.randn(3)
    same, other = watch([w]), torch.randn(3)
    torch.utils.swap_tensors(w, other)  # it refuses tensors with other references
    assert not same([w])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex128])
def test_samples_see_writes_that_torch_does_not_count(either: str, dtype: torch.dtype) -> None:
    w = torch.ones(64, dtype=dtype)
    samples = Samples([w, torch.ones(0, dtype=dtype)])
    assert samples.unchanged()
    w.detach().view(torch.uint8).numpy()[-1] ^= 1
    assert not samples.unchanged()
    w.detach().view(torch.uint8).numpy()[-1] ^= 1
    assert samples.unchanged()


def test_constants_die_with_their_weights(either: str) -> None:
    made: list[torch.Tensor] = []

    def prepare(w: torch.Tensor) -> tuple[torch.Tensor]:
        made.append(w * 2)
        return (made[-1],)

    cache, weights = PreparedCache(prepare), [torch.randn(4) for _ in range(3)]
    for _ in range(2):
        for w in weights:
            assert torch.equal(cache(w)[0], w * 2)
    assert cache.runs == 3
    cache(weights[0])
    while weights:
        weights.pop()
    del w
    assert not cache._entries and not cache._last


def test_a_launch_fills_the_block_and_calls_the_kernel(core: Any) -> None:
    seen: list[tuple[list[int], int]] = []

    def kernel(block: int, workers: int) -> int:
        seen.append((list((ctypes.c_int64 * 4).from_address(block)), workers))
        return 40 + workers

    entry = KERNEL(kernel)
    run = core.launch(ctypes.cast(entry, ctypes.c_void_p).value, [2, 0])
    block, t = (ctypes.c_int64 * 4)(7, 7, 7, 7), torch.randn(3)
    assert run(ctypes.addressof(block), 2, t[1:], -5) == 42
    assert seen == [([-5, 7, t.data_ptr() + 4, 7], 2)]
    assert run(ctypes.addressof(block), 1, torch.empty(0), True) == 41
    assert seen[1][0] == [1, 7, 0, 7], "an empty tensor has no address"


def test_a_launch_refuses_what_it_cannot_pass(core: Any) -> None:
    run = core.launch(0, [0])
    block = (ctypes.c_int64 * 1)()
    freed = torch.randn(4)
    freed.untyped_storage().resize_(0)
    with pytest.raises(FreedStorageError):
        run(ctypes.addressof(block), 1, freed)
    for wrong in (
        (),
        (ctypes.addressof(block), 1),
        (ctypes.addressof(block), 1, 0.5),
        (ctypes.addressof(block), 1, "x"),
    ):
        with pytest.raises(TypeError):
            run(*wrong)
    with pytest.raises(TypeError, match="keyword"):
        run(block=1)


def test_wrong_arguments_of_watches_are_type_errors(core: Any) -> None:
    for wrong in (3, [3], ["x"]):
        with pytest.raises(TypeError):
            core.watch(wrong)
    with pytest.raises(TypeError):
        core.watch([torch.ones(1)])(3)
    with pytest.raises(ValueError, match="1, 2, 4 or 8"):
        core.words([(0, 3)])


def _program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.softmax(torch.nn.functional.gelu(x @ w), -1)
    return (y - y.mean(0)).cumsum(-1) * x.sum()


@pytest.mark.parametrize("dynamic", [False, True])
def test_plans_give_the_same_and_are_shown_the_same(dynamic: bool, monkeypatch: pytest.MonkeyPatch, core: Any) -> None:
    pytest.importorskip("fusewright_onednn", reason="the backend x86_onednn is not installed")
    shown: list[str] = []
    load = codegen.load

    def noting(*args: Any, **kwargs: Any) -> Any:
        shown.append(codegen.to_text(*args[:2]))
        return load(*args, **kwargs)

    monkeypatch.setattr(codegen, "load", noting)
    monkeypatch.setattr(Tuner, "choose", lambda self, key, candidates: next(iter(candidates)))  # two measurements may differ
    torch.manual_seed(0)
    w, inputs = torch.randn(33, 17), [torch.randn(n, 33) for n in (5, 5, 9, 1)]
    results = []
    left_behind = pytest.importorskip("fusewright_cpu.onednn.left_behind", reason="fusewright-cpu is not installed")
    for value in ("0", "1"):
        left_behind.SHAPES.clear()  # shapes of the first of the two, which may be collected at any time
        monkeypatch.setenv("FUSEWRIGHT_NATIVE", value)
        torch.compiler.reset()
        run = torch.compile(_program, backend="x86_onednn", dynamic=dynamic, options={"cache": False})
        with torch.no_grad():
            results.append([run(x, w).clone() for x in inputs])
        shown.append("next")
    torch.compiler.reset()
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    middle = shown.index("next")
    assert shown[:middle] == shown[middle + 1 : -1]


# ---------------------------------------------------------------- replay with copies


class FakeGraph:
    """A driver with one graph of copies of 16 bytes of parameters each, source and target, and of kernels that store a word at two
    addresses. It runs in this process's memory."""

    def __init__(self) -> None:
        self.nodes: dict[int, tuple[int, int, int]] = {}
        self.stores: dict[int, tuple[int, ...]] = {}
        self.updates, self.refused = 0, 0
        self.memory: list[torch.Tensor] = []

        def update(graph: int, node: int, parameters: int, context: int) -> int:
            source, target = struct.unpack("QQ", ctypes.string_at(parameters, 16))
            self.updates += 1
            if not self.refused:
                self.nodes[node] = (source, target, self.nodes[node][2])
            return self.refused

        def update_kernel(graph: int, node: int, parameters: int) -> int:
            array = (ctypes.c_void_p * 3).from_address(ctypes.c_uint64.from_address(parameters + 8).value)
            assert not (array[0] or 0) % 64, "descriptors are aligned"
            self.updates += 1
            if not self.refused:
                self.stores[node] = tuple(ctypes.c_int64.from_address(a or 0).value for a in array)
            return self.refused

        def launch(graph: int, stream: int) -> int:
            for source, target, count in self.nodes.values():
                ctypes.memmove(target, source, count)
            for word, *targets in self.stores.values():
                for target in targets:
                    ctypes.c_int64.from_address(target).value = word
            return 0 if (graph, stream) == (5, 77) else 700

        self.kept = [
            ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * count)(f)
            for f, count in ((launch, 2), (update, 4), (update_kernel, 3))
        ]
        launch_at, copy_at, kernel_at = (ctypes.cast(f, ctypes.c_void_p).value or 0 for f in self.kept)
        self.handles = (launch_at, copy_at, kernel_at, 5, 6)

    def copy(self, inner: torch.Tensor, outer: int) -> native.CopyNode:
        """A node in which each call sets the source (outer = 0) or the target (8)."""
        pair = (0, inner.data_ptr()) if outer == 0 else (inner.data_ptr(), 0)
        node = len(self.nodes) + 1
        self.memory.append(inner)
        self.nodes[node] = (*pair, inner.numel() * inner.element_size())
        return native.CopyNode(node, struct.pack("QQ", *pair), outer)


@pytest.fixture
def graph(core: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    made, device, streams = FakeGraph(), [0], {0: 77}
    monkeypatch.setattr(_torch_compat, "current_device", lambda: device[0])
    monkeypatch.setattr(_torch_compat, "current_stream", lambda index: streams[index])
    monkeypatch.setattr(
        _torch_compat, "empty_strided_on_device", lambda n, s, dtype: torch.empty_strided(n, s, dtype=dtype).fill_(7)
    )
    return SimpleNamespace(driver=made, device=device, streams=streams)


def replay_of_a_copy(graph: Any, buffer: torch.Tensor) -> Any:
    """A graph that copies argument 1 into `buffer`, and that into fresh memory."""
    inputs = {1: graph.driver.copy(buffer, 0)}
    run = native.graph_replay(graph.driver.handles, 0, inputs, [(graph.driver.copy(buffer, 8), buffer)])
    assert run is not None
    return run


def test_a_replay_copies_inputs_and_returns_fresh_results(graph: Any) -> None:
    x, y = torch.randn(3, 4).t(), torch.randn(3, 4).t()
    run = replay_of_a_copy(graph, torch.zeros(3, 4).t())
    (one,), (two,) = run([None, x]), run([None, y])
    assert torch.equal(one, x) and torch.equal(two, y) and one.stride() == x.stride()
    assert one.data_ptr() != two.data_ptr()


def test_an_address_is_set_only_when_it_changes(graph: Any) -> None:
    x, run = torch.randn(5), replay_of_a_copy(graph, torch.zeros(5))
    held = [run([None, x]) for _ in range(3)]
    assert graph.driver.updates == 4 and all(torch.equal(r, x) for (r,) in held)  # the source once, each result


def test_an_empty_tensor_needs_no_node(graph: Any) -> None:
    none = native.CopyNode(0, bytes(16), 8)
    run = native.graph_replay(graph.driver.handles, 0, {}, [(none, torch.empty(0, 3))])
    assert run is not None and [r.shape for r in run([]) or ()] == [(0, 3)] and not graph.driver.updates


def storing(word: int, *patches: tuple[int, int, int]) -> native.KernelNode:
    """A kernel that stores `word` where its second and its third argument say, 64 bytes apart."""
    arguments = struct.pack("q56xq56xq", word, 0, 0)
    return native.KernelNode(9, bytes(24), 8, arguments, (0, 64, 128), patches)


def test_kernels_write_results_where_each_call_allocates_them(graph: Any) -> None:
    """The second word of the first result, and the only one of the second."""
    results = [(native.WRITTEN, torch.empty(n, dtype=torch.int64)) for n in (2, 1)]
    run = native.graph_replay(graph.driver.handles, 0, {}, results, [storing(41, (64, 0, 8), (128, 1, 0))])
    assert run is not None
    held = [run([]) or [] for _ in range(3)]
    assert [[t.tolist() for t in r] for r in held] == [[[7, 41], [41]]] * 3 and graph.driver.updates == 3
    graph.driver.refused = 1
    assert run([]) is None
    graph.driver.refused = 0
    assert [t.tolist() for t in run([]) or ()] == [[7, 41], [41]]  # refused arguments are given again


def test_kernels_take_a_number_of_each_call(graph: Any) -> None:
    """The word that is stored, which is argument 1."""
    results, kernel = [(native.WRITTEN, torch.empty(1, dtype=torch.int64))], storing(0, (0, 1, 0), (64, 0, 0), (128, 0, 0))
    run = native.graph_replay(graph.driver.handles, 0, {}, results, [kernel], [(1, 50)])
    assert run is not None
    assert [t.tolist() for n in (3, 50, 0) for t in run([None, n]) or ()] == [[3], [50], [0]]
    before = graph.driver.updates
    assert [run([None, n]) for n in (51, -1, 1 << 70, 3.0, None)] == [None] * 5 and graph.driver.updates == before
    with pytest.raises(IndexError, match="no argument 1"):
        run([None])


def test_a_graph_that_others_launch_only_gets_its_numbers(graph: Any) -> None:
    _, *others = graph.driver.handles
    run = native.graph_replay((0, *others), 0, {}, [], [storing(0, (0, 0, 0))], [(0, 50)])
    assert run is not None and run([7]) == [] and graph.driver.stores[9][0] == 7


@pytest.mark.parametrize("wrong", [(132, 0, 0), (64, 1, 0)], ids=["beyond the arguments", "of no result"])
def test_a_patch_outside_is_refused(graph: Any, wrong: tuple[int, int, int]) -> None:
    with pytest.raises(IndexError):
        native.graph_replay(graph.driver.handles, 0, {}, [(native.WRITTEN, torch.empty(2))], [storing(1, wrong)])


def test_a_replay_does_nothing_on_another_device_or_with_a_refused_address(graph: Any) -> None:
    x, run = torch.ones(3), replay_of_a_copy(graph, torch.zeros(3))
    graph.device[0] = 1
    assert run([None, x]) is None
    graph.device[0], graph.driver.refused = 0, 1
    assert run([None, x]) is None
    graph.driver.refused = 0
    assert torch.equal(run([None, x])[0], x)  # a refused address is set again


def test_bad_arguments_and_failed_launches_raise(graph: Any) -> None:
    run = replay_of_a_copy(graph, torch.zeros(3))
    for wrong, error in (((), TypeError), ([1, 2], TypeError), ([torch.ones(3)], IndexError)):
        with pytest.raises(error):
            run(wrong)
    graph.streams[0] = 5
    with pytest.raises(RuntimeError, match="refuses to launch a graph: error 700"):
        run([None, torch.ones(3)])
    with pytest.raises(IndexError, match="no address lies there"):
        native.graph_replay(graph.driver.handles, 0, {0: native.CopyNode(1, bytes(8), 4)}, [])

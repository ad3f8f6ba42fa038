"""The arguments that a launch passes to the GPU driver, seen by a driver that only records them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusewright import _torch_compat, machine
from fusewright.errors import FreedStorageError
from fusewright.interface import Number
from fusewright.plan import native
from fusewright.toolkit.ir import Builder, Kernel, symbol
from fusewright_triton import target
from fusewright_triton.build.binaries import Binary, Built, Variant
from fusewright_triton.emit.emitter import emit
from fusewright_triton.emit.schedule import Config, Tile
from fusewright_triton.run import graph_kernels, launch
from fusewright_triton.run.driver import Driver, DriverError
from fusewright_triton.run.graph_kernels import MOST_NUMBER
from fusewright_triton.run.launch import GpuLauncher, raise_errors
from tests.backends.triton.kernels import column_sum, embedding

H100 = target.NVIDIA["sm_90"]


class Recorder:
    """A driver whose functions are numbers; it records launches with the values of their arguments."""

    def __init__(self) -> None:
        self.types: list[Any] = []
        self.launches: list[tuple[Any, ...]] = []
        self.result = 0
        self.by_address = 0

    def load(self, code: bytes, name: str, shared: int) -> int:
        return int(code)

    def launcher(self) -> Any:
        return self.launch

    def launch(self, function: int, gx: int, gy: int, gz: int, threads: int, *rest: Any) -> int:
        params = rest[4]
        values = [t.from_address(params[k]).value for k, t in enumerate(self.types)]
        self.launches.append((function, gx, threads, rest[2], rest[3], values))
        return self.result

    def launch_functions(self) -> native.LaunchFunctions:
        """Return the address of a C function that records as `launch` does, and counts its calls."""

        def by_address(function: int, *rest: Any) -> int:
            self.by_address += 1
            return self.launch(function, *rest[:8], (ctypes.c_void_p * len(self.types)).from_address(rest[8]), None)

        self._kept = PROTOTYPE(by_address)
        return ctypes.cast(self._kept, ctypes.c_void_p).value or 0, 0, 0, 0, 0, 0, 0, 0

    def relaunch(self, name: str, *arguments: Any) -> None:
        raise RuntimeError(f"cannot launch {name}: {self.launch(*arguments)}")


PROTOTYPE = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
)
"""The signature of cuLaunchKernel and hipModuleLaunchKernel."""


@pytest.fixture(params=["python", "native"])
def recorder(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Recorder:
    """Return a recording driver, for launches by Python and by the extension, which gets tuples as in plans."""
    if request.param == "native" and native.absent():
        pytest.skip(f"no extension, runs with fusewright-native built: {native.absent()}")
    monkeypatch.setenv("FUSEWRIGHT_NATIVE", str(int(request.param == "native")))
    found = Recorder()
    word = ctypes.c_int32(0)
    errors = launch.Errors.__new__(launch.Errors)
    errors.word, errors.address = word, ctypes.addressof(word)
    monkeypatch.setattr(launch, "driver", lambda kind: found)
    monkeypatch.setattr(launch, "errors", lambda: errors)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(_torch_compat, "current_device", lambda: -1)
    for module in (_torch_compat, machine):
        monkeypatch.setattr(module, "current_stream", lambda index: 77)
    stream = SimpleNamespace(cuda_stream=77, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    return found


def launcher(kernel: Kernel, config: Config, asked: list[Variant] | None = None) -> GpuLauncher:
    def variant(v: Variant) -> Built:
        if asked is not None:
            asked.append(v)
        source = emit(kernel, config, v.wide)
        binaries = [Binary(f.name, str(k + 1).encode(), 64, 128) for k, f in enumerate(source.functions)]
        return Built(kernel, config, source, binaries)

    return GpuLauncher(kernel, H100, variant)


def copying() -> GpuLauncher:
    """Return a launcher of a kernel that copies bytes."""
    n = symbol("n")
    b = Builder("copy", p=[n], symbols={"n": 1024})
    x, out = b.input("x", "i8"), b.output("out", "i8")
    (i,) = b.axes
    b.store(out, i, b.load(x, i))
    return launcher(b.build(), Config((Tile((0,), 128),), 0, False, 1, 4))


def test_addresses_scalars_and_sizes_go_in_order(recorder: Recorder) -> None:
    n = symbol("n")
    b = Builder("scale", p=[n], symbols={"n": 1000})
    x, out, a = b.input("x", "f32"), b.output("out", "f32"), b.scalar("alpha", "f64")
    (i,) = b.axes
    b.store(out, i, b.load(x, i) * a.to("f32"))
    run = launcher(b.build(), Config((Tile((0,), 128),), 0, False, 1, 4))
    recorder.types = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_double, ctypes.c_int32, ctypes.c_uint64]
    for rows in (1000, 129):
        data = [torch.randn(rows), torch.empty(rows)]
        run(data, [rows], [0.1])
        want = [data[0].data_ptr(), data[1].data_ptr(), 0.1, rows, 0]
        assert recorder.launches.pop() == (1, -(-rows // 128), 128, 64, 77, want)
    run([torch.empty(0), torch.empty(0)], [0], [0.1])
    assert not recorder.launches, "nothing to do"


def test_what_was_launched_once_is_launched_by_address(recorder: Recorder) -> None:
    n = symbol("n")
    b = Builder("scale", p=[n], symbols={"n": 1000})
    x, out, a = b.input("x", "f32"), b.output("out", "f32"), b.scalar("alpha", "f32")
    (i,) = b.axes
    b.store(out, i, b.load(x, i) * a)
    run = launcher(b.build(), Config((Tile((0,), 128),), 0, False, 1, 4))
    recorder.types = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_float, ctypes.c_int32, ctypes.c_uint64]
    data = torch.randn(1001), torch.empty(1001)
    by_native = native.extension() is not None
    calls = [(data, 1000, 0.5), (data, 1000, -2.0), (data, 129, 0.5), ((data[0][1:], data[1]), 129, 1.0), (data, 129, 0.25)]
    for at, (tensors, rows, alpha) in enumerate(calls):
        run(tensors, (rows,), (alpha,))
        want = [*(t.data_ptr() for t in tensors), alpha, rows, 0]
        assert recorder.launches.pop() == (1, -(-rows // 128), 128, 64, 77, want)
        assert recorder.by_address == (by_native and (0, 1, 2, 2, 3)[at]), "code for other alignments is learned first"
    run((torch.empty(0), torch.empty(0)), (0,), (0.1,))
    run((torch.empty(0), torch.empty(0)), (0,), (0.1,))
    assert not recorder.launches, "nothing to do"


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=st.tuples(*[st.integers(16, 70)] * 2), sizes=st.lists(st.tuples(*[st.integers(0, 3000)] * 2), max_size=8))
def test_how_many_programs_run_is_computed_for_any_sizes(
    recorder: Recorder, first: tuple[int, int], sizes: list[tuple[int, int]]
) -> None:
    """Rows that are read with gaps; code is learned by the first calls of each kind."""
    m, n = symbol("m"), symbol("n")
    b = Builder("join", p=[m + 2 * n, n], symbols={"m": 30, "n": 40})
    x, out = b.input("x", "f32"), b.output("out", "f32")
    i, j = b.axes
    b.store(out, i * n + j, b.load(x, i * (2 * n) + j))
    run = launcher(b.build(), Config((Tile((1,), 32),), 0, False, 1, 4))
    recorder.types, recorder.launches = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32, ctypes.c_int32, ctypes.c_uint64], []
    data = torch.empty(4), torch.empty(4)
    for pair in (first, (16, 32), (17, 32)):
        run(data, pair, ())
    recorder.launches.clear()
    recorder.by_address = 0
    for pair in sizes:
        run(data, pair, ())
        programs = (pair[0] + 2 * pair[1]) * -(-pair[1] // 32)
        assert [(gx, values[2:4]) for _, gx, *_, values in recorder.launches] == [(programs, list(pair))] * bool(programs)
        recorder.launches.clear()
    launched = sum(pair[1] > 0 for pair in sizes)
    assert recorder.by_address == (launched if native.extension() is not None else 0)


def test_what_indices_are_subtracted_from_is_left_to_python(recorder: Recorder) -> None:
    """A bound at large sizes says nothing of smaller ones then."""
    n = symbol("n")
    b = Builder("flip", p=[n], symbols={"n": 1000})
    x, out = b.input("x", "f32"), b.output("out", "f32")
    (i,) = b.axes
    b.store(out, i, b.load(x, i * -1 + (n - 1)))
    run = launcher(b.build(), Config((Tile((0,), 128),), 0, False, 1, 4))
    recorder.types = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32, ctypes.c_uint64]
    for rows in (1001, 1003, 1003):
        run((torch.empty(4), torch.empty(4)), (rows,), ())
    assert recorder.by_address == (native.extension() is not None)


@pytest.mark.parametrize("before", [0, 8], ids=["the element", "an element before it"])
def test_every_position_of_a_long_sequence_is_learned(recorder: Recorder, before: int) -> None:
    p = symbol("p")
    b = Builder("write", p=[64], symbols={"p": 1000})
    x, out = b.input("x", "f32"), b.output("out", "f32")
    (i,) = b.axes
    b.store(out, i + p * 64, b.load(x, i - before))
    run = launcher(b.build(), Config((Tile((0,), 64),), 0, False, 1, 4))
    recorder.types = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32, ctypes.c_uint64]
    data = torch.randn(64), torch.empty(64)
    for fewest in (1190, 1200):
        recorder.by_address = 0
        for position in range(1200):
            run(data, (position,), ())
            assert recorder.launches.pop()[-1][2] == position
        assert recorder.by_address >= (fewest if native.extension() is not None else 0)


@pytest.mark.parametrize(
    ("place", "most"),
    [
        (lambda i, p: i + p, (1 << 24) - 1),
        (lambda i, p: i + p * 64, (1 << 24) - 1),
        (lambda i, p: i + p * 4096, (1 << 16) - 1),
        (lambda i, p: i + p * (1 << 20), MOST_NUMBER),  # offsets of 64 bits
        (lambda i, p: i + (p * p), MOST_NUMBER),
        (lambda i, p: i * p, MOST_NUMBER),
    ],
    ids=["a value", "a row", "a long row", "a matrix", "a square", "a stride"],
)
def test_a_number_of_a_recording_is_noted(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, place: Callable[[Any, Any], Any], most: int
) -> None:
    """Whatever it is now: other code runs where all sizes are multiples of 16."""
    noted: list[Any] = []
    monkeypatch.setattr(graph_kernels, "note", lambda numbers, most: noted.append((numbers, most)))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    p, asked = symbol("p"), list[Variant]()
    b = Builder("write", p=[64], symbols={"p": 1000})
    x, out = b.input("x", "f32"), b.output("out", "f32")
    (i,) = b.axes
    b.store(out, place(i, p), b.load(x, i))
    run = launcher(b.build(), Config((Tile((0,), 64),), 0, False, 1, 4), asked)
    wide = most == MOST_NUMBER
    recorder.types = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64 if wide else ctypes.c_int32, ctypes.c_uint64]
    data = torch.randn(64), torch.empty(64)
    for position in (32, 33):
        run(data, (Number(position),), ())
        assert recorder.launches.pop()[-1][2] == position
    assert noted == [({2: 32}, most), ({2: 33}, most)] and not recorder.by_address
    assert {(v.wide, v.even) for v in asked} == {(wide, False)}


def test_a_number_that_programs_depend_on_is_not_for_a_recording(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[Any] = []
    monkeypatch.setattr(graph_kernels, "note", lambda numbers, most: noted.append(most))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    run = copying()
    recorder.types = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32, ctypes.c_uint64]
    run((torch.empty(100, dtype=torch.int8), torch.empty(100, dtype=torch.int8)), (Number(100),), ())
    assert noted == [-1]


def test_a_launch_by_address_that_is_refused_goes_on_in_python(recorder: Recorder) -> None:
    run = copying()
    data = (torch.zeros(256, dtype=torch.int8),) * 2
    run(data, (256,))
    recorder.result = 1
    with pytest.raises(RuntimeError, match="launch copy"):
        run(data, (256,))
    recorder.result = 0
    run(data, (256,))
    freed = torch.zeros(256, dtype=torch.int8)
    freed.untyped_storage().resize_(0)
    with pytest.raises(FreedStorageError):
        run((freed, data[0]), (256,))


def test_errors_stop_a_launch_by_address(recorder: Recorder) -> None:
    run = launcher(embedding(5, 8, 10), Config((Tile((0, 1), 64),), 0, False, 1, 4))
    data = (torch.zeros(5, dtype=torch.int64), torch.zeros(10, 8).bfloat16(), torch.zeros(5, 8).bfloat16())
    recorder.types = [ctypes.c_uint64] * 4
    run(data)
    run(data)
    assert recorder.by_address == (native.extension() is not None)
    assert recorder.launches[0] == recorder.launches[1] and recorder.launches[0][-1][3] == launch.errors().address
    launch.errors().word.value = launch.INDEX_ERROR
    with pytest.raises(IndexError):
        run(data)
    assert len(recorder.launches) == 2


def test_variants_follow_the_arguments(recorder: Recorder) -> None:
    n = symbol("n")
    b = Builder("copy", p=[n], symbols={"n": 1024})
    x, out = b.input("x", "i8"), b.output("out", "i8")
    (i,) = b.axes
    b.store(out, i, b.load(x, i))
    asked: list[Variant] = []
    run = launcher(b.build(), Config((Tile((0,), 128),), 0, False, 1, 4), asked)
    data = torch.zeros(2048, dtype=torch.int8)
    run([data, data], [1024])
    run([data, data], [1024])
    run([data, data], [1000])
    run([data[1:], data], [1000])
    run([data, data], [2**31])
    assert list(dict.fromkeys(asked)) == [
        Variant(even=True), Variant(), Variant(aligned=False), Variant(wide=True, even=True),
    ]  # fmt: skip


def test_shared_rows_get_a_workspace_that_fits(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    k = column_sum(1000, 70)
    run = launcher(k, Config((Tile((0,), 32),), 64, False, 4, 4))
    real, sizes = torch.empty, []
    monkeypatch.setattr(torch, "empty", lambda n, dtype, device: sizes.append((n, device)) or real(n, dtype=dtype))
    recorder.types = [ctypes.c_uint64] * 3
    x, out = torch.zeros(1000, 70), torch.zeros(70)
    run([x, out])
    assert sizes == [(1280, x.device)], "70 sums of 4 parts, to a multiple of 256 bytes"
    (first, grid_1, *_, values_1), (second, grid_2, *_, values_2) = recorder.launches
    assert (first, grid_1, second, grid_2) == (1, 12, 2, 3)
    assert values_1 == values_2
    assert values_1[:2] == [x.data_ptr(), out.data_ptr()]


def test_a_workspace_beyond_32_bits_has_wide_offsets(recorder: Recorder) -> None:
    """Its parts are a multiple of the rows, of which there may be many more than when the rows were split."""
    n, m = symbol("n"), symbol("m")
    b = Builder("sums", p=[n], r=[m], symbols={"n": 8, "m": 1 << 20})
    x, out = b.input("x", "f32"), b.output("out", "f32")
    i, j = b.axes
    b.store(out, i, b.reduce("sum", b.load(x, i * m + j)))
    run = launcher(b.build(), Config((Tile((0,), 1),), 1024, False, 64, 4))
    assert [run._from_sizes((rows, 4)).wide for rows in (1 << 20, 1 << 26)] == [False, True]


def test_shared_rows_are_launched_by_address_with_a_workspace_too(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    spaces: list[torch.Tensor] = []

    def empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        spaces.append(torch.empty_strided(size, stride, dtype=dtype))
        return spaces[-1]

    monkeypatch.setattr(_torch_compat, "empty_strided_on_device", empty)
    run = launcher(column_sum(1000, 70), Config((Tile((0,), 32),), 64, False, 4, 4))
    recorder.types = [ctypes.c_uint64] * 5
    data = torch.zeros(1000, 70), torch.zeros(70)
    run(data)
    by_python = recorder.launches[:2]
    run(data)
    by_native = native.extension() is not None
    assert [s.numel() for s in spaces] == [1280] * by_native and recorder.by_address == 2 * by_native
    for now, before in zip(recorder.launches[2:], by_python, strict=True):
        assert now[:-1] == before[:-1] and now[-1][:2] == before[-1][:2] and now[-1][3:] == before[-1][3:]
        assert not by_native or now[-1][2] == spaces[0].data_ptr()
    launches, recorder.result = len(recorder.launches), 1
    with pytest.raises(RuntimeError, match="launch column_sum"):
        run(data)
    again = [at[0] for at in recorder.launches[launches:]]
    assert again == ([1, 1, 1] if by_native else [1, 1]), "the first function once more: it fills Python's workspace"


def test_errors_are_raised_by_the_next_launch_and_once(recorder: Recorder) -> None:
    run = launcher(embedding(5, 8, 10), Config((Tile((0, 1), 64),), 0, False, 1, 4))
    data = [torch.zeros(5, dtype=torch.int64), torch.zeros(10, 8).bfloat16(), torch.zeros(5, 8).bfloat16()]
    run(data)
    launch.errors().word.value = launch.INDEX_ERROR
    with pytest.raises(IndexError):
        run(data)
    run(data)
    launch.errors().word.value = launch.INDEX_ERROR
    with pytest.raises(IndexError):
        raise_errors()
    raise_errors()


def test_a_refused_launch_says_which(recorder: Recorder) -> None:
    k = column_sum(64, 70)
    recorder.result = 1
    with pytest.raises(RuntimeError, match="launch column_sum"):
        launcher(k, Config((Tile((0,), 32),), 64, True, 1, 4))([torch.zeros(64, 70), torch.zeros(70)])


class NoContextYet:
    """CUDA's driver in a thread that has not used it yet."""

    def __init__(self, device: int) -> None:
        self.device, self.entered, self.launched = device, 0, 0
        self.hipGetErrorString = lambda code: b"no context"

    def cuDeviceGet(self, found: Any, ordinal: int) -> int:
        assert ordinal == self.device
        return 0

    def cuDevicePrimaryCtxRetain(self, found: Any, device: Any) -> int:
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.entered += 1
        return 0

    def cuLaunchKernel(self, *arguments: Any) -> int:
        self.launched += self.entered
        return 0 if self.entered else 201


@pytest.mark.parametrize("kind", ["cuda", "hip"])
def test_a_thread_without_a_context_enters_the_devices(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    d = Driver.__new__(Driver)
    d.kind, d.lib = kind, NoContextYet(3)
    d._launch = d.lib.cuLaunchKernel
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    if kind == "cuda":
        d.relaunch("scale", 1, 2)
        d.relaunch("scale", 1, 2)
        assert (d.lib.entered, d.lib.launched) == (1, 2)
    else:
        with pytest.raises(DriverError, match="cannot launch scale: no context"):
            d.relaunch("scale", 1, 2)

"""Repeated calls of handwritten operators: C++ gives the driver what Python would give it. The driver here only records."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright import _torch_compat, machine
from fusewright.errors import FreedStorageError
from fusewright.plan import native
from fusewright_triton import target
from fusewright_triton.build.binaries import Binary
from fusewright_triton.run import call_cache, handwritten
from fusewright_triton.run.driver import Driver
from fusewright_triton.run.handwritten import Kernel, Library, TensorDescriptor

H100 = target.NVIDIA["sm_90"]
KERNEL = Kernel("product", "product")
U64, I64, I32, F32 = ctypes.c_uint64, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
PARAMETERS = [U64, I32, I32, I64, I64, U64, U64, F32, I32, U64, U64]
"""Of `scaled`: a descriptor with sizes and strides, two addresses, two numbers, two addresses of scratch memory."""
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p], *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3)
ENCODE = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, *[ctypes.c_void_p] * 5, *[ctypes.c_int] * 4
)


class Recorder:
    """The driver's functions, for Python and by address. A descriptor's first word is the address that it describes."""

    describe: Any = Driver.describe
    call = Driver.call

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.described: list[tuple[Any, ...]] = []
        self.refuses = False
        self._launch, self._encode = LAUNCH(self.launched), ENCODE(self.encoded)
        self.lib = type("Lib", (), {"cuTensorMapEncodeTiled": self._encode})

    def launched(self, function: int, blocks: int, *rest: Any) -> int:
        params = (ctypes.c_void_p * len(PARAMETERS)).from_address(rest[7])
        values = [t.from_address(p).value for t, p in zip(PARAMETERS, params, strict=True)]
        assert (params[0] or 0) % 64 == 0, "descriptors are aligned"
        if not self.refuses:
            self.launches.append((function, blocks, *rest[:7], values))
        return int(self.refuses)

    def encoded(self, to: int, type: int, rank: int, address: int, *rest: Any) -> int:
        kinds = ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32
        lengths = rank, rank - 1, rank, rank
        words = [list((k * n).from_address(at)) for k, n, at in zip(kinds, lengths, rest, strict=False)]
        self.described.append((type, rank, address, words, rest[4:]))
        ctypes.c_uint64.from_address(to).value = address
        return 0

    def load(self, *_: Any) -> int:
        return 5

    def launcher(self) -> Any:
        return self._launch

    def relaunch(self, name: str, *_: Any) -> None:
        raise RuntimeError(f"cannot launch {name}")

    def launch_functions(self) -> native.LaunchFunctions:
        return ctypes.cast(self._launch, ctypes.c_void_p).value or 0, 0, 0, 0, 0, 0, 0, 0

    def encode_address(self) -> int:
        return ctypes.cast(self._encode, ctypes.c_void_p).value or 0

    def _check(self, code: int, what: str) -> None:
        assert not code, what


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Make CPU tensors count as those of the current GPU, with a driver that records."""
    if native.absent():
        pytest.skip(f"no extension, runs with fusewright-native built: {native.absent()}")
    found, code = Recorder(), Future[Binary]()
    code.set_result(Binary("k", b"", 99, 128, descriptors=({"block_size": [4, 8], "elem_type": 9, "elem_size": 2, "swizzle": 3},)))
    for module in (handwritten, call_cache):
        monkeypatch.setattr(module, "driver", lambda kind: found)
    monkeypatch.setattr(Library, "ask", lambda self, order: code)
    monkeypatch.setattr(handwritten, "_bound", {})
    monkeypatch.setattr(handwritten, "_loaded", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(_torch_compat, "current_device", lambda: -1)
    for module in (_torch_compat, machine):
        monkeypatch.setattr(module, "current_stream", lambda index: 77)
    monkeypatch.setattr(_torch_compat, "empty_strided_on_device", lambda n, s, dtype: torch.empty_strided(n, s, dtype=dtype))
    return found


class Scaled:
    """An operator that allocates a result and scratch memory and launches one kernel; it counts its runs in Python."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, x: Tensor, scale: Tensor | None, factor: float, name: str, stride: Any = (), more: bool = False) -> Tensor:
        self.runs += 1
        rows = x.reshape(-1, x.shape[-1])
        if name == "copied":
            rows = rows.clone()
        out = torch.empty((*x.shape[:-1], 3), dtype=torch.float32)
        args = (TensorDescriptor(rows, (4, 8)), out if scale is None else scale, out, factor, rows.shape[0] + 6)
        KERNEL._run(H100, rows.shape[0], args, {"BM": 16}, {"num_warps": 4})
        return out


def given(rows: int = 5, columns: int = 16) -> tuple[Tensor, Tensor]:
    return torch.zeros(2, rows, columns, dtype=torch.bfloat16), torch.zeros(3)


def test_from_the_third_call_on_python_does_not_run(driver: Recorder) -> None:
    run = Scaled()
    fast = call_cache.cached(run)
    kept: list[Any] = []
    for k in range(5):
        x, scale = given()
        kept.append((x, scale, fast(x, scale, 0.5, "a", stride=[3, 1])))
        assert run.runs == min(k + 1, 2)
        out = kept[-1][2]
        assert out.shape == (2, 5, 3) and out.dtype == torch.float32
        values = [x.data_ptr(), 10, 16, 16, 1, scale.data_ptr(), out.data_ptr(), 0.5, 16, 0, 0]
        assert driver.launches.pop() == (5, 10, 1, 1, 128, 1, 1, 99, 77, values)
        encoded = driver.described.pop()
        assert encoded == (8, 2, x.data_ptr(), [[16, 10], [32], [8, 4], [1, 1]], (0, 3, 2, 0))
    x, scale, _ = kept[-1]
    fast(x, scale, 0.5, "a", stride=[3, 1])
    assert not driver.described, "a matrix that is described already"


class Told(Scaled):
    """The same, which tells what it allocates."""

    def __call__(self, x: Tensor, scale: Tensor, factor: float) -> Tensor:  # type: ignore[override]
        self.runs += 1
        rows = call_cache.same(x.reshape(-1, x.shape[-1]), x)
        out = call_cache.allocated(torch.empty((*x.shape[:-1], 3), dtype=torch.float32))
        KERNEL._run(H100, rows.shape[0], (TensorDescriptor(rows, (4, 8)), scale, out, factor, 16), {"BM": 16}, {"num_warps": 4})
        return out


def test_what_tells_its_allocations_runs_in_python_once(driver: Recorder) -> None:
    run = Told()
    fast = call_cache.cached(run, told=True)
    for rows in (5, 6):
        run.runs = 0
        for _ in range(3):
            x, scale = given(rows)
            out = fast(x, scale, 0.5)
            assert run.runs == 1
            values = driver.launches.pop()[-1]
            assert (values[0], values[5], values[6]) == (x.data_ptr(), scale.data_ptr(), out.data_ptr())
            assert out.shape == (2, rows, 3)


CHANGES: dict[str, Callable[[Tensor, Tensor], tuple[Any, ...]]] = {
    "shape": lambda x, s: (x[:, :4].contiguous(), s, 0.5, "a"),
    "strides": lambda x, s: (torch.zeros(2, 5, 32, dtype=x.dtype)[..., :16], s, 0.5, "a"),
    "alignment": lambda x, s: (x, torch.zeros(4)[1:], 0.5, "a"),
    "type": lambda x, s: (x, s.double(), 0.5, "a"),
    "absence": lambda x, s: (x, None, 0.5, "a"),
    "number": lambda x, s: (x, s, 0.25, "a"),
    "text": lambda x, s: (x, s, 0.5, "b"),
    "list": lambda x, s: (x, s, 0.5, "a", [1]),
    "flag": lambda x, s: (x, s, 0.5, "a", (), True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_layout_is_another_call(driver: Recorder, change: str) -> None:
    run = Scaled()
    fast = call_cache.cached(run)
    x, scale = given()
    other = CHANGES[change](x, scale)
    for _ in range(3):
        fast(x, scale, 0.5, "a")
    assert run.runs == 2
    for want in (3, 4, 4):
        fast(*other)
        assert run.runs == want
    by_native = driver.launches[-1]
    run(*other)
    own = 6  # the result's address, which differs
    assert by_native[:-1] == driver.launches[-1][:-1]
    differing = [k for k, (a, b) in enumerate(zip(by_native[-1], driver.launches[-1][-1], strict=True)) if a != b]
    assert set(differing) <= {own, 5 if other[1] is None else own}


def test_a_text_is_not_the_name_of_a_keyword(driver: Recorder) -> None:
    run = Scaled()
    fast = call_cache.cached(run)
    x, scale = given()
    for _ in range(3):
        fast(x, scale, 0.5, "a", "more", True)
    fast(x, scale, 0.5, "a", more=True)
    assert run.runs == 3


def test_a_view_that_negates_is_resolved_in_python(driver: Recorder) -> None:
    """Its memory has the layout of a view that does not, and holds other values."""
    seen: list[Tensor] = []

    def run(x: Tensor, scale: Tensor) -> Tensor:
        seen.append(scale)
        return Scaled()(x, scale, 0.5, "a")

    fast = call_cache.cached(handwritten.resolving(run))
    z, (x, _) = torch.tensor([1 + 2j, 3 + 4j, 5 + 6j]), given()
    for _ in range(3):
        fast(x, z.imag)
    assert len(seen) == 2 and driver.launches[-1][-1][5] == z.imag.data_ptr()
    for _ in range(3):
        fast(x, z.conj().imag)
        assert not seen[-1].is_neg() and seen[-1].tolist() == [-2, -4, -6]
        assert driver.launches[-1][-1][5] == seen[-1].data_ptr()
    assert len(seen) == 5


def test_freed_memory_is_an_error(driver: Recorder) -> None:
    fast = call_cache.cached(Scaled())
    x, scale = given()
    for _ in range(3):
        fast(x, scale, 0.5, "a")
    for freed in (scale, x):
        freed.untyped_storage().resize_(0)
        with pytest.raises(FreedStorageError, match="has no memory"):
            fast(x, scale, 0.5, "a")


def test_addresses_follow_the_arguments_even_if_two_share_memory(driver: Recorder) -> None:
    fast = call_cache.cached(Scaled())
    shared = torch.zeros(64, dtype=torch.bfloat16)
    one, two = shared.view(2, 2, 16), shared.view(torch.float32)[8:11]
    for _ in range(3):
        fast(one, two, 0.5, "a")
    apart = one.clone(), two.clone()
    fast(*apart, 0.5, "a")
    assert [driver.launches[-1][-1][k] for k in (0, 5)] == [t.data_ptr() for t in apart]


def test_what_copies_an_argument_stays_in_python(driver: Recorder) -> None:
    run = Scaled()
    fast = call_cache.cached(run)
    x, scale = given()
    for k in range(4):
        fast(x, scale, 0.5, "copied")
        assert run.runs == k + 1


def test_a_tensor_that_is_given_twice_stays_in_python(driver: Recorder) -> None:
    run = Scaled()
    fast = call_cache.cached(run)
    x = torch.zeros(4, 3)
    for _ in range(3):
        fast(x, x, 0.5, "a")
    assert run.runs == 3
    y = torch.zeros(4, 3)
    fast(x, y, 0.5, "a")
    assert driver.launches[-1][-1][5] == y.data_ptr()


def test_a_launch_that_the_driver_refuses_is_raised_by_python(driver: Recorder) -> None:
    fast = call_cache.cached(Scaled())
    x, scale = given()
    for _ in range(3):
        fast(x, scale, 0.5, "a")
    driver.refuses = True
    with pytest.raises(RuntimeError, match="cannot launch product"):
        fast(x, scale, 0.5, "a")


def test_another_current_device_is_left_to_python(driver: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    at = [-1]
    monkeypatch.setattr(_torch_compat, "current_device", lambda: at[0])
    run = Scaled()
    fast = call_cache.cached(run)
    for _ in range(3):
        fast(*given(), 0.5, "a")
    at[0] = 1
    fast(*given(), 0.5, "a")
    assert run.runs == 3


def test_errors_are_those_of_python(driver: Recorder) -> None:
    fast = call_cache.cached(Scaled())
    x, _ = given()
    for _ in range(4):
        with pytest.raises(TypeError, match="missing 2 required"):
            fast(x, None)
        with pytest.raises(TypeError, match="unexpected keyword"):
            fast(x, None, 0.5, "a", nothing=1)


def test_threads_each_get_their_own_arguments(driver: Recorder) -> None:
    run = Scaled()
    fast = call_cache.cached(run)
    failures: list[Any] = []

    def work(k: int) -> None:
        x, scale = given()
        for _ in range(50):
            out = fast(x, scale, float(k), "a")
            mine = [v for *_, v in list(driver.launches) if v[0] == x.data_ptr()][-1]
            if mine[6] != out.data_ptr() or mine[7] != k:
                failures.append((k, mine))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures and run.runs == 8


def test_more_layouts_than_are_kept(driver: Recorder) -> None:
    run = Scaled()
    fast = call_cache.cached(run)
    x, scale = given()
    for k in range(1023):
        fast(x, scale, float(k), "a")
    for _ in range(3):
        fast(x, scale, 1030.0, "a")
    assert run.runs == 1023 + 2, "the last one fits, and the first of all is forgotten"
    fast(x, scale, 2000.0, "a")
    fast(x, scale, 1030.0, "a")
    assert run.runs == 1023 + 4


def test_plans_call_the_operator_directly(driver: Recorder) -> None:
    from fusewright.plan.vocabulary import function_of
    from fusewright_triton.kernels import product_ops

    assert type(function_of(product_ops.LINEAR)).__name__ == "Call"

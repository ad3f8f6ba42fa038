"""Handwritten kernels: which code a call needs, when and where it is built, and the arguments that the driver gets."""

from __future__ import annotations

import base64
import ctypes
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch

from fusewright import machine
from fusewright.interface import RuleLog
from fusewright_triton import runtime, target
from fusewright_triton.backend import NvidiaTriton
from fusewright_triton.build import workers
from fusewright_triton.build.binaries import Binary
from fusewright_triton.kernels import attention_ops, decode_ops, int8_ops, product_ops
from fusewright_triton.lowerings import CUDNN
from fusewright_triton.run import archive, bound, handwritten, precompile
from fusewright_triton.run.handwritten import Kernel, Library, Order, TensorDescriptor, noting
from fusewright_triton.select import epilogues
from fusewright_triton.select.calls import rewritten
from tests.backends.triton.select.test_calls import REAL, Net
from tests.fragments import Context

H100, A100 = target.NVIDIA["sm_90"], target.NVIDIA["sm_80"]
BF16 = torch.bfloat16
ADD = Kernel("int8", "joined")
CODE = {"name": "k", "code": base64.b64encode(b"machine code").decode(), "shared": 64, "threads": 128, "listing": ""}


@pytest.fixture
def nothing_ahead() -> None:
    """Override the shared fixture: these tests check which kernels are ordered."""


# ---------------------------------------------------------------- orders


def order(*args: Any, **constants: Any) -> Order:
    return Kernel("product", "product").order(args, constants, {"num_warps": 4})


def test_types_say_what_the_code_may_assume() -> None:
    t = torch.empty(64, dtype=BF16)
    given = (TensorDescriptor(t.view(8, 8), (4, 8)), t, t[1:], t.view(torch.uint8), 0.5, 1, 32, 33, 1 << 31, -5)
    assert order(*given).types == (
        "tensordesc<bf16[4, 8]>", "*bf16/16", "*bf16", "*u8/16", "fp32", "1", "i32/16", "i32", "i64/16", "i32",
    )  # fmt: skip


def test_a_request_has_every_parameter_in_order() -> None:
    x = torch.empty(64, 64, dtype=BF16)
    d = TensorDescriptor(x, (16, 32))
    fixed = {"BIAS": True, "RESIDUAL": False, "ACT": "relu", "DIRECT": False, "HALVES": False}
    fixed |= {"BM": 16, "BN": 16, "BK": 32, "GROUP": 8}
    made = order(d, d, d, x, x, x, 64, 1, 64, **fixed).request(H100)
    assert list(made["signature"])[:9] == ["x", "weight", "out", "bias_ptr", "residual_ptr", "out_ptr", "M", "N", "K"]
    assert made["signature"]["N"] == made["signature"]["ACT"] == "constexpr"
    assert made["constants"] == {**fixed, "N": 1}
    assert made["aligned"] == ["bias_ptr", "residual_ptr", "out_ptr", "M", "K"]
    assert made["target"] == ["cuda", 90, 32] and made["module"] == "product"


CALLS: dict[str, Callable[[str], Any]] = {
    "product": lambda device: product_ops.linear_activation(
        torch.ones(70, 40, dtype=BF16, device=device), torch.ones(33, 40, dtype=BF16, device=device), None, "gelu", "sm_90"
    ),
    "attention": lambda device: attention_ops.attention(
        *[torch.ones(2, 2, 8, 16, device=device)] * 3, torch.ones(2, 1, 1, 8, dtype=torch.bool, device=device), None, False, None,
        True,
        (256, 128, 16, 1), "sm_90",
    ),
    "positions": lambda device: attention_ops.attention_decomposed(
        *[torch.ones(2, 2, 4, 16, device=device)] * 3, *[torch.ones(4, 2, 2, 2, device=device)] * 2, None, (128, 64, 16, 1), "sm_90"
    ),
    "few": lambda device: decode_ops.attention_decode(
        torch.ones(1, 4, 1, 16, device=device), *[torch.ones(1, 2, 80, 16, device=device)] * 2, *[None] * 5, (64, 16, 16, 1),
        "sm_90",
    ),
    "int8": lambda device: int8_ops.int8_linear(
        torch.ones(3, 2048, device=device), torch.ones(5, 2048, dtype=torch.int8, device=device), None, None, "sm_90"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_what_is_asked_ahead_is_what_the_call_needs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead: list[Order] = []
    with noting(ahead):
        CALLS[name]("meta")
    needed: list[Order] = []
    launch = Kernel.launch

    def noted(self: Kernel, t: target.Target, programs: int, args: Any, constants: Any, **options: Any) -> None:
        needed.append(self.order(args, constants, options))
        launch(self, t, programs, args, constants, **options)

    monkeypatch.setattr(Kernel, "launch", noted)
    CALLS[name]("cpu")
    assert needed == ahead and needed


def test_a_region_asks_for_the_kernels_of_its_calls() -> None:
    """The weight is a transpose that is prepared once: its strides follow from the call that prepares it."""
    g = Net()
    x, w = g.tensor(4, 4096), g.input(torch.ones(64, 4096, dtype=torch.int8), const=True)
    y = g.op("mm", x, g.op("cast", g.op("t", w), BF16))
    not_by_sums = RuleLog(disabled=("gemv.int8",))
    b = rewritten(CUDNN, g.region([y]), Context({}, REAL, specs=g.temporaries, rules=not_by_sums))
    found = precompile.orders(b)
    assert [o.function for o in found] == ["blocks", "joined"] and found[0].types[:2] == ("*bf16/16", "*i8/16")


# ---------------------------------------------------------------- building


class Building:
    """A pool whose answers the test sets when it wants."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, Future[Any]]] = []

    def submit(self, request: Any) -> Future[Any]:
        self.asked.append((request, Future()))
        return self.asked[-1][1]


@pytest.fixture
def building(monkeypatch: pytest.MonkeyPatch) -> Building:
    found = Building()
    monkeypatch.setattr(workers, "pool", lambda: found)
    return found


def some_order() -> Order:
    part, out = torch.empty(2, 3, 4), torch.empty(3, 4)
    fixed = {"SCALED": False, "BIASED": False, "INTEGER": False, "SPLIT": 2, "BN": 16}
    return ADD.order((part, out, out, out, 3, 4), fixed, {"num_warps": 4})


def test_what_triton_refuses_is_asked_once_and_not_stored(building: Building) -> None:
    lib = Library(H100)
    first = lib.ask(some_order())
    building.asked[0][1].set_exception(workers.BuildError("CompilationError"))
    assert lib.ask(some_order()) is first and lib.could_be_built([some_order()]) == {}


def test_equal_orders_are_built_once_and_again_after_an_accident(building: Building) -> None:
    lib = Library(H100)
    first = lib.ask(some_order())
    assert lib.ask(some_order()) is first and not first.done() and len(building.asked) == 1
    building.asked[0][1].set_exception(workers.Ended("a compiler process ended with code -9"))
    with pytest.raises(workers.BuildError, match="code -9"):
        first.result()
    again = lib.ask(some_order())
    building.asked[1][1].set_result([CODE])
    assert again.result().code == b"machine code" and lib.ask(some_order()) is again


GLUON = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.jit
def copied(x, out_ptr, rows, BM: gl.constexpr, BN: gl.constexpr):
    tile = gl.allocate_shared_memory(x.dtype, x.block_type.shape, x.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, x.block_type.nbytes)
    tma.async_copy_global_to_shared(x, [gl.program_id(0) * BM, 0], bar, tile)
    mbarrier.wait(bar, 0)
    mbarrier.invalidate(bar)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.program_id(0) * BM + gl.arange(0, BM, gl.SliceLayout(1, layout))
    column = gl.arange(0, BN, gl.SliceLayout(0, layout))
    gl.store(out_ptr + row[:, None] * BN + column[None, :], tile.load(layout), mask=(row < rows)[:, None])
"""


def test_a_compiler_process_builds_gluon_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import fusewright_triton.kernels as kernels

    (tmp_path / "gluon_copy.py").write_text(GLUON)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(handwritten, "source", lambda module: GLUON)
    monkeypatch.setattr(kernels, "__path__", [*kernels.__path__, str(tmp_path)])
    x = torch.empty(100, 64, dtype=BF16, device="meta")
    found: list[Order] = []
    with noting(found):
        Kernel("gluon_copy", "copied").launch(
            H100, 4, (TensorDescriptor(x, (32, 64)), x, 100), {"BM": 32, "BN": 64}, num_warps=4
        )
    (answer,) = workers._here(found[0].request(H100)).result()
    assert answer["threads"] == 128 and ".target sm_90a" in answer["listing"]
    assert [d["block_size"] for d in answer["descriptors"]] == [[32, 64]]


# ---------------------------------------------------------------- launching


class Driver:
    """A driver that records its calls. `types` are the ctypes of the kernel's parameters."""

    def __init__(self, types: list[Any]) -> None:
        self.types, self.loaded, self.described = types, 0, list[Any]()
        self.launches: list[tuple[Any, ...]] = []

    def load(self, code: bytes, name: str, shared: int) -> int:
        self.loaded += 1
        return 5

    def describe(self, to: int, address: int, shape: Any, stride: Any, how: Any) -> None:
        assert to % 64 == 0
        self.described.append((tuple(shape), tuple(stride), how))
        ctypes.c_uint64.from_address(to).value = address

    def launcher(self) -> Any:
        def launch(function: int, *rest: Any) -> int:
            params = rest[8]
            self.launches.append(
                (function, *rest[:8], [t.from_address(p).value for t, p in zip(self.types, params, strict=True)])
            )
            return 0

        return launch


U64, I64, I32, F32, U8 = ctypes.c_uint64, ctypes.c_int64, ctypes.c_int32, ctypes.c_float, ctypes.c_uint8
AS_POINTER = [U64, *[I64] * 4, U8, *[I32] * 2, *[I64] * 2]
IN_HARDWARE = [U64, *[I32] * 2, *[I64] * 2]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[Driver, Binary], None]:
    """Return a function that makes CPU tensors count as GPU tensors, with the given driver and code."""

    def setup(driver: Driver, code: Binary) -> None:
        there: Future[Binary] = Future()
        there.set_result(code)
        monkeypatch.setattr(handwritten, "driver", lambda kind: driver)
        monkeypatch.setattr(Library, "ask", lambda self, order: there)
        monkeypatch.setattr(handwritten, "_bound", {})
        monkeypatch.setattr(handwritten, "_loaded", {})
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(machine, "current_stream", lambda index: 77)

    return setup


@pytest.mark.parametrize(("t", "descriptors"), [(H100, ({"block_size": [16, 32]},)), (A100, ())])
def test_parameters_go_in_order(t: target.Target, descriptors: Any, on_gpu: Any) -> None:
    """Descriptors come first, as one parameter or as their fields; ones and constants are compiled in."""
    driver = Driver([*(IN_HARDWARE if descriptors else AS_POINTER), U64, F32, I32, I64, U64, U64])
    on_gpu(driver, Binary("k", b"", 99, 128, descriptors=descriptors))
    kernel, x, out = Kernel("product", "product"), torch.empty(70, 64, dtype=BF16)[:, :40], torch.empty(8)
    described = [70, 40, 64, 1]
    for y in (out, torch.empty(8), out):
        kernel._run(
            t, 6, (TensorDescriptor(x, (16, 32)), y, 0.25, 1, -7, 1 << 40), {"BM": 16}, {"num_warps": 4, "num_ctas": 2}
        )
        twice = described if descriptors else [*described, 0, *described]
        want = [x.data_ptr(), *twice, y.data_ptr(), 0.25, -7, 1 << 40, 0, 0]
        assert driver.launches.pop() == (5, 12, 1, 1, 128, 1, 1, 99, 77, want)
    assert driver.loaded == 1
    assert driver.described == [((70, 40), (64, 1), {"block_size": [16, 32]})] * len(descriptors), "once for an address"
    kernel._run(t, 6, (TensorDescriptor(x, (16, 32)), out, 0.25, 1, -8, 1 << 40), {"BM": 16}, {"num_warps": 4})
    assert driver.launches.pop()[-1][-3:] == [1 << 40, 0, 0] and driver.loaded == 2, "clusters are other code"
    kernel._run(t, 6, (TensorDescriptor(x, (16, 32)), out, 0.25, 1, -9, 1 << 40), {"BM": 16}, {"num_warps": 4})
    assert driver.launches.pop()[1] == 6 and driver.loaded == 2, "other numbers are bound anew, to the same code"


def test_a_descriptor_follows_its_matrix() -> None:
    driver: Any = Driver([])
    x, other = torch.empty(8, 8), torch.empty(8, 8)
    made = bound.bind(Binary("k", b"", 0, 32, descriptors=({},)), 5, (TensorDescriptor(x, (8, 8)),), [False], driver)
    for t in (x, x, other):
        made.place((TensorDescriptor(t, (8, 8)),))
        assert ctypes.c_uint64.from_address(made.params[0] or 0).value == t.data_ptr()
    assert len(driver.described) == 2


# ---------------------------------------------------------------- the plan cache


def test_code_goes_to_the_plan_cache_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    code = Binary("joined", b"\x7fELF and so on", 10, 128, descriptors=({"block_size": [16, 32], "swizzle": 3},))
    packed = archive.pack(H100, archive.Stored({}, {}, {}, {some_order(): code}))
    assert archive.unpack(packed, H100).by_hand == {some_order(): code}
    library = Library(H100)
    monkeypatch.setattr(handwritten, "library", lambda t: library)
    monkeypatch.setattr(workers, "pool", lambda: pytest.fail("it is built"))
    runtime.unpack_kernels(packed, H100)
    assert library.ask(some_order()).result() == code
    monkeypatch.setattr(archive, "source", lambda module: "another version")
    with pytest.raises(ValueError, match="another source of joined"):
        archive.unpack(packed, H100)


def test_a_backend_stores_what_its_regions_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if a plan has no loop kernel."""
    code = Binary("product", b"code", 10, 128)
    there: Future[Binary] = Future()
    there.set_result(code)
    asked: list[Order] = []
    monkeypatch.setattr(Library, "ask", lambda self, order: asked.append(order) or there)
    monkeypatch.setattr(epilogues, "faster", lambda *a: True)
    g, backend = Net(), NvidiaTriton(REAL)
    y = g.op("gelu", g.op("linear", g.tensor(4096, 64), g.weight(1024, 64), None), "none")
    backend.compile(g.region([y]), Context({}, REAL, specs=g.temporaries))
    assert [o.function for o in asked] == ["product"]
    data = backend.store([])
    assert data is not None and archive.unpack(data, H100).by_hand == {asked[0]: code}


OTHER_PROCESS = """
import sys, torch
from types import SimpleNamespace
from fusewright import machine
from fusewright_triton.run import handwritten
from fusewright_triton.build import workers
from fusewright_triton.backend import TritonLoader
from fusewright_triton.kernels import attention_ops, decode_ops, int8_ops, product_ops
from fusewright_triton.target import NVIDIA

def no_build(*_):
    raise AssertionError("something is built")

workers.Parent.__init__ = no_build
driver = SimpleNamespace(load=lambda *code: print(*code) or 3, launcher=lambda: lambda *args: print(args[:9]) or 0)
handwritten.driver = lambda kind: driver
torch.cuda.current_device = lambda: 0
machine.current_stream = lambda index: 77
TritonLoader(NVIDIA["sm_90"]).unpack(open(sys.argv[1], "rb").read())
part, out = torch.empty(2, 3, 4), torch.empty(3, 4)
fixed = {"SCALED": False, "BIASED": False, "INTEGER": False, "SPLIT": 2, "BN": 16}
int8_ops.JOIN._run(NVIDIA["sm_90"], 3, (part, out, out, out, 3, 4), fixed, {"num_warps": 4})
assert "triton" not in sys.modules
"""


def test_another_process_launches_what_is_stored_without_triton(tmp_path: Path) -> None:
    code = Binary("joined", b"machine code", 10, 128)
    (tmp_path / "code").write_bytes(archive.pack(H100, archive.Stored({}, {}, {}, {some_order(): code})))
    told = [sys.executable, "-c", OTHER_PROCESS, str(tmp_path / "code")]
    done = subprocess.run(told, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["b'machine code' joined 10", "(3, 3, 1, 1, 128, 1, 1, 10, 77)"]

"""Built kernels on a real NVIDIA or AMD GPU. Skipped with the probe's reason if there is none."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from fusewright.toolkit.ir import Builder, Kernel, to_text
from fusewright.toolkit.ir.optable import OPS
from fusewright.toolkit.ir.types import DType, to_torch
from fusewright_triton import target
from fusewright_triton.emit.operators import Unsupported
from fusewright_triton.run.launch import raise_errors
from fusewright_triton.runtime import compile_kernels
from tests.backends.cpu.test_random_kernels import Case, cases
from tests.backends.triton import kernels
from tests.backends.triton.emit.test_scatters import assert_same, special
from tests.backends.triton.emit.test_semantics import SPECIAL

pytestmark = pytest.mark.hardware("rocm_triton" if torch.version.hip else "nvidia_triton")


def here() -> target.Target:
    """Return the target of this machine's GPU."""
    if torch.version.hip:
        found = target.amd(torch.cuda.get_device_properties(0).gcnArchName)
    else:
        found = target.nvidia(torch.cuda.get_device_capability())
    assert found is not None
    return found


def run(kernel: Kernel, tensors: list[torch.Tensor], *rest: object) -> list[torch.Tensor]:
    """Run on the GPU, and return the buffers on the CPU."""
    device = [t.cuda() for t in tensors]
    compile_kernels([kernel], here()).launcher(kernel)(device, *rest)  # type: ignore[arg-type]
    raise_errors()
    return [t.cpu() for t in device]


def randn(*shape: int, dtype: str = "f32") -> torch.Tensor:
    return torch.randn(shape).to(to_torch(dtype))


NUMERIC = {
    "add_gelu": (kernels.add_gelu(10007), [randn(10007), randn(10007), randn(10007)]),
    "add_gelu bf16": (kernels.add_gelu(4096, "bf16"), [randn(4096, dtype="bf16") for _ in range(3)]),
    "softmax": (kernels.softmax(33, 1000), [randn(33, 1000), randn(33, 1000)]),
    "softmax, long": (kernels.softmax(3, 50257), [randn(3, 50257), randn(3, 50257)]),
    "softmax, shared rows": (kernels.softmax(2, 1 << 18), [randn(2, 1 << 18), randn(2, 1 << 18)]),
    "layer_norm": (
        kernels.layer_norm(65, 768, "bf16"),
        [randn(65, 768, dtype="bf16"), randn(768, dtype="bf16"), randn(768, dtype="bf16"), randn(65, 768, dtype="bf16")],
    ),
    "layer_norm, shared rows": (
        kernels.layer_norm(2, 1 << 18), [randn(2, 1 << 18), randn(1 << 18), randn(1 << 18), randn(2, 1 << 18)],
    ),
    "column_sum, shared": (kernels.column_sum(5000, 70), [randn(5000, 70), randn(70)]),
    "transpose": (kernels.transpose(100, 260), [randn(260, 100, dtype="bf16"), randn(100, 260, dtype="bf16")]),
    "embedding": (
        kernels.embedding(77, 96, 500),
        [torch.randint(-500, 500, (77,)), randn(500, 96, dtype="bf16"), randn(77, 96, dtype="bf16")],
    ),
    "scatter_add": (
        kernels.scatter_add(300, 20, 50), [torch.randint(0, 50, (300,)), randn(300, 20), randn(50, 20)],
    ),
    "argmax": (kernels.argmax(3, 50257), [randn(3, 50257), torch.zeros(3, dtype=torch.int64)]),
    "cumsum": (kernels.cumsum(5, 10000), [randn(5, 10000), randn(5, 10000)]),
    "masked_mean": (
        kernels.masked_mean(50, 300),
        [randn(50, 300), torch.rand(50, 300) > 0.5, randn(50), torch.zeros(50, dtype=torch.bool)],
    ),
    "double_math": (
        kernels.double_math(500), [randn(500, dtype="f64"), torch.randint(-99, 99, (500,)), randn(500, dtype="f64")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMERIC)
def test_like_the_reference(name: str) -> None:
    kernel, tensors = NUMERIC[name]
    for got, want in zip(run(kernel, tensors), kernels.reference(kernel, tensors), strict=True):
        atol = 1e-3 if name == "cumsum" else 3e-5  # sums reach some hundreds, whose rounding steps are 3e-5
        torch.testing.assert_close(got, want, rtol=1.6e-2 if got.dtype == torch.bfloat16 else 2e-5, atol=atol)


@pytest.mark.parametrize("how", ["max", "min"])
@pytest.mark.parametrize("dtype", ["f32", "f64", "i32", "i64"])
def test_extremes_that_meet(how: str, dtype: DType) -> None:
    """Atomics compare the bits of floats: NaN and zeros of both signs, in memory and among the sources."""
    kernel = kernels.scatter_extreme(how, 9000, 3, 3000, dtype)
    torch.manual_seed(0)
    data = [torch.randint(0, 3000, (9000,)), special(27000, to_torch(dtype), 0), special(9000, to_torch(dtype), 1)]
    assert_same(run(kernel, data)[2], kernels.reference(kernel, data)[2])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_random_kernels_bit_for_bit(case: Case) -> None:
    want = kernels.reference(case.kernel, case.tensors, case.sizes)
    got = run(case.kernel, case.tensors, case.sizes)
    for a, b in zip(got, want, strict=True):
        assert bool(((a == b) | ((a != a) & (b != b))).all()), f"{to_text(case.kernel)}\n{case.sizes}\n{a}\n{b}"


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_float_ops_like_eager_on_this_gpu(dtype: str) -> None:
    n = len(SPECIAL)
    grid = torch.tensor(SPECIAL, dtype=to_torch(dtype))
    pair = [grid.repeat_interleave(n), grid.repeat(n)]
    built, wrong = [], []
    for name, row in OPS.items():
        if "float" not in row.kinds or name == "where":
            continue
        b = Builder(name, p=[n * n])
        ins = [b.input(f"x{k}", dtype) for k in range(row.arity)]
        (i,) = b.axes
        v = b.op(name, *(b.load(x, i) for x in ins))
        b.store(b.output("out", v.dtype), i, v)
        built.append((name, b.build(), v.dtype))
    compile_kernels([k for _, k, _ in built], here())
    for name, kernel, result in built:
        ins = pair[: OPS[name].arity]
        got = run(kernel, [*ins, torch.empty(n * n, dtype=to_torch(result))])[-1]
        exact = OPS[name].ref(*(x.double() for x in ins)).to(got.dtype)
        eager = OPS[name].ref(*(x.cuda() for x in ins)).cpu()
        off = (got.double() - exact.double()).abs()
        allowed = 2 * (eager.double() - exact.double()).abs() + exact.double().abs() * (
            3e-7 if dtype == "f32" else 1e-15
        )
        same = (got == exact) | (got.isnan() & exact.isnan()) | (got.isnan() & eager.isnan()) | (got == eager)
        bad = ~same & ~(off <= allowed)
        if bool(bad.any()):
            k = int(bad.nonzero()[0])
            wrong.append((name, [x[k].item() for x in ins], got[k].item(), exact[k].item(), eager[k].item()))
    assert not wrong


def test_a_launch_can_be_captured_and_replayed() -> None:
    norm, total = kernels.layer_norm(64, 768), kernels.column_sum(5000, 70)
    module = compile_kernels([norm, total], here())
    a = [randn(64, 768).cuda(), randn(768).cuda(), randn(768).cuda(), torch.empty(64, 768, device="cuda")]
    b = [randn(5000, 70).cuda(), torch.empty(70, device="cuda")]
    runs = [(module.launcher(norm), a), (module.launcher(total), b)]
    for launch, data in runs:
        launch(data)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch, data in runs:
            launch(data)
    a[0].copy_(torch.randn(64, 768))
    b[0].copy_(torch.randn(5000, 70))
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(a[3], torch.nn.functional.layer_norm(a[0], (768,), a[1], a[2]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(b[1], b[0].sum(0), rtol=1e-4, atol=1e-3)


def test_unaligned_memory() -> None:
    k = kernels.add_gelu(1001, "bf16")
    launch = compile_kernels([k], here()).launcher(k)
    store = [torch.randn(1010).bfloat16().cuda() for _ in range(3)]
    for offset in (0, 1, 3):
        x, y, out = (t[offset : offset + 1001] for t in store)
        launch([x, y, out])
        want = torch.nn.functional.gelu(x.float() + y.float()).bfloat16()
        torch.testing.assert_close(out, want)


def test_an_index_out_of_bounds_raises_and_the_gpu_goes_on() -> None:
    k = kernels.embedding(5, 8, 10)
    launch = compile_kernels([k], here()).launcher(k)
    ids = torch.tensor([0, 9, 10, 1, 2]).cuda()
    table, out = torch.randn(10, 8).bfloat16().cuda(), torch.empty(5, 8, dtype=torch.bfloat16, device="cuda")
    launch([ids, table, out])
    with pytest.raises(IndexError):
        raise_errors()
    launch([ids.clamp(max=9), table, out])
    raise_errors()
    assert torch.equal(out, table[ids.clamp(max=9)])


def test_threads_and_streams() -> None:
    k = kernels.softmax(64, 700)
    launch = compile_kernels([k], here()).launcher(k)

    def work(seed: int) -> bool:
        with torch.cuda.stream(torch.cuda.Stream()):
            x = torch.randn(64, 700, device="cuda") + seed
            out = torch.empty_like(x)
            for _ in range(50):
                launch([x, out])
            return bool(torch.allclose(out, x.softmax(-1), atol=1e-6))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))


@pytest.mark.parametrize("before", [False, True], ids=["loads", "launches"])
def test_a_thread_that_has_used_no_gpu(before: bool) -> None:
    """Autograd's threads are like this: memory from torch's caching allocator gives a thread no CUDA context."""
    kernel = kernels.add_gelu(10007)
    data = [t.cuda() for t in NUMERIC["add_gelu"][1]]
    launcher = compile_kernels([kernel], here()).launcher(kernel)
    if before:
        launcher(data)
    want = data[0] + data[1]
    data[2].zero_()
    with ThreadPoolExecutor(1) as other:
        other.submit(launcher, data).result()
    raise_errors()
    torch.testing.assert_close(data[2], torch.nn.functional.gelu(want), rtol=1e-5, atol=1e-5)


def test_half_precision_accumulation_builds_or_is_refused() -> None:
    for dtype in ("bf16", "f16"):
        k = kernels.scatter_add(300, 20, 50, dtype)
        data = [
            torch.randint(0, 50, (300,)),
            torch.randint(-2, 3, (300, 20)).to(to_torch(dtype)),
            randn(50, 20, dtype=dtype).zero_(),
        ]
        try:
            got = run(k, data)
        except Unsupported:
            continue
        assert torch.equal(got[2], kernels.reference(k, data)[2])


# ---------------------------------------------------------------- devices beyond the current one

NAME = "rocm_triton" if torch.version.hip else "nvidia_triton"


@pytest.mark.hardware(NAME)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_model_runs_on_the_device_that_it_is_on(current: int) -> None:
    """Whichever device is current; one GPU's plan is not used for the other."""
    with torch.cuda.device(current):
        for index in (1, 0):
            torch.manual_seed(0)
            device = torch.device("cuda", index)
            layers = torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.LayerNorm(128), torch.nn.Linear(128, 64)
            model = torch.nn.Sequential(*layers).to(device).eval()
            x = torch.randn(33, 64, device=device)
            compiled = torch.compile(model, backend=NAME)
            with torch.no_grad():
                for _ in range(4):  # checked, recorded, replayed
                    got = compiled(x)
                    assert got.device == device
                    torch.testing.assert_close(got, model(x), rtol=1e-3, atol=1e-3)


@pytest.mark.hardware(NAME)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_graph_on_two_devices() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = (x.exp() + 1).sum(1), (y.sin() * 2).softmax(1)
        return a.to(y.device) + b[:, 0], a * 2

    x, y = torch.randn(64, 256, device="cuda:0"), torch.randn(64, 256, device="cuda:1")
    compiled = torch.compile(f, backend=NAME, options={"fallback": "allow"})
    for _ in range(3):
        for g, w in zip(compiled(x, y), f(x, y), strict=True):
            assert g.device == w.device
            torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4)


@torch.library.custom_op("fusewright_gpu_tests::dropped", mutates_args=())
def dropped(x: torch.Tensor) -> torch.Tensor:
    """Draw from the device's generator, and return other strides than the fake implementation says."""
    return torch.nn.functional.dropout(x, 0.5, True).t().contiguous().t()


@dropped.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.hardware(NAME)
@pytest.mark.usefixtures("fresh_dynamo")
def test_an_abandoned_first_run_draws_no_random_numbers() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (dropped(x.exp()) + 1).sin()

    x = torch.randn(64, 96, device="cuda")
    compiled = torch.compile(f, backend=NAME, options={"fallback": "allow"})
    for _ in range(2):
        torch.manual_seed(0)
        got = compiled(x), torch.rand(3, device="cuda")
        torch.manual_seed(0)
        for g, w in zip(got, (f(x), torch.rand(3, device="cuda")), strict=True):
            torch.testing.assert_close(g, w)

"""Recordings on a real GPU beside other threads, streams and captures. The host's part is tested without one, in
tests/unit/plan."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import fusewright
from fusewright.report import recording

pytestmark = pytest.mark.hardware("rocm_triton" if torch.version.hip else "nvidia_triton")

OPTIONS = {"fallback": "allow", "cache": False, "never_slower": False}


def compiled(fn: Callable[..., Any], **options: Any) -> Any:
    name = "rocm_triton" if torch.version.hip else "nvidia_triton"
    return torch.compile(fn, backend=name, options={**OPTIONS, **options})


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda") / 32


@torch.no_grad()
def test_threads_replay_on_one_stream_though_recordings_share_its_memory() -> None:
    """The second plan leaves what its large result is made of where the first has its temporaries."""
    w = randn(1024, 1024)

    def first(x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = torch.sin(x @ w)
        return x.sum(-1)

    def second(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.cos(x @ w)
        return torch.exp(x @ w)

    xs, plans = [randn(1024, 1024) for _ in range(2)], [compiled(f) for f in (first, second)]
    wanted = [f(x) for f, x in zip((first, second), xs, strict=True)]
    with recording() as reports:
        for plan, x in zip(plans, xs, strict=True):
            for _ in range(3):
                plan(x)
    assert [r.replay[:8] for r in reports] == ["replayed"] * 2

    @torch.no_grad()
    def calls(k: int) -> bool:
        found = [plans[k](xs[k]) for _ in range(200)]
        return all(torch.allclose(y, wanted[k], rtol=1e-2, atol=1e-3) for y in found)

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(calls, range(2)))


@torch.no_grad()
def test_what_is_conjugated_lazily_is_copied_by_value() -> None:
    w = torch.randn(64, 64, dtype=torch.complex64, device="cuda") / 8

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = ((x @ w) * x + x) @ w
        return y.conj(), (y @ w).conj().imag

    fast = compiled(f)
    for _ in range(4):
        x = torch.randn(64, 64, dtype=torch.complex64, device="cuda")
        for given in (x, x.conj()):
            torch.testing.assert_close(fast(given), f(given), rtol=1e-3, atol=1e-3)


@torch.library.custom_op("other_tests::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x)


@noise.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_an_operator_that_draws_without_a_tag_draws_anew_in_every_replay() -> None:
    w = randn(64, 64).requires_grad_()

    def f(x: torch.Tensor) -> torch.Tensor:
        for _ in range(16):
            x = torch.sin(x @ w)
        return x + noise(x.detach())

    fast, x = compiled(f), randn(64, 64)
    for seed in range(5):
        torch.manual_seed(seed)
        wanted = [f(x), f(x)]
        torch.manual_seed(seed)
        found = [fast(x), fast(x)]
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-3)
        found[1].sum().backward()


class Scaled(torch.nn.Module):
    """A product with a constant that is prepared from the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(randn(1024, 1024))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x @ (self.weight * 2)) @ self.weight.exp()


@torch.no_grad()
def test_another_stream_reads_constants_that_are_computed() -> None:
    model, x = Scaled(), randn(64, 1024)
    fast, other = compiled(model, graphs=False), torch.cuda.Stream()
    wanted = model(x)
    torch.testing.assert_close(fast(x), wanted, rtol=1e-2, atol=1e-3)
    torch.cuda.synchronize()
    fusewright.refresh(model)
    torch.cuda._sleep(200_000_000)  # the constants are computed after about 0.1 s
    fast(x)
    with torch.cuda.stream(other):
        found = fast(x)
    torch.cuda.synchronize()
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-3)


@torch.no_grad()
def test_a_users_capture_follows_the_weights() -> None:
    """Constants that the capture had read would be stale, and freed at the next call outside of it."""
    model, x = Scaled(), randn(64, 1024)
    fast, side = compiled(model), torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            fast(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fast(x)
    for _ in range(2):
        model.weight.mul_(-1.5)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-2, atol=1e-3)
        graph.replay()
        torch.testing.assert_close(y, model(x), rtol=1e-2, atol=1e-3)


@torch.no_grad()
def test_an_inference_plan_that_draws_is_replayed_with_eagers_numbers() -> None:
    w = randn(64, 64)

    def f(x: torch.Tensor) -> torch.Tensor:
        noise, layers_dropped = torch.randn_like(x), [torch.rand(()) for _ in range(3)]
        for k in range(6):
            x = torch.sin(x @ w) + (0 if k < len(layers_dropped) else noise)
        return torch.nn.functional.dropout(x, 0.5)

    fast, x = compiled(f), randn(64, 64)
    with recording() as reports:
        for seed in range(5):
            torch.manual_seed(seed)
            wanted = f(x), torch.rand(3, device="cuda"), torch.rand(3)
            torch.manual_seed(seed)
            torch.testing.assert_close((fast(x), torch.rand(3, device="cuda"), torch.rand(3)), wanted, rtol=1e-2, atol=1e-3)
    assert [r.replay[:8] for r in reports] == ["replayed"]


LARGE_RESULTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "product of a library": lambda y: y,
    "handwritten product": torch.nn.functional.gelu,
    "loop kernel": lambda y: y.float().softmax(-1),
    "two, of which one reads the other": lambda y: (y, y.float() * 2, y[:4, :8] + 1),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("last", LARGE_RESULTS.values(), ids=LARGE_RESULTS)
@torch.no_grad()
def test_a_recording_writes_large_results_to_fresh_memory(last: Callable[[torch.Tensor], Any], dtype: torch.dtype) -> None:
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.GELU()) for _ in range(3)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 2048)).to("cuda", dtype)

    def f(x: torch.Tensor) -> Any:
        return last(model(x))

    fast, kept = compiled(f), []
    with recording() as reports:
        for k in range(8):
            x = torch.randn(512, 64, device="cuda", dtype=dtype)
            kept.append((x, fast(x)))
            held = torch.empty(k << 20, device="cuda")  # the next results lie elsewhere
    del held
    for x, found in kept:
        torch.testing.assert_close(found, f(x), rtol=2e-2, atol=6e-2)  # two steps of bf16 at 4
    said = reports[0].replay.split()
    assert said[0] == "replayed," and (torch.version.hip or said[1] == said[3]), reports[0].replay


class Decoder(torch.nn.Module):
    """A layer with learned positions and a cache, of which each call writes a row and reads those up to it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))
        self.positions = torch.nn.Embedding(128, 64)
        self.register_buffer("cache", torch.zeros(128, 64))

    def forward(self, x: torch.Tensor, p: int) -> torch.Tensor:
        x = x + self.positions.weight[p] / (p + 1)
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        self.cache[p : p + 1] = x
        return x + (self.cache * (torch.arange(128, device=x.device) <= p)[:, None]).sum(0)


@torch.no_grad()
def test_kernels_of_a_recording_take_a_number_of_each_call() -> None:
    """The recording loads code for any position: the calls before it have run what is for multiples of 16."""
    one, two = Decoder().cuda(), Decoder().cuda()
    two.load_state_dict(one.state_dict())
    fast = compiled(one)
    with recording() as reports:
        for p in (3, 16, 32, 6, 16, 5, 2, 127, 0, 64):
            x = randn(1, 64)
            torch.testing.assert_close(fast(x, p), two(x, p), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(one.cache, two.cache, rtol=1e-4, atol=1e-5)
    assert torch.version.hip or reports[-1].replay.startswith("replayed"), reports[-1].replay


@torch.no_grad()
def test_a_recording_takes_numbers_beside_random_numbers() -> None:
    """Where a number is beyond what its kernels take, the plain plan runs."""
    w = randn(64, 64)

    def f(x: torch.Tensor, t: int) -> torch.Tensor:
        times = torch.full((64,), t, device="cuda")
        for _ in range(4):
            x = torch.sin(x @ w) + times[:, None].float().cos()
        return x + torch.randn_like(x)

    fast, x = compiled(f), randn(64, 64)
    with recording() as reports:
        for t in (16, 17, 18, 32, 1 << 23, 1 << 25, 1 << 40, -5, 3):
            torch.manual_seed(t)
            wanted = f(x, t)
            torch.manual_seed(t)
            torch.testing.assert_close(fast(x, t), wanted, rtol=1e-2, atol=1e-3)
    assert torch.version.hip or reports[-1].replay.startswith("replayed"), [r.replay for r in reports]


def test_a_step_of_training_takes_numbers() -> None:
    one, two = (torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(16))).cuda() for _ in range(2))
    two.load_state_dict(one.state_dict())

    def loss(model: torch.nn.Module, x: torch.Tensor, t: int) -> torch.Tensor:
        for layer in model:  # type: ignore[attr-defined]
            x = torch.sin(layer(x)) * t
        return x.square().mean() / (2 * t + 1)

    fast, x = compiled(lambda x, t: loss(one, x, t)), randn(64, 64)
    with recording() as reports:
        for t in range(3, 15):
            for m, f in ((one, fast), (two, lambda x, t: loss(two, x, t))):
                m.zero_grad(set_to_none=True)
                f(x, t).backward()
            for p, q in zip(one.parameters(), two.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-2, atol=1e-4)
    assert torch.version.hip or [r.replay[:8] for r in reports[-2:]] == ["replayed"] * 2, [r.replay for r in reports]

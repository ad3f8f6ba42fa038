"""Host time per call of a compiled model on a GPU, in us: `python -m ci.gpu.host [bert vit distilgpt2 decode ...]`.

Medians of calls, each after a wait for the GPU: Dynamo up to our callable, our part up to the graph, the graph with its copies, the
time after it, the whole call on the host; the same call with a backend that does nothing. Then the device time of the graph, and
the time of a call on an idle GPU.

`python -m ci.gpu.host --queued` has medians of small models while nothing waits for the GPU, with a backend that does nothing and
with ours: the call up to what the backend returned, that, and the rest of the call.

`python -m ci.gpu.host --plain [bert bert:dynamic gpt2_small:train ...]` measures calls that are not replayed: by Python, by
`fusewright-native` with and without its queue of launches, and in eager (columns: `Launched`; last the whole call).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from fusewright.bench import suite
from fusewright.bench.cases import resolve
from fusewright.bench.cases.decoding import build_decoding
from fusewright.bench.device import Clock
from fusewright.dynamo import entry
from fusewright.plan import native
from fusewright.plan.replay.inference import Replayed
from fusewright_triton.run.launch import GpuLauncher

CALLS = 60
QUEUED = 100
DEVICE, CLOCK = "cuda", Clock("cuda")
Size = Literal["full", "small"]
OURS: Any = {"backend": "nvidia_triton", "options": {"fallback": "allow"}}
COLUMNS = ("Dynamo", "ours before the graph", "graph", "rest", "call", "with a backend that does nothing")
WAITED = 8192
"""The size of a product that keeps the GPU busy for some milliseconds before a call, as in a program that waits for its results:
little of what a call needs is then in the processor's caches."""


def compiled(model: str) -> Callable[[], Any]:
    """Return a call in bf16, compiled and recorded."""
    call = _inference(model, lambda module: torch.compile(module, **OURS))
    for _ in range(6):
        call()
    return call


def _inference(model: str, compile: Callable[[Any], Any], size: Size = "full") -> Callable[[], Any]:
    """Return a bf16 call of a model of the suite or of `fusewright.bench.cases.large`, a decoding step, or a small MLP."""
    if model == "mlp":
        x = torch.randn(8, 64, dtype=torch.bfloat16, device=DEVICE)
        layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
        return torch.no_grad()(functools.partial(compile(layers.to(x).eval()), x))
    if model == "decode":
        built = build_decoding("decode:llama", "full", "bf16", DEVICE, steps=1)
    else:
        built = resolve(f"large:{model}" if size == "full" else model, size, "bf16", DEVICE)
    return torch.no_grad()(built.bind(compile(built.fn)))


def _training(model: str, compile: Callable[[Any], Any]) -> Callable[[], Any]:
    """Return forward and backward of a suite model under bf16 autocast."""
    step = suite.train_step(model, "full", "amp").to(DEVICE)
    step.compiled = compile(step.module)
    return step.backward


def nothing(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
    """A backend that returns the results of its first run."""
    made: list[Any] = []

    def run(*args: Any) -> Any:
        if not made:
            made.append(gm(*args))
        return made[0]

    return run


def compiled_to_nothing(model: str) -> Callable[[], Any]:
    """Return the same call with a backend that does nothing."""
    call = _inference(model, lambda module: torch.compile(module, backend=nothing))
    for _ in range(6):
        call()
    return call


@functools.cache
def _large() -> torch.Tensor:
    return torch.ones(WAITED, WAITED, dtype=torch.bfloat16, device=DEVICE)


def waited() -> int:
    """Keep the GPU busy, wait for it, and return the time, in ns."""
    x = _large()
    for _ in range(3):
        torch.mm(x, x)
    torch.cuda.synchronize()
    return time.perf_counter_ns()


def recordings() -> list[tuple[Replayed, Any]]:
    """Return all replayed plans of this process, each with its last replay."""
    plans = [o for o in gc.get_objects() if type(o) is Replayed]
    return [(p, p._last) for p in plans if p._last is not None]


@contextlib.contextmanager
def spans(of: type) -> Iterator[list[tuple[int, int, Any]]]:
    """Note when calls of a class's objects begin and end, in ns, and the objects."""
    noted: list[tuple[int, int, Any]] = []
    run = of.__call__

    def timed(self: Any, *args: Any) -> Any:
        start = time.perf_counter_ns()
        results = run(self, *args)
        noted.append((start, time.perf_counter_ns(), self))
        return results

    of.__call__ = timed  # type: ignore[method-assign]
    try:
        yield noted
    finally:
        of.__call__ = run  # type: ignore[method-assign]


@dataclass
class Graph:
    """The graph of a recording, with its copies."""

    replay: Callable[[list[Any]], Any]
    args: list[Any] = field(default_factory=list)

    def __call__(self, args: list[Any]) -> Any:
        self.args = list(args)
        return self.replay(args)


@contextlib.contextmanager
def graphs() -> Iterator[list[Graph]]:
    """The graphs of this process."""
    found = [(r, Graph(r.call)) for _, r in recordings()]
    for r, graph in found:
        r.call = graph
    try:
        yield [graph for _, graph in found]
    finally:
        for r, graph in found:
            r.call = graph.replay


def host_us(call: Callable[[], Any]) -> list[float]:
    """Return the medians of the columns. With several graphs per call, times before the first and after the last launch count."""
    rows = []
    with graphs(), spans(Replayed) as plans, spans(Graph) as launches:
        for _ in range(CALLS):
            plans.clear()
            launches.clear()
            start = waited()
            call()
            end = time.perf_counter_ns()
            at = (start, plans[0][0], launches[0][0], launches[-1][1], end)
            rows.append([*(b - a for a, b in itertools.pairwise(at)), end - start])
    return [statistics.median(column) / 1e3 for column in zip(*rows, strict=True)]


def nothing_us(call: Callable[[], Any]) -> float:
    """Return the median time of a call that does nothing."""
    times = []
    for _ in range(CALLS):
        start = waited()
        call()
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1e3


def device_us(call: Callable[[], Any], times: int = 5) -> float:
    """Return the device time of a call's graphs among several, issued while the device is busy."""
    with graphs() as found:
        call()
        replays = [functools.partial(g, g.args) for g in found if g.args]  # of this call
        medians = [statistics.median(CLOCK.queued(r, times) or 0.0 for _ in range(8)) for r in replays]
    return sum(medians) * 1e6


def queued_us(model: str, backend: Callable[..., Any]) -> list[float]:
    """Return the medians of the parts of calls that wait for nothing, as few as the driver queues."""
    noted: list[tuple[int, int]] = []

    def timed(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        run = backend(gm, example_inputs)

        def call(*args: Any) -> Any:
            start = time.perf_counter_ns()
            results = run(*args)
            noted.append((start, time.perf_counter_ns()))
            return results

        return call

    call = _inference(model, lambda module: torch.compile(module, backend=timed), "small")
    rows = []
    for k in range(CALLS * QUEUED):
        if k % QUEUED == 0:
            torch.cuda.synchronize()
        start = time.perf_counter_ns()
        kept = call()
        end = time.perf_counter_ns()
        del kept
        rows.append((noted[-1][0] - start, noted[-1][1] - noted[-1][0], end - noted[-1][1]))
    return [statistics.median(column) / 1e3 for column in zip(*rows[len(rows) // 4 :], strict=True)]


def compare_queued() -> None:
    print("model | backend | up to the backend's callable | that | rest of the call")
    for model in ("mlp", "bert", "vit"):
        for name, backend in (("nothing", nothing), ("ours", entry("nvidia_triton"))):
            print(f"{model} | {name} |", " | ".join(f"{us:.1f}" for us in queued_us(model, backend)), flush=True)
            torch.compiler.reset()
            gc.collect()


def call_us(call: Callable[[], Any], calls: int) -> float:
    """Return the median of calls on an idle device."""
    return statistics.median(CLOCK.seconds(call) for _ in range(calls)) * 1e6


def plain(text: str) -> dict[str, Callable[[], Any]]:
    """Return calls of a model (`bert`, `bert:dynamic`, `gpt2_small:train`) in eager, and compiled without replay for each launcher.
    A plan chooses its launcher at its first calls, so they are made here."""
    name, _, mode = text.partition(":")

    def made(compile: Callable[[Any], Any]) -> Callable[[], Any]:
        return (_training if mode == "train" else _inference)(name, compile)

    calls = {"eager": made(lambda module: module)}
    for k, way in enumerate(("python", "no queue", "native") if native.extension() else ("python",)):
        os.environ["FUSEWRIGHT_NATIVE"] = str(int(way != "python"))
        # by these two the plans differ, which are shared otherwise
        options = {**OURS["options"], "graphs": False, "never_slower": False, "verify": k > 0, "strict": k > 1}
        dynamic = True if mode == "dynamic" else None
        calls[way] = made(functools.partial(torch.compile, **{**OURS, "options": options}, dynamic=dynamic))
        with contextlib.nullcontext() if way != "no queue" else without_queue():
            for _ in range(4):
                calls[way]()
    return calls


@dataclass
class Launched:
    """Host times of a call that is not replayed, in us, and what it launches."""

    loops: int
    by_address: int
    kernels: int
    launch: float
    queue: float
    call: float


def launched(calls: dict[str, Callable[[], Any]], closes: list[int]) -> dict[str, Launched]:
    """Measure calls for which nothing waits for the device, in turns, as the host's speed changes. `launch`: the mean of a launch
    of a loop kernel, with its part of what is queued; `queue`: what is launched where a queue ends, in one call; `call`: the median
    of a call."""
    times: dict[str, list[tuple[float, int, int]]] = {way: [] for way in calls}
    counts: dict[str, tuple[int, int]] = {}
    with spans(GpuLauncher) as noted:
        for _ in range(CALLS // 2):
            for way, call in calls.items():
                torch.cuda.synchronize()
                noted.clear()
                closes.clear()
                start = time.perf_counter_ns()
                call()
                spent = time.perf_counter_ns() - start
                times[way].append((sum(end - begin for begin, end, _ in noted) / max(1, len(noted)), sum(closes), spent))
                counts[way] = len(noted), sum(launcher._native is not None for _, _, launcher in noted)
    medians = {way: [statistics.median(column) / 1e3 for column in zip(*rows, strict=True)] for way, rows in times.items()}
    return {way: Launched(*counts[way], kernels_of(call), *medians[way]) for way, call in calls.items()}


def kernels_of(call: Callable[[], Any]) -> int:
    """Return the number of kernels that a call runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum(e.device_type == torch.autograd.DeviceType.CUDA for e in profile.events())


@contextlib.contextmanager
def without_queue() -> Iterator[None]:
    """Plans that are loaded in this context launch each kernel by itself."""
    find = native.launch_queue
    native.launch_queue = lambda: None
    try:
        yield
    finally:
        native.launch_queue = find


@contextlib.contextmanager
def timed_queues() -> Iterator[list[int]]:
    """Note how long each end of a queue takes, in ns, of plans that are loaded in this context."""
    noted: list[int] = []
    queue, find = native.launch_queue(), native.launch_queue
    if queue is not None:

        def close() -> None:
            start = time.perf_counter_ns()
            queue.close()
            noted.append(time.perf_counter_ns() - start)

        native.launch_queue = lambda: native.LaunchQueue(queue.open, close)
    try:
        yield noted
    finally:
        native.launch_queue = find


def compare_plain(models: list[str]) -> None:
    print(f"fusewright-native: {native.absent() or 'used in the rows named so'}")
    print(
        "model | launcher | loop kernels | by address | all kernels | us a launch | us of queues | us a call on the host | a kernel"
        " | us a call (median of rounds in turns)"
    )
    for text in models or ["bert", "bert:dynamic", "distilgpt2", "gpt2_small:train"]:
        with timed_queues() as closes:
            calls = plain(text)
        times: dict[str, list[float]] = {way: [] for way in calls}
        for _ in range(5):
            for way, call in calls.items():
                times[way].append(call_us(call, CALLS // 5))
        for way, m in launched(calls, closes).items():
            host = f"{m.launch:.1f} | {m.queue:.0f} | {m.call:.0f} | {m.call / max(1, m.kernels):.1f}"
            whole = statistics.median(times[way])
            print(f"{text} | {way} | {m.loops} | {m.by_address} | {m.kernels} | {host} | {whole:.0f}", flush=True)
        del calls
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()


def main() -> None:
    CLOCK.begin()
    if sys.argv[1:2] == ["--plain"]:
        return compare_plain(sys.argv[2:])
    if sys.argv[1:2] == ["--queued"]:
        return compare_queued()
    print("model |", " | ".join(COLUMNS), "| graph on the device | call on an idle GPU")
    for model in sys.argv[1:] or ["bert", "vit", "distilgpt2", "decode"]:
        call = compiled(model)
        columns = [f"{us:.0f}" for us in (*host_us(call), nothing_us(compiled_to_nothing(model)))]
        print(model, "|", " | ".join(columns), f"| {device_us(call):.0f} | {call_us(call, CALLS):.0f}", flush=True)
        del call
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

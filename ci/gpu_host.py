"""What the host does in a call of a compiled model on a GPU, in us: `python ci/gpu_host.py [bert vit distilgpt2 decode ...]`.

Medians of calls, each on an idle GPU: Dynamo up to our callable, our part up to the launch of the graph, the launch, what
follows it, the whole call. Then the device's time of the graph, and of a call on an idle GPU.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from gpu_models import Decoding  # type: ignore[import-not-found]
from gpu_worker import OURS, inference, median_ms, without_gradients  # type: ignore[import-not-found]

from fusewright.plan.execute.replay import Replayed

CALLS = 60
COLUMNS = ("Dynamo", "ours before the launch", "launch", "rest", "call")


def compiled(model: str) -> Callable[[], Any]:
    """A call in bf16, compiled and recorded."""
    if model == "decode":
        decoding = Decoding(lambda fn: torch.compile(fn, **OURS))
        decoding.restore()
        call: Callable[[], Any] = without_gradients(decoding.step)
    else:
        _, made = inference(model)
        call = made(lambda module: torch.compile(module, **OURS))
    for _ in range(6):
        call()
    return call


def recordings() -> list[tuple[Replayed, Any]]:
    """All plans of this process that are replayed, with what was replayed last."""
    plans = [o for o in gc.get_objects() if type(o) is Replayed]
    return [(p, p._last) for p in plans if p._last is not None]


def host_us(call: Callable[[], Any]) -> list[float]:
    """Medians of the columns. Of several graphs in a call, those before the first launch and after the last one count."""
    times: list[int] = []
    entered: list[int] = []
    run = Replayed.__call__

    def entering(self: Replayed, args: list[Any]) -> Any:
        entered.append(time.perf_counter_ns())
        return run(self, args)

    def timed(replay: Callable[[], None]) -> Callable[[], None]:
        def again() -> None:
            times.append(time.perf_counter_ns())
            replay()
            times.append(time.perf_counter_ns())

        return again

    found = recordings()
    plain = [r.replay for _, r in found]
    Replayed.__call__ = entering  # type: ignore[method-assign, assignment]
    for _, r in found:
        r.replay = timed(r.replay)
    rows = []
    for _ in range(CALLS):
        times.clear()
        entered.clear()
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        call()
        end = time.perf_counter_ns()
        at = (start, entered[0], times[0], times[-1], end)
        rows.append([*(b - a for a, b in itertools.pairwise(at)), end - start])
    Replayed.__call__ = run  # type: ignore[method-assign]
    for (_, r), replay in zip(found, plain, strict=True):
        r.replay = replay
    return [statistics.median(column) / 1e3 for column in zip(*rows, strict=True)]


def device_us(replay: Callable[[], None], times: int = 5) -> float:
    """Of one replay among several, issued while the device is busy."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000)
    start.record()
    for _ in range(times):
        replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / times


def main() -> None:
    print("model |", " | ".join(COLUMNS), "| graph on the device | call on an idle GPU")
    for model in sys.argv[1:] or ["bert", "vit", "distilgpt2", "decode"]:
        call = compiled(model)
        columns = [f"{us:.0f}" for us in host_us(call)]
        graph = statistics.median(device_us(r.replay) for _ in range(8) for _, r in recordings())
        print(model, "|", " | ".join(columns), f"| {graph:.0f} | {median_ms(call, CALLS) * 1e3:.0f}", flush=True)
        del call
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

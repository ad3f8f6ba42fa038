"""Host time per call of a compiled model on a CPU, in us: `python -m ci.cpu.host [mobilenet_v2 decode gpt2_small:train]`.

For each model it runs eager, launches by Python and launches by `fusewright-native` in turns in one process. It prints the minimum
thread CPU time of a step, and how much of it the plans spend on each kind of call, as count x us. On a busy machine only ratios are
meaningful; absolute figures need an idle one.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fusewright.bench import suite
from fusewright.bench.cases.decoding import build_decoding
from fusewright.plan import native
from fusewright.plan.execute import codegen

BACKEND = "x86_onednn"
KINDS = {"kernel": "launches", "launch": "launches", "prepared": "checks of weights", "empty": "allocations"}
VIEWS = (
    "view",
    "slice",
    "transpose",
    "t_default",
    "reshape",
    "alias",
    "unsqueeze",
    "split",
    "permute",
    "select",
    "expand",
)
TURN = 10
Step = Callable[[], Any]


def _decoding() -> tuple[Any, Callable[[Any], Step]]:
    """Return a decoding step of a tiny Llama with a static cache, batch 1."""
    built = build_decoding("decode:llama", "small", steps=1)
    return built.fn, lambda forward: torch.no_grad()(built.bind(forward))


def _inference(name: str) -> tuple[Any, Callable[[Any], Step]]:
    built = suite.build(name, "small")
    return built.fn, lambda forward: torch.no_grad()(built.bind(forward))


def _training(name: str) -> tuple[Any, Callable[[Any], Step]]:
    training = suite.train_step(name, "small")
    return training.module, lambda forward: replace(training, compiled=forward).backward


def model(text: str) -> tuple[Any, Callable[[Any], Step]]:
    """Return a module, and a function that makes a step from its (compiled) forward."""
    name, _, mode = text.partition(":")
    if name == "decode":
        return _decoding()
    return _training(name) if mode == "train" else _inference(name)


@dataclass
class Way:
    """A model compiled one way, with the plans that it runs."""

    name: str
    step: Step
    plans: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)


@contextmanager
def _collecting(plans: list[dict[str, Any]]) -> Iterator[None]:
    """Collect the namespaces of the plans loaded in this context."""
    load = codegen.load

    def noting(*args: Any, **kwargs: Any) -> Any:
        run = load(*args, **kwargs)
        plans.append(run.__globals__)
        return run

    codegen.load = noting
    try:
        yield
    finally:
        codegen.load = load


def compiled(name: str, module: Any, step: Callable[[Any], Step], by_native: bool) -> Way:
    os.environ["FUSEWRIGHT_NATIVE"] = str(int(by_native))
    way = Way(name, lambda: None)
    with _collecting(way.plans):
        way.step = step(
            torch.compile(module, backend=BACKEND, options={"verify": by_native})
        )  # a different guard, so separate code
        for _ in range(3):
            way.step()
    return way


def measure(ways: Sequence[Way], rounds: int) -> None:
    """Time all ways in turns of a few calls. The first call of each turn finds Dynamo's guards in the other way's order."""
    for _ in range(max(1, rounds // TURN)):
        for way in ways:
            way.step()
            for _ in range(TURN):
                start = time.thread_time_ns()
                way.step()
                way.times.append((time.thread_time_ns() - start) / 1e3)


def kinds(way: Way, rounds: int) -> dict[str, tuple[float, float]]:
    """Return, by kind of call in the plans, the count per step and the minimum us per step, without the clock's overhead."""
    spent: dict[str, list[int]] = {}
    for space in way.plans:
        for name, called in list(space.items()):
            kind = _kind(name) if callable(called) else None
            if kind is not None:
                space[name] = _timed(called, spent.setdefault(kind, []))
    clock = _clock()
    found: dict[str, tuple[float, float]] = {}
    for _ in range(rounds):
        for times in spent.values():
            times.clear()
        way.step()
        for kind, times in spent.items():
            us = (sum(times) - clock * len(times)) / 1e3
            found[kind] = (len(times), min(us, found.get(kind, (0, us))[1]))
    return {k: v for k, v in found.items() if v[0]}


def _kind(name: str) -> str | None:
    first = name.partition("_")[0]
    if first in KINDS:
        return KINDS[first]
    if "_" not in name or first in ("count", "without", "code", "const"):
        return None
    return "views" if any(v in name for v in VIEWS) else "library calls"


def _timed(called: Callable[..., Any], times: list[int]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter_ns()
        result = called(*args, **kwargs)
        times.append(time.perf_counter_ns() - start)
        return result

    return run


def _clock() -> int:
    times: list[int] = []
    nothing = _timed(lambda: None, times)
    for _ in range(1000):
        nothing()
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["mobilenet_v2", "decode", "gpt2_small:train"])
    parser.add_argument("--rounds", type=int, default=400)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"fusewright-native: {native.absent() or 'used in the second column'}")
    for text in given.models:
        module, step = model(text)
        torch.compiler.reset()
        ways = [Way("eager", step(module))]
        for by_native in (False, True) if native.extension() else (False,):
            module, step = model(text)
            ways.append(compiled("native" if by_native else "python", module, step, by_native))
        measure(ways, given.rounds)
        print(text, "|", " | ".join(f"{w.name} {min(w.times):.0f}" for w in ways))
        for way in ways[1:]:
            parts = sorted(kinds(way, given.rounds // 4).items(), key=lambda kv: -kv[1][1])
            print(
                f"  {way.name}: " + ", ".join(f"{k} {us:.0f} ({n:.0f} x {us / n:.2f})" for k, (n, us) in parts),
                flush=True,
            )


if __name__ == "__main__":
    main()

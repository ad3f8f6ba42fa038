"""What a call of a tiny compiled function costs the host, in us: `python -m ci.cpu.calls [one_op mlp ...] [--rounds 40]`.

Each case is compiled in several ways, each from its own copy of the code, so that no cache of Dynamo's holds two entries. All ways
take turns in one thread, and the least CPU time per call of a turn is printed: eager, Dynamo's guards alone (`backend="eager"`),
`aot_eager`, Inductor, the plans (`never_slower=False`), and ours as users have it, after `--settle` calls.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn

BACKEND = "x86_onednn"
TURN = 60
"""Calls of one way in a row."""
WAYS: Mapping[str, Mapping[str, Any] | None] = {
    "eager": None, "dynamo": {"backend": "eager"}, "aot_eager": {"backend": "aot_eager"}, "inductor": {"backend": "inductor"},
    "plan": {"backend": BACKEND, "options": {"never_slower": False}}, "ours": {"backend": BACKEND},
}  # fmt: skip

Call = Callable[[], Any]
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
CASES: dict[str, Callable[[Compile], Call]] = {}


def _case(make: Callable[[Compile], Call]) -> Callable[[Compile], Call]:
    CASES[make.__name__.strip("_")] = make
    return make


@torch.compiler.disable
def _parts() -> None:
    """Break a graph."""


def _bound(compile: Compile, f: Callable[..., Any], *args: Any) -> Call:
    """A call of a compiled function without gradients."""
    g = compile(f)

    def call() -> Any:
        with torch.no_grad():
            return g(*args)

    return call


@_case
def _one_op(compile: Compile) -> Call:
    return _bound(compile, lambda x: torch.sin(x), torch.randn(64))


@_case
def _mlp(compile: Compile) -> Call:
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    return _bound(compile, lambda x: net(x), torch.randn(1, 32))


@_case
def _lstm_cell(compile: Compile) -> Call:
    cell = nn.LSTMCell(32, 32).eval()
    x, h, c = (torch.randn(1, 32) for _ in range(3))
    return _bound(compile, lambda x, h, c: cell(x, (h, c)), x, h, c)


@_case
def _norm_linear(compile: Compile) -> Call:
    norm, linear = nn.LayerNorm(64), nn.Linear(64, 64)
    return _bound(compile, lambda x: linear(norm(x)), torch.randn(4, 64))


@_case
def _parameters60(compile: Compile) -> Call:
    net = nn.Sequential(*(m for _ in range(30) for m in (nn.Linear(16, 16), nn.Tanh()))).eval()
    return _bound(compile, lambda x: net(x), torch.randn(1, 16))


@_case
def _breaks3(compile: Compile) -> Call:
    def f(x: torch.Tensor) -> torch.Tensor:  # Dynamo leaves a loop with a break to eager as a whole
        x = torch.sin(x) + 1
        _parts()
        x = torch.sin(x) + 1
        _parts()
        x = torch.sin(x) + 1
        _parts()
        return torch.cos(x) * 2

    return _bound(compile, f, torch.randn(64))


@_case
def _train_mlp(compile: Compile) -> Call:
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer, x, y = torch.optim.SGD(net.parameters(), lr=1e-3), torch.randn(8, 32), torch.randn(8, 8)
    forward = compile(lambda x, y: ((net(x) - y) ** 2).mean())

    def step() -> None:
        optimizer.zero_grad()
        forward(x, y).backward()
        optimizer.step()

    return step


@_case
def _inputs30(compile: Compile) -> Call:
    return _bound(compile, lambda xs: sum(x * 2 for x in xs), [torch.randn(16) for _ in range(30)])


@_case
def _views(compile: Compile) -> Call:
    return _bound(compile, lambda x, y: (x.view(-1)[:8], y, x + 1), torch.randn(4, 8), torch.randn(3))


@_case
def _mutation(compile: Compile) -> Call:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(0.5).add_(y)
        return x.sum()

    return _bound(compile, f, torch.randn(64), torch.randn(64))


def _copied(f: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a code object of its own."""
    assert isinstance(f, FunctionType)
    return FunctionType(f.__code__.replace(), f.__globals__, f.__name__, f.__defaults__, f.__closure__)


def _compiled(given: Mapping[str, Any] | None, f: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = f if given is None else torch.compile(_copied(f), **given)
    return compiled


def ways(name: str, chosen: Sequence[str]) -> dict[str, Call]:
    made: dict[str, Call] = {}
    for way in chosen:
        torch.manual_seed(0)
        made[way] = CASES[name](partial(_compiled, WAYS[way]))
    return made


def measure(calls: Mapping[str, Call], rounds: int, settle: int) -> dict[str, float]:
    """The least us of a call in each way, of turns of several calls."""
    for way, call in calls.items():
        for _ in range(settle if way == "ours" else 50):
            call()
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for way, call in calls.items():
            call()
            start = time.thread_time_ns()
            for _ in range(TURN):
                call()
            best[way] = min(best[way], (time.thread_time_ns() - start) / 1e3 / TURN)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="case", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--settle", type=int, default=800, help="calls of ours before the first turn")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| us |", " | ".join(given.ways), "|")
    print("|---" * (1 + len(given.ways)) + "|")
    for name in given.cases or CASES:
        torch.compiler.reset()
        found = measure(ways(name, given.ways), given.rounds, given.settle)
        print(f"| {name} |", " | ".join(f"{found[w]:.1f}" for w in given.ways), "|", flush=True)


if __name__ == "__main__":
    main()

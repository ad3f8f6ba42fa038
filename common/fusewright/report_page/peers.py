"""The time that eager and Inductor spend on each source line of the model, beside a plan's kernels."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fusewright.bench.device import Clock
from fusewright.graph.view import last_line
from fusewright.interface import HOST
from fusewright.report import GraphReport
from fusewright.report_page import observe
from fusewright.report_page.flow import label, owned

EAGER = "fusewright_null"
"""The backend that lowers nothing: its plan runs eager's own kernels one by one."""

_GRAPH = re.compile(r"^graph_\d+_")


@dataclass
class Piece:
    """A kernel or operator call: its name, its source lines, seconds per call (summed over its runs), the number of runs, and
    its positions in the graph's plan, if it has one."""

    name: str
    lines: tuple[str, ...]
    seconds: float
    runs: int = 1
    places: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class Group:
    """Source lines that one of our kernels computes together, with the time that each contender spends on them."""

    lines: list[str]
    ours: list[Piece]
    seconds: dict[str, float]
    parts: dict[str, list[tuple[str, float]]]
    """The other contenders' kernels by name, with seconds."""


def pieces(reports: Sequence[GraphReport], phase: str, rounds: int) -> list[Piece]:
    """The instructions of a phase's plans, timed; equal ones on equal lines are merged."""
    found: dict[tuple[str, tuple[str, ...]], Piece] = {}
    for g, report in enumerate(reports):
        if report.phase != phase or report.kept is None:
            continue
        made = owned(report.kept, {r.id: r for r in report.ops})
        host = observe.device_of(report.kept) == HOST
        for k, seconds in enumerate(observe.seconds(report.kept, rounds)):
            records = made.get(k)
            if records is None and not host:  # a view costs time only on the host
                continue
            lines = tuple(sorted({r.source for r in records or () if r.source}))
            name = "views" if records is None else label(report.kept.plan.instructions[k], report.kept)
            piece = found.setdefault((name, lines), Piece(name, lines, 0.0, 0))
            piece.seconds += seconds
            piece.runs += 1
            piece.places.append((g, k))
    return list(found.values())


def inductor(
    calls: Sequence[Sequence[tuple[str, float]]], told: Sequence[Mapping[str, Sequence[str]]], rounds: int
) -> list[Piece]:
    """Inductor's kernels: what ran in each call of one of its graphs (`profiled`), and the sources of each graph's
    kernels (`compat.inductor_provenance`). Kernels with the same name are matched in order."""
    found: dict[tuple[str, tuple[str, ...]], Piece] = {}
    for at, call in enumerate(calls):
        waiting: dict[str, deque[tuple[str, ...]]] = defaultdict(deque)
        for name, traces in told[at % len(told)].items() if told else ():
            waiting[_bare(name.partition(":")[0])].append(tuple(sorted({s for t in traces if (s := last_line(t))})))
        for name, seconds in call:
            known = waiting[_bare(name)]
            lines = known.popleft() if known else ()
            piece = found.setdefault((name, lines), Piece(_readable(name), lines, 0.0, 0))
            piece.seconds += seconds / rounds
            piece.runs += 1
    for piece in found.values():
        piece.runs = max(1, round(piece.runs / rounds))
    return list(found.values())


def profiled(call: Callable[[], Any], rounds: int) -> list[list[tuple[str, float]]]:
    """What runs in each call of an Inductor graph on the host: names of kernels and operators, with seconds, in order."""
    with torch.profiler.profile() as profile:
        for _ in range(rounds):
            call()
    graphs = [e for e in profile.events() or () if e.name.startswith("## Call CompiledFxGraph")]
    graphs.sort(key=lambda e: e.time_range.start)
    children = [sorted(g.cpu_children, key=lambda e: e.time_range.start) for g in graphs]
    return [[(e.name, e.time_range.elapsed_us() * 1e-6) for e in of] for of in children]


def _readable(name: str) -> str:
    return _GRAPH.sub("", name)


def _bare(name: str) -> str:
    """The common part of a kernel's names: "extern_kernels.addmm" and "aten::addmm"; "graph_0_cpp_fused_add_0"."""
    return _readable(name).removesuffix(".default").replace("::", ".").rsplit(".", 1)[-1]


def grouped(ours: Sequence[Piece], others: dict[str, Sequence[Piece]]) -> list[Group]:
    """Lines that one of our kernels joins form a group. A contender's kernel that covers several groups is split in proportion
    to eager's time on their lines. Kernels without source lines form groups of their own."""
    parent: dict[str, str] = {}

    def root(line: str) -> str:
        while parent.setdefault(line, line) != line:
            line = parent[line]
        return line

    for piece in ours:
        for line in piece.lines:
            parent[root(line)] = root(piece.lines[0])
    for line in (line for pieces in others.values() for p in pieces for line in p.lines):
        root(line)
    weight = _weights(others.get("eager", ()))
    groups: dict[str, Group] = {}

    def group(key: str) -> Group:
        return groups.setdefault(key, Group([], [], defaultdict(float), defaultdict(list)))

    for piece in ours:
        g = group(root(piece.lines[0]) if piece.lines else "")
        g.ours.append(piece)
        g.seconds["ours"] += piece.seconds
    for who, pieces in others.items():
        for piece in pieces:
            for key, share in _shares(map(root, piece.lines), piece.lines, weight):
                g = group(key)
                g.seconds[who] += share * piece.seconds
                g.parts[who].append((piece.name, share * piece.seconds))
    for line in parent:
        group(root(line)).lines.append(line)
    for g in groups.values():
        g.lines.sort()
        g.seconds, g.parts = dict(g.seconds), dict(g.parts)
    return sorted(groups.values(), key=lambda g: -max(g.seconds.values(), default=0.0))


def _weights(eager: Iterable[Piece]) -> dict[str, float]:
    weight: dict[str, float] = defaultdict(float)
    for piece in eager:
        for line in piece.lines:
            weight[line] += piece.seconds / len(piece.lines)
    return weight


def _shares(roots: Iterable[str], lines: Sequence[str], weight: dict[str, float]) -> list[tuple[str, float]]:
    """The share of a kernel's time for each group of lines."""
    sums: dict[str, float] = defaultdict(float)
    for key, line in zip(roots, lines, strict=True):
        sums[key] += max(weight.get(line, 0.0), 1e-9)
    total = sum(sums.values())
    return [(key, s / total) for key, s in sums.items()] if sums else [("", 1.0)]


def interleaved(calls: dict[str, Callable[[], Any]], rounds: int, clock: Clock) -> dict[str, list[float]]:
    """Seconds of whole calls until their results are available, in alternating order."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            call()  # the previous contender left the caches in its own state
            found[name].append(clock.seconds(call))
    return found

"""Everything that the page shows, as one JSON document: a real compilation, recorded, then examined part by part."""

from __future__ import annotations

import copy
import linecache
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from fusewright import _torch_compat as compat
from fusewright import report
from fusewright.bench.cases import resolve, resolve_step
from fusewright.bench.device import Clock, computes_fp64
from fusewright.bench.report import environment
from fusewright.dynamo import entry, fusewright
from fusewright.errors import printable
from fusewright.graph.origin import frames
from fusewright.interface import HOST
from fusewright.report import GraphReport, Kept
from fusewright.report_page import flow, layers, observe, peers
from fusewright.report_page.residency import residency

log = logging.getLogger("fusewright")

SCHEMA = "fusewright.report"
SCHEMA_VERSION = 1
ROUNDS = 15
"""Runs of each plan; the median counts."""
TEXT = 60_000
"""Maximum characters of a kernel's source that are shown."""
INDUCTOR_ROUNDS = 5
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Asked:
    """What the page was requested for."""

    model: str
    backend: str = "fusewright"
    dtype: Any = "fp32"
    size: Any = "full"
    train: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    against_inductor: bool = True
    device: str = HOST


@dataclass
class Subject:
    """A model that every contender calls in the same way: `compiled(backend)` is a call of it, freshly compiled."""

    asked: Asked
    built: Any
    files: dict[str, str] = field(default_factory=dict)

    def compiled(self, backend: Any, options: Mapping[str, Any] | None = None) -> Callable[[], Any]:
        torch.compiler.reset()
        if self.asked.train:
            step = copy.deepcopy(self.built)
            step.compiled = torch.compile(step.module, backend=backend, options=dict(options or {}) or None)
            return step.loss_and_grads
        fn = torch.compile(self.built.fn, backend=backend, options=dict(options or {}) or None)
        return self._quietly(fn)

    def eager(self) -> Callable[[], Any]:
        if self.asked.train:
            return copy.deepcopy(self.built).loss_and_grads
        return self._quietly(self.built.fn)

    def _quietly(self, fn: Callable[..., Any]) -> Callable[[], Any]:
        def call() -> Any:
            with torch.no_grad():
                return self.built.run(fn)

        return call


def collect(asked: Asked, say: Progress = lambda _: None) -> dict[str, Any]:
    """The document of a model, or of one step of a decoding. Raises what building or running the model raises."""
    clock = Clock(asked.device)
    clock.begin()
    case = (asked.model, asked.size, asked.dtype, asked.device)
    subject = Subject(asked, resolve_step(*case) if asked.train else resolve(*case, steps=1))
    say("compiling")
    reports, breaks, first, spans = _first_call(subject)
    call = subject.compiled(asked.backend, asked.options)
    call()
    calls = {"eager": subject.eager(), "ours": call}
    say("timing kernels")
    ours = {p: peers.pieces(reports, p, ROUNDS) for p in _phases(reports)}
    others: dict[str, dict[str, Sequence[peers.Piece]]] = {p: {} for p in ours}
    say("timing eager's kernels")
    for phase, found in _eager(subject, ours).items():
        others[phase]["eager"] = found
    missing = ""
    if asked.against_inductor:
        say("compiling with Inductor")
        inductor, missing = _inductor(subject, others)
        calls |= inductor
        call = subject.compiled(asked.backend, asked.options)  # the reset before Inductor's compilation discarded ours
        call()
        calls["ours"] = call
    say("timing calls")
    totals = {who: statistics.median(s) for who, s in peers.interleaved(calls, ROUNDS, clock).items()}
    say("comparing with fp64")
    files = _files(reports)
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "model": _shown(asked.model),
        "backend": reports[0].backend if reports else asked.backend,
        "dtype": asked.dtype,
        "size": asked.size,
        "mode": "train" if asked.train else "inference",
        "options": dict(asked.options),
        "device": asked.device,
        "environment": environment(asked.device),
        "breaks": breaks,
        "seconds": totals,
        "without_inductor": missing,
        "first_call": {"seconds": first, "spans": spans},
        "bars": [_bars(p, ours[p], others[p], files) for p in ours],
        "graphs": [_graph(r) for r in reports],
        "kernels": _kernels(reports),
    }


def _shown(model: str) -> str:
    """The name of a model without the folders of its file, since pages are shared."""
    file, colon, function = model.rpartition(":")
    return f"{Path(file).name}{colon}{function}"


def _phases(reports: Sequence[GraphReport]) -> list[str]:
    return list(dict.fromkeys(r.phase for r in reports))


@contextmanager
def _silent() -> Iterator[None]:
    """Suppress the line that each graph logs; the page has the details."""
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _first_call(subject: Subject) -> tuple[list[GraphReport], dict[str, int], float, list[dict[str, Any]]]:
    """Reports of all graphs, reasons of graph breaks, seconds of the first call and its stages as nested spans."""
    breaks = compat.counted("graph_break")
    inside: list[tuple[float, float]] = []
    with _silent(), report.recording(keep=True) as reports:
        call = subject.compiled(_timed(subject.asked.backend, inside), subject.asked.options)
        clock = Clock(subject.asked.device)
        clock.wait()
        start = time.perf_counter()
        call()
        clock.wait()
        end = time.perf_counter()
    new = {k: n - breaks.get(k, 0) for k, n in compat.counted("graph_break").items() if n > breaks.get(k, 0)}
    return [r for r in reports if not r.superseded], new, end - start, _spans(start, end, inside, reports)


def _timed(name: str, inside: list[tuple[float, float]]) -> Callable[..., Any]:
    """Wrap the backend to note begin and end of Dynamo's calls to it."""
    backend = fusewright if name == "fusewright" else entry(name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return backend(*args, **kwargs)
        finally:
            inside.append((start, time.perf_counter()))

    return timed


def _spans(
    start: float, end: float, inside: Sequence[tuple[float, float]], reports: Sequence[GraphReport]
) -> list[dict[str, Any]]:
    """The first call, divided into turns of Dynamo and the backend, these into the stages of each graph."""
    found = [("first call", start, end, 0)]
    at = start
    for a, b in inside:
        found += [("Dynamo", at, a, 1), ("backend", a, b, 1)]
        at = b
    found.append(("guards, first run", at, end, 1))
    stages = sorted((s, s + d, f"{name}, {r.phase}") for r in reports for name, s, d in r.spans)
    for a, b in inside:
        first = min((s for s, _, _ in stages if a <= s <= b), default=a)
        found.append(("capture", a, first, 2))
    found += [(name, s, e, 2) for s, e, name in stages]
    return [{"name": n, "start": s - start, "seconds": e - s, "depth": k} for n, s, e, k in found if e > s]


def _eager(subject: Subject, phases: Mapping[str, Any]) -> dict[str, list[peers.Piece]]:
    """Eager's kernels, as the plan of the backend that lowers nothing."""
    with _silent(), report.recording(keep=True) as reports:
        subject.compiled(peers.EAGER, {"cache": False})()
    live = [r for r in reports if not r.superseded]
    return {p: peers.pieces(live, p, ROUNDS) for p in phases}


def _inductor(
    subject: Subject, others: dict[str, dict[str, Sequence[peers.Piece]]]
) -> tuple[dict[str, Callable[[], Any]], str]:
    """Inductor's call, with its kernels added to `others` by phase; and, if there are none, the reason."""
    try:
        with compat.inductor_provenance() as told:
            call = subject.compiled("inductor")
            call()
            call()
        if Clock(subject.asked.device).asynchronous:
            return {"inductor": call}, "its kernels are told apart on the host only"
        runs = peers.profiled(call, INDUCTOR_ROUNDS)
    except Exception as e:  # the page is about us, whatever prevents Inductor from running
        return {}, f"Inductor failed: {type(e).__name__}: {printable(e)[:300]}"
    phases = list(others)
    if len(told) != len(phases) or len(runs) != INDUCTOR_ROUNDS * len(told):
        return {"inductor": call}, f"its {len(told)} graphs cannot be laid beside our {len(phases)} phases"
    for k, phase in enumerate(phases):
        others[phase]["inductor"] = peers.inductor(runs[k :: len(phases)], [told[k]], INDUCTOR_ROUNDS)
    return {"inductor": call}, ""


def _bars(
    phase: str, ours: Sequence[peers.Piece], others: dict[str, Sequence[peers.Piece]], files: Mapping[str, str]
) -> dict[str, Any]:
    groups = [asdict(g) for g in peers.grouped(ours, others)]
    code = {line: text for g in groups for line in g["lines"] if (text := _code(line, files))}
    return {"phase": phase, "who": ["ours", *others], "groups": groups, "code": code}


def _files(reports: Sequence[GraphReport]) -> dict[str, str]:
    """Source files of the model by file name; ambiguous names are left out."""
    found: dict[str, str] = {}
    for r in reports:
        for node in r.kept.index.ops if r.kept else ():
            for path, _, _ in frames(node.meta.get("stack_trace") or ""):
                name = path.rsplit("/", 1)[-1]
                found[name] = path if found.get(name, path) == path else ""
    return found


def _code(line: str, files: Mapping[str, str]) -> str:
    """The text of a line of the model's source."""
    name, _, number = line.rpartition(":")
    return linecache.getline(files.get(name, ""), int(number)).strip()[:200] if number.isdigit() else ""


def _graph(r: GraphReport) -> dict[str, Any]:
    kept, records = r.kept, {o.id: o for o in r.ops}
    found: dict[str, Any] = {
        "phase": r.phase, "capture": r.capture, "regions": r.regions, "rules": {k: n for k, n in r.rules.items() if n},
        "bugs": r.bugs, "replay": r.replay, "fates": _outcomes(r), "plan": r.texts.get("plan", ""),
    }  # fmt: skip
    if kept is None:
        return found
    seconds = observe.seconds(kept, ROUNDS)
    nodes = flow.nodes(kept, records)
    found["nodes"] = [{**asdict(n), "seconds": seconds[n.at] if seconds else None} for n in nodes]
    found["memory"] = _memory(kept, nodes)
    found["layers"], found["not_judged"] = _layers(r, kept)
    return found


def _outcomes(r: GraphReport) -> list[dict[str, Any]]:
    """Ops grouped by where they run and why, most expensive first."""
    groups: dict[tuple[str, str, str], dict[str, Any]] = {}
    total = sum(o.seconds for o in r.ops) or 1e-30
    for o in r.ops:
        why = o.note if o.where == "lowered" else o.verdict.detail if o.where == "carried" else str(o.verdict)
        fresh = {"op": o.op, "where": o.where, "why": why, "n": 0, "share": 0.0, "sources": []}
        group = groups.setdefault((o.op, o.where, why), fresh)
        group["n"] += 1
        group["share"] += o.seconds / total
        if o.source and o.source not in group["sources"]:
            group["sources"].append(o.source)
    return sorted(groups.values(), key=lambda g: -g["share"])


def _memory(kept: Kept, nodes: Sequence[flow.Node]) -> dict[str, Any]:
    found = residency(kept.plan)
    labels = {n.at: n.label for n in nodes}
    constants = {i for i, s in kept.plan.specs.items() if s.const}
    given = dict(zip(kept.plan.inputs, kept.args, strict=False))
    sizes = {i: a.untyped_storage().nbytes() for i, a in given.items() if isinstance(a, torch.Tensor)}
    return {
        **asdict(found),
        "peak": found.peak,
        "largest": [{"bytes": b, "label": labels.get(k, f"instruction {k}"), "at": k} for b, k in found.largest],
        "weights": sum(n for i, n in sizes.items() if i in constants),
        "inputs": sum(n for i, n in sizes.items() if i not in constants),
    }


def _layers(r: GraphReport, kept: Kept) -> tuple[list[dict[str, Any]], str]:
    """The judged values, or the reason why there are none."""
    if r.phase != "infer":
        return [], "only graphs for inference are compared value by value"
    if not computes_fp64(device := observe.device_of(kept)):
        return [], f"torch has no fp64 on {device}"
    try:
        return [asdict(j) for j in layers.judge(kept)], ""
    except Exception as e:  # an op without an fp64 reference must not lose the page
        return [], f"{type(e).__name__}: {printable(e)[:300]}"


def _kernels(reports: Sequence[GraphReport]) -> dict[str, dict[str, str]]:
    """The text of each loop kernel by hash: the toolkit's, and the backend's generated code."""
    found = {}
    for r in reports:
        for key, code in (r.kept.kernels if r.kept else {}).items():
            text = code.source() if code.source is not None else ""
            found[key] = {"ir": _shortened(_ir(code.kernel)), "source": _shortened(text)}
    return found


def _ir(kernel: Any) -> str:
    from fusewright.toolkit.ir import Kernel
    from fusewright.toolkit.ir.printer import to_text

    return to_text(kernel) if isinstance(kernel, Kernel) else f"written by hand: {type(kernel).__name__}"


def _shortened(text: str) -> str:
    return text if len(text) <= TEXT else f"{text[:TEXT]}\n... {len(text) - TEXT} more characters"

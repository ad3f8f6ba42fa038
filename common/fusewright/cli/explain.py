"""`fusewright explain`: what happens to a model, from the record of a real compilation."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fusewright import _torch_compat as compat
from fusewright import registry, report
from fusewright.accuracy import Accuracy, compare
from fusewright.bench.accuracy import reference, train_reference
from fusewright.bench.cases import resolve, resolve_step
from fusewright.bench.device import Clock
from fusewright.bench.suite import flatten_outputs
from fusewright.cli import case
from fusewright.cli.files import Written
from fusewright.errors import counted
from fusewright.interface import HOST, Unavailable
from fusewright.report import GraphReport, OpRecord

STAGES = ("canonicalize", "simplify", "constants", "lower")

WHERE = ("lowered", "carried", "eager", "view")


@dataclass(frozen=True)
class Group:
    """Ops with the same outcome. `share` is their part of the estimated time of a call."""

    op: str
    n: int
    shapes: tuple[str, ...]
    why: str
    sources: tuple[str, ...]
    share: float


@dataclass(frozen=True)
class Explained:
    """A compilation seen from outside. `recompiles`: graphs compiled by a second call with the same inputs. `skipped`: how many
    functions Dynamo left to plain Python; `untraced`: what it could not trace, if so."""

    model: str
    backend: str
    dtype: str
    graphs: list[GraphReport]
    breaks: dict[str, int]
    recompiles: int
    compile_seconds: float
    accuracy: Accuracy | None = None
    skipped: int = 0
    untraced: tuple[str, ...] = ()

    def ops(self, where: str) -> list[OpRecord]:
        return [r for g in self.graphs for r in g.ops if r.where == where]

    def seconds(self) -> float:
        return sum(r.seconds for g in self.graphs for r in g.ops) or 1e-30


@click.command()
@case.arguments
@click.option("--ir", "stage", type=click.Choice(STAGES), help="Print the graphs after this stage.")
@click.option("--plan", is_flag=True, help="Print the plan of every graph as the Python function that it is.")
@click.option("--accuracy", is_flag=True, help="The error against fp64, beside eager's own.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
@click.option("--output", "-o", type=Written(), help="Write the JSON to this file.")
def explain(
    model: str, backend: str, device: str | None, dtype: Any, size: Any, train: bool, given: tuple[str, ...], stage: str | None,
    plan: bool, accuracy: bool, as_json: bool, output: Path | None,
) -> None:  # fmt: skip
    """Show what becomes of MODEL, file.py:function or a name that bench knows: coverage, every fallback with its
    reason and source line, regions, rules and the plan.
    """
    found = case.chosen(model, backend, device, train, given)
    explained = run(model, backend, dtype, size, train, found.options, accuracy, found.device)
    if output is not None:
        output.write_text(json.dumps(as_document(explained), indent=1) + "\n")
        click.echo(f"wrote {output}", err=True)
    elif as_json:
        click.echo(json.dumps(as_document(explained), indent=1))
    elif stage or plan:
        _print_texts(explained, stage, plan)
    else:
        _print(explained)


def run(
    model: str, backend: str, dtype: Any, size: Any, train: bool, options: Mapping[str, Any] | None = None,
    accuracy: bool = False, device: str = HOST,
) -> Explained:  # fmt: skip
    """Compile and call the model twice, recording; then judge its results, if `accuracy`. For a decoding, run one step."""
    options, clock = dict(options or {}), Clock(device)
    clock.begin()
    make = _train_call if train else _inference_call
    call = make(model, size, dtype, device, options)
    torch.compiler.reset()
    breaks, untraced, before = compat.counted("graph_break"), compat.counted("unimplemented"), compat.counted("frames")
    log = logging.getLogger("fusewright")
    log.addFilter(_is_news)
    try:
        with report.recording() as reports:
            seconds = clock.seconds(lambda: call(backend))
            first = len(reports)
            call(backend)
    finally:
        log.removeFilter(_is_news)
    new, frames = _more(compat.counted("graph_break"), breaks), _more(compat.counted("frames"), before)
    skipped = frames.get("total", 0) - frames.get("ok", 0)
    reasons = tuple(_more(compat.counted("unimplemented"), untraced)) if skipped else ()
    actual = reports[0].backend if reports else backend
    judged = (_train_accuracy if train else _accuracy)(model, size, dtype, device, backend, options) if accuracy else None
    return Explained(model, actual, dtype, reports, new, len(reports) - first, seconds, judged, skipped, reasons)


def _is_news(record: logging.LogRecord) -> bool:
    """Filter for log records: drop notes that only point to this command."""
    return report.SEE not in record.getMessage()


def _more(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """Counts that have grown, with the increase."""
    return {k: n - before.get(k, 0) for k, n in now.items() if n > before.get(k, 0)}


def _accuracy(model: str, size: Any, dtype: Any, device: str, backend: str, options: dict[str, Any]) -> Accuracy:
    """Outputs of the compiled model beside eager's and those in fp64."""
    built = resolve(model, size, dtype, device, steps=1)
    with torch.no_grad():
        ours = flatten_outputs(built.run(torch.compile(built.fn, backend=backend, options=options)))
        return compare(reference(built), flatten_outputs(built.run()), ours, dtype)


def _train_accuracy(model: str, size: Any, dtype: Any, device: str, backend: str, options: dict[str, Any]) -> Accuracy:
    """The same for the loss and the gradients of a training step."""
    eager = resolve_step(model, size, dtype, device).repeatable()
    ours = copy.deepcopy(eager)
    ours.compiled = torch.compile(ours.module, backend=backend, options=options)
    return compare(train_reference(eager), eager.loss_and_grads(), ours.loss_and_grads(), dtype)


def _inference_call(model: str, size: Any, dtype: Any, device: str, options: dict[str, Any]) -> Callable[[str], Any]:
    built = resolve(model, size, dtype, device, steps=1)
    compiled: list[Any] = []

    def call(backend: str) -> Any:
        if not compiled:
            compiled.append(torch.compile(built.fn, backend=backend, options=options))
        with torch.no_grad():
            return built.run(compiled[0])

    return call


def _train_call(model: str, size: Any, dtype: Any, device: str, options: dict[str, Any]) -> Callable[[str], Any]:
    step = resolve_step(model, size, dtype, device)

    def call(backend: str) -> Any:
        if step.compiled is None:
            step.compiled = torch.compile(step.module, backend=backend, options=options)
        return step.loss_and_grads()

    return call


def fallbacks(e: Explained) -> list[Group]:
    """What eager runs, by op and reason, most expensive first."""
    return _grouped(e, e.ops("eager"), lambda r: str(r.verdict))


def lowered(e: Explained) -> list[Group]:
    """What the backend runs, by op and kind of lowering, most expensive first."""
    return _grouped(e, e.ops("lowered"), lambda r: r.note)


def carried(e: Explained) -> list[Group]:
    """What runs as eager's own calls inside regions, by op and reason, most expensive first."""
    return _grouped(e, e.ops("carried"), lambda r: r.verdict.detail)


def _grouped(e: Explained, records: Iterable[OpRecord], why: Callable[[OpRecord], str]) -> list[Group]:
    groups: dict[tuple[str, str], list[OpRecord]] = {}
    for r in records:
        groups.setdefault((r.op, why(r)), []).append(r)
    total = e.seconds()
    made = [
        Group(op, len(rs), _distinct(r.shape for r in rs), reason, _distinct(r.source for r in rs), _sum(rs) / total)
        for (op, reason), rs in groups.items()
    ]  # fmt: skip
    return sorted(made, key=lambda g: -g.share)


def _sum(records: Sequence[OpRecord]) -> float:
    return sum(r.seconds for r in records)


def _distinct(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(t for t in texts if t))


def as_document(e: Explained) -> dict[str, Any]:
    """Everything as JSON."""
    return {
        "model": e.model,
        "backend": e.backend,
        "dtype": e.dtype,
        "breaks": e.breaks,
        "skipped": e.skipped,
        "untraced": list(e.untraced),
        "recompiles": e.recompiles,
        "compile_seconds": e.compile_seconds,
        "accuracy": None if e.accuracy is None else e.accuracy.as_json(),
        "coverage": coverage(e),
        "fallbacks": [asdict(g) for g in fallbacks(e)],
        "carried": [asdict(g) for g in carried(e)],
        "lowered": [asdict(g) for g in lowered(e)],
        "graphs": [
            {
                "phase": g.phase,
                "capture": g.capture,
                "regions": g.regions,
                "rules": dict(g.rules),
                "stages": g.stages,
                "bugs": g.bugs,
                "ops": {where: g.count(where) for where in WHERE},
            }
            for g in e.graphs
        ],
    }


def coverage(e: Explained) -> dict[str, float]:
    """Shares of lowered ops, by count (without views, which are free) and by estimated time, and the shares of carried ops."""
    ops, times = ({w: measure(e.ops(w)) for w in WHERE[:-1]} for measure in (len, _sum))
    counted, timed = max(sum(ops.values()), 1), max(sum(times.values()), 1e-30)
    return {
        "ops": ops["lowered"] / counted,
        "time": times["lowered"] / timed,
        "carried_ops": ops["carried"] / counted,
        "carried_time": times["carried"] / timed,
    }


# ---------------------------------------------------------------- text


def _print(e: Explained) -> None:
    console = Console(emoji=False, soft_wrap=True, highlight=False)
    if not console.is_terminal:
        console.width = 200  # a file or a pipe has no width of its own, and nothing should be truncated there
    say: Callable[[str], None] = lambda text: console.print(escape(text))  # noqa: E731
    _header(e, say)
    if not e.graphs:
        say("Dynamo captured no graph: all of it runs in eager.")
        return
    console.print(_graph_table(e))
    _group_table(console, e, "in eager", "reason", fallbacks(e))
    _group_table(console, e, "eager's own calls inside of regions", "why", carried(e))
    _group_table(console, e, f"by {e.backend}", "how", lowered(e))
    rules = _summed(g.rules for g in e.graphs)
    say("\nrules: " + (", ".join(f"{k} {n}" for k, n in sorted(rules.items()) if n) or "none applied"))
    stages = _summed(g.stages for g in e.graphs)
    say("stages: " + ", ".join(f"{k} {1e3 * s:.0f} ms" for k, s in stages.items()))
    for bug in dict.fromkeys(b for g in e.graphs for b in g.bugs):
        console.print(f"[red]bug of the backend[/red]: {escape(bug)}")


def _header(e: Explained, say: Callable[[str], None]) -> None:
    found = registry.info(e.backend) if e.backend in registry.plugins() else None
    device = "" if found is None or isinstance(found.device, Unavailable) else f" on {found.device.arch}"
    say(f"{e.model}, {e.dtype}, by {e.backend}{device}: first call {e.compile_seconds:.2f} s")
    breaks = sum(e.breaks.values())
    again = counted(e.recompiles, "recompile")
    say(f"{counted(len(e.graphs), 'graph')}, {counted(breaks, 'graph break')}, {again} at a second equal call")
    for reason, n in e.breaks.items():
        say(f"  break ({n}x): {' '.join(reason.split('Hint:')[0].split())}")
    if e.skipped:
        say(f"Dynamo gave {counted(e.skipped, 'function')} back to Python whole, so eager computes all of it:")
    for reason in e.untraced:
        say(f"  {_first_hint(reason)}")
    share = coverage(e)
    say(f"lowered: {share['ops']:.0%} of the ops, {share['time']:.0%} of the estimated time (a roofline, no timing)")
    say(f"carried: {share['carried_ops']:.0%} of the ops, {share['carried_time']:.0%} of the time, by eager's own calls in regions")
    if e.accuracy is not None:
        say(_accuracy_line(e.accuracy))
    say("")


def _first_hint(reason: str) -> str:
    """Dynamo's message on one line, with the first of its hints."""
    text, *hints = reason.split("Developer debug context")[0].split("Hint:")
    return " ".join("Hint:".join((text, *hints[:1])).split())


def _accuracy_line(a: Accuracy) -> str:
    verdict = "passes" if a.passed else f"fails{f' ({a.reason})' if a.reason else ''}"
    ours = f"largest {a.err_max:.2e}, rms {a.err_rms:.2e}; eager's {a.eager_err_max:.2e}, {a.eager_err_rms:.2e}"
    return f"error against fp64: {ours}: {verdict} the rule of twice eager's"


def _graph_table(e: Explained) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("graph", "phase", "lowered", "carried", "eager", "views", "regions", "capture"):
        numeric = title in ("lowered", "carried", "eager", "views", "regions")
        table.add_column(title, justify="right" if numeric else "left", no_wrap=True)
    for i, g in enumerate(e.graphs):
        counts = [str(g.count(where)) for where in WHERE]
        table.add_row(str(i), g.phase, *counts, str(g.regions), escape(g.capture))
    return table


def _group_table(console: Console, e: Explained, title: str, reason: str, groups: Sequence[Group]) -> None:
    n = sum(g.n for g in groups)
    console.print(escape(f"\n{title}: {counted(n, 'op')}, {sum(g.share for g in groups):.0%} of the estimated time"))
    if not groups:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("op", "n", "time", "shape", "source", reason):
        right = name in ("n", "time")
        table.add_column(name, justify="right" if right else "left", no_wrap=right or name == "op", overflow="fold")
    for g in groups:
        cells = (g.op, str(g.n), f"{g.share:.1%}", _few(g.shapes), _few(g.sources), g.why)
        table.add_row(*map(escape, cells))
    console.print(table)


def _few(texts: Sequence[str], n: int = 2) -> str:
    """The first few texts, and the number of others."""
    return ", ".join(texts[:n]) + (f" +{len(texts) - n}" if len(texts) > n else "")


def _summed(tables: Iterable[Any]) -> dict[str, Any]:
    total: dict[str, Any] = {}
    for t in tables:
        for k, v in t.items():
            total[k] = total.get(k, 0) + v
    return total


def _print_texts(e: Explained, stage: str | None, plan: bool) -> None:
    """Print graphs or plans as plain text, suitable for a file."""
    wanted = [s for s in (stage, "plan" if plan else None) if s]
    for i, g in enumerate(e.graphs):
        for name in wanted:
            click.echo(f"# graph {i} ({g.phase}, {g.capture}), {name}")
            click.echo(g.texts.get(name, ""))

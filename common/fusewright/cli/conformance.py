"""`fusewright conformance`: whether a backend is correct, and how much it lowers."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fusewright import registry
from fusewright.cli.files import Written
from fusewright.conformance import record
from fusewright.conformance.coverage import Coverage
from fusewright.conformance.jobs import levels, run
from fusewright.conformance.record import Record
from fusewright.conformance.settings import DTYPES, Settings
from fusewright.conformance.verdicts import Check, Summary, Verdict, summary
from fusewright.interface import Device, Unavailable

_FILE = click.Path(dir_okay=False, path_type=Path)


def _levels(_context: click.Context, _parameter: click.Parameter, value: str) -> list[str]:
    try:
        return levels.between(value)
    except ValueError as e:
        raise click.BadParameter(str(e)) from None


def _shard(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    try:
        run.shard([], value)
    except ValueError as e:
        raise click.BadParameter(str(e)) from None
    return value


def _dtypes(_context: click.Context, _parameter: click.Parameter, value: str) -> tuple[str, ...]:
    found = tuple(value.split(","))
    if unknown := [d for d in found if d not in DTYPES]:
        raise click.BadParameter(f"{', '.join(unknown)}: the kit knows {', '.join(DTYPES)}")
    return found


@click.command()
@click.option(
    "--backend", "names", multiple=True, metavar="NAME", help="Which one  [default: every installed vendor's]"
)
@click.option("--simulate", is_flag=True, help="On a simulated device of the backend.")
@click.option("--level", "wanted", callback=_levels, default="C0..C4", show_default=True, help="C2, or a range.")
@click.option(
    "--shard", callback=_shard, default="1/1", show_default=True, metavar="K/N", help="The k-th of n equal parts."
)
@click.option("--jobs", type=click.IntRange(0), default=1, show_default=True, help="Processes; 0: this one alone.")
@click.option("--dtypes", callback=_dtypes, default=",".join(DTYPES), show_default=True, help="Of C2 and C4.")
@click.option("--samples", type=click.IntRange(0), default=1, show_default=True, help="Of each OpInfo entry; 0: all.")
@click.option("--opinfo/--no-opinfo", default=True, show_default=True, help="Torch's OpInfo database in C2.")
@click.option("--rows/--no-rows", default=True, show_default=True, help="The opset's rows in C2.")
@click.option("--part", type=click.IntRange(1), default=1, help="Every n-th row, entry, model and fault: a quick look.")
@click.option("--limit", type=click.FloatRange(1), default=300.0, show_default=True, help="Seconds for one job.")
@click.option(
    "--merge", "merge", type=_FILE, multiple=True, help="Run nothing: take what --json wrote, of shards or machines."
)
@click.option("--coverage", "ratchet", type=_FILE, help="Fail when a lowering of this file is lost.")
@click.option("--renew", is_flag=True, help="Write --coverage instead: what the run had of it, the rest stays.")
@click.option("--json", "json_file", type=Written(), help="Write every check to this file.")
@click.option("--verbose", "-v", is_flag=True, help="Print checks that are right too.")
def conformance(
    names: tuple[str, ...], simulate: bool, wanted: list[str], shard: str, jobs: int, dtypes: tuple[str, ...], samples: int,
    opinfo: bool, rows: bool, part: int, limit: float, merge: tuple[Path, ...], ratchet: Path | None, renew: bool,
    json_file: Path | None, verbose: bool,
) -> None:  # fmt: skip
    """Check backends: contract, fallback, ops, faults, models. Exits with 1 when one is wrong, 2 when one cannot run here."""
    if merge:
        found = _merged(merge, names, verbose)
    else:
        found = {}
        wanted_names = names or tuple(n for n, p in registry.plugins().items() if not p.reference)
        for name in wanted_names:  # report unknown names before spending hours on the others
            registry.info(name)
        for name in wanted_names:
            settings = Settings(name, simulate, samples, dtypes, opinfo, part, rows)
            found[name] = _run(settings, run.shard(levels.jobs(wanted, settings), shard), jobs, limit, verbose)
    lost = _held_to(ratchet, renew, found) if ratchet is not None else []
    for line in lost:
        click.echo(f"no longer lowered: {line}")
    if json_file is not None:
        record.write(json_file, found.values())
    available = all(r.available for r in found.values())
    sys.exit(1 if lost or not all(summary(r.checks).ok for r in found.values()) else 0 if available else 2)


def _merged(paths: Sequence[Path], names: Sequence[str], verbose: bool) -> dict[str, Record]:
    """Records of files, of all their backends or of those named, reported like a run's."""
    try:
        found = {n: r for n, r in record.merged(paths).items() if not names or n in names}
    except (OSError, ValueError) as e:
        raise click.UsageError(str(e)) from None
    if missing := set(names) - set(found):
        raise click.UsageError(f"no file is of {', '.join(sorted(missing))}")
    for one in found.values():
        for check in one.checks:
            _say(check, verbose)
        _tell(one)
    return found


def _held_to(path: Path, renew: bool, found: Mapping[str, Record]) -> list[str]:
    """Lowerings in the file that the checks no longer find; none if it is rewritten."""
    if len(found) != 1:
        raise click.UsageError("--coverage is of one backend: name it by --backend")
    (one,) = found.values()
    if not one.available:
        raise click.UsageError(f"{one.backend} is unavailable: {one.device}")
    if not renew:
        return Coverage.read(path).lost(one.checks)
    try:
        before = Coverage.read(path)
    except (OSError, ValueError):  # no file, or one of another version
        Coverage.of(one).write(path)
    else:
        Coverage.of(one).over(before).write(path)
    return []


def _run(settings: Settings, jobs: Sequence[dict[str, str]], processes: int, limit: float, verbose: bool) -> Record:
    found, start = [], time.monotonic()
    for check in run.checks(settings, jobs, processes, limit, lambda done: _progress(done, len(jobs), start)):
        found.append(check)
        _say(check, verbose)
    _clear()
    one = Record.of(settings, found)
    _tell(one, settings.device(), time.monotonic() - start)
    return one


def _progress(done: int, total: int, start: float) -> None:
    """A progress line that overwrites itself."""
    if sys.stderr.isatty():
        _clear()
        click.echo(f"{done} of {total} jobs, {time.monotonic() - start:.0f} s", err=True, nl=False)


def _clear() -> None:
    if sys.stderr.isatty():
        click.echo("\r\x1b[K", err=True, nl=False)


def _say(check: Check, verbose: bool) -> None:
    if check.verdict.bad or verbose:
        _clear()
        click.echo(f"{check.level} {check.name}: {check.verdict} {check.detail}".rstrip())


def _tell(one: Record, device: Device | Unavailable | None = None, seconds: float | None = None) -> None:
    console = Console(emoji=False, soft_wrap=True, highlight=False)
    figures = summary(one.checks)
    console.print(_table(figures))
    if isinstance(device, Unavailable):
        console.print(f"{one.backend} is NOT AVAILABLE here: {escape(device.reason)}. Fix: {escape(device.fix)}")
        console.print("only what needs no device was checked")
    else:
        simulated = " (simulated)" if one.simulated else ""
        console.print(f"{one.backend} on {one.device}{simulated}, torch {', '.join(one.torch)}")
    skipped = sum(c.verdict is Verdict.SKIPPED for c in one.checks)
    ops = f", ops of models lowered {figures.ops}" if figures.ops.total else ""
    console.print(f"[bold]correct {figures.correct}[/bold], [bold]lowered {figures.lowered}[/bold]{ops}")
    console.print(f"{skipped} skipped" + ("" if seconds is None else f", {seconds:.0f} s"))


def _table(figures: Summary) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    used = [v.value for v in Verdict if any(v.value in counts for counts in figures.verdicts.values())]
    for title in ("level", *used):
        table.add_column(title, justify="left" if title == "level" else "right")
    for level, counts in figures.verdicts.items():
        table.add_row(f"{level} {levels.LEVELS[level]}", *(str(counts.get(v, 0)) for v in used))
    return table

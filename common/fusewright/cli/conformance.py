"""`fusewright conformance`: whether a backend is right, and how much it lowers."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fusewright import registry
from fusewright.conformance.coverage import Coverage
from fusewright.conformance.jobs import levels, run
from fusewright.conformance.settings import Settings
from fusewright.conformance.verdicts import Check, Summary, Verdict, summary
from fusewright.interface import Unavailable

SCHEMA = 1
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
@click.option("--samples", type=click.IntRange(0), default=1, show_default=True, help="Of each OpInfo entry; 0: all.")
@click.option("--opinfo/--no-opinfo", default=True, show_default=True, help="Torch's OpInfo database in C2.")
@click.option("--part", type=click.IntRange(1), default=1, help="Every n-th row, entry, model and fault: a quick look.")
@click.option("--limit", type=click.FloatRange(1), default=300.0, show_default=True, help="Seconds for one job.")
@click.option("--coverage", "ratchet", type=_FILE, help="Fail when a lowering of this file is lost.")
@click.option("--renew", is_flag=True, help="Write --coverage anew instead: after a whole C2.")
@click.option("--json", "json_file", type=_FILE, help="Write every check to this file.")
@click.option("--verbose", "-v", is_flag=True, help="Print checks that are right too.")
def conformance(
    names: tuple[str, ...], simulate: bool, wanted: list[str], shard: str, jobs: int, samples: int, opinfo: bool, part: int,
    limit: float, ratchet: Path | None, renew: bool, json_file: Path | None, verbose: bool,
) -> None:  # fmt: skip
    """Check backends: contract, fallback, ops, faults, models. Exits with 1 when one is wrong, 2 when one cannot run here."""
    found = {}
    for name in names or [n for n, p in registry.plugins().items() if not p.reference]:
        settings = Settings(name, simulate, samples, opinfo=opinfo, part=part)
        start = time.monotonic()
        found[name] = _checked(settings, run.shard(levels.jobs(wanted, settings), shard), jobs, limit, verbose)
        _tell(settings, found[name], time.monotonic() - start)
    lost = _held_to(ratchet, renew, simulate, found) if ratchet is not None else []
    for line in lost:
        click.echo(f"no longer lowered: {line}")
    if json_file is not None:
        json_file.write_text(
            json.dumps({"schema": SCHEMA, "backends": {n: _document(n, f, simulate) for n, f in found.items()}})
        )
    unavailable = any(isinstance(Settings(n, simulate).device(), Unavailable) for n in found)
    sys.exit(1 if lost or not all(summary(f).ok for f in found.values()) else 2 if unavailable else 0)


def _held_to(path: Path, renew: bool, simulate: bool, found: Mapping[str, Sequence[Check]]) -> list[str]:
    """What the file has and the checks have no longer; nothing when it is written anew."""
    if len(found) != 1:
        raise click.UsageError("--coverage is of one backend: name it by --backend")
    ((name, checks),) = found.items()
    device = Settings(name, simulate).device()
    if isinstance(device, Unavailable):
        raise click.UsageError(f"{name} is unavailable: {device.reason}")
    now = Coverage.of(name, device.arch, device.simulated, checks)
    if not renew:
        return Coverage.read(path).lost(checks)
    now.write(path)
    return []


def _checked(
    settings: Settings, jobs: Sequence[dict[str, str]], processes: int, limit: float, verbose: bool
) -> list[Check]:
    found = []
    for check in run.checks(settings, jobs, processes, limit):
        found.append(check)
        if check.verdict.bad or verbose:
            click.echo(f"{check.level} {check.name}: {check.verdict} {check.detail}".rstrip())
    return found


def _document(name: str, checks: Sequence[Check], simulate: bool) -> dict[str, Any]:
    device = Settings(name, simulate).device()
    where = device.reason if isinstance(device, Unavailable) else f"{device.type} {device.arch}"
    return {
        "device": where, "simulated": simulate, "available": not isinstance(device, Unavailable),
        **summary(checks).as_json(), "checks": [c.as_json() for c in checks],
    }  # fmt: skip


def _tell(settings: Settings, checks: Sequence[Check], seconds: float) -> None:
    console = Console(soft_wrap=True, highlight=False)
    device, figures = settings.device(), summary(checks)
    console.print(_table(figures))
    if isinstance(device, Unavailable):
        console.print(f"{settings.backend} is NOT AVAILABLE here: {escape(device.reason)}. Fix: {escape(device.fix)}")
        console.print("only what needs no device was checked")
    else:
        simulated = " (simulated)" if device.simulated else ""
        console.print(f"{settings.backend} on {device.type} {device.arch}{simulated}")
    skipped = sum(c.verdict is Verdict.SKIPPED for c in checks)
    console.print(f"[bold]correct {figures.correct}[/bold], [bold]lowered {figures.lowered}[/bold]")
    console.print(f"{skipped} skipped, {seconds:.0f} s")


def _table(figures: Summary) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    used = [v.value for v in Verdict if any(v.value in counts for counts in figures.verdicts.values())]
    for title in ("level", *used):
        table.add_column(title, justify="left" if title == "level" else "right")
    for level, counts in figures.verdicts.items():
        table.add_row(f"{level} {levels.LEVELS[level]}", *(str(counts.get(v, 0)) for v in used))
    return table

"""`fusewright doctor`: which backends work here, and what to do about the others."""

from __future__ import annotations

import sys

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fusewright.cli.checks import Report, Row, collect
from fusewright.errors import counted


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
@click.option("--all", "everything", is_flag=True, help="Show the host's reference backends too.")
@click.option("--smoke/--no-smoke", default=True, help="Compute something with each.", show_default=True)
def doctor(as_json: bool, everything: bool, smoke: bool) -> None:
    """Check every installed backend: loads, has a device, runs. Exits with 1 when something is broken."""
    report = collect(smoke)
    if as_json:
        click.echo(report.as_json())
    else:
        _print(report, everything)
    sys.exit(0 if report.ok else 1)


def _print(report: Report, everything: bool) -> None:
    console = Console(emoji=False, soft_wrap=True, highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("backend", "installed", "loads", "device", "lowers", "runs", "chosen"):
        table.add_column(title, justify="right" if title in ("lowers", "runs") else "left", no_wrap=True)
    rows = [r for r in report.rows if everything or not r.reference]
    for row in rows:
        table.add_row(*map(escape, _cells(row)))
    console.print(table)
    for row in rows:
        if row.reason:
            mark = "[red]x[/red]" if row.broken else "-"
            console.print(f"  {mark} {row.name}: {escape(row.reason)}")
        if row.fix:
            console.print(f"      fix: {escape(row.fix)}")
    _print_machine(console, report)
    for line in report.warnings:
        console.print(f"[yellow]![/yellow] {escape(line)}")
    for line in report.problems:
        console.print(f"[red]x[/red] {escape(line)}")


def _cells(row: Row) -> tuple[str, ...]:
    """One row of the table, marked if the backend has only run in simulation."""
    works = "simulated" if row.simulated else f"{row.ms or 0:.2f} ms"  # an interpreter's time means nothing
    runs = "-" if row.runs is None else works if row.runs else "FAILS"
    return (
        row.name,
        row.version,
        "yes" if row.loads else "NO",
        "none" if row.simulated or row.device is None else row.device,
        "?" if row.lowers is None else f"{row.lowers} ops",
        runs,
        "yes" if row.chosen else "",
    )


def _print_machine(console: Console, report: Report) -> None:
    m = report.machine
    gpu = f", CUDA {m['cuda']}" if m["cuda"] else f", HIP {m['hip']}" if m["hip"] else ", no GPU build"
    quota = "no quota" if m["quota"] is None else f"quota {m['quota']:g}"
    cache = m["cache"]
    lines = [
        f"fusewright {m['fusewright']}, interface {m['interface']}, opset {m['opset']}, Python {m['python']}",
        f"torch {m['torch']}{gpu}, triton {m['triton'] or 'not installed'}",
        f"launches and checks of weights in {'C++' if m['native'] is None else 'Python: ' + m['native']}",
        f"{m['cpu']}: {' '.join(m['features']) or 'no vector extensions found'}",
        f"{counted(m['threads'], 'thread')}, {counted(m['cores'], 'core')}, {quota}",
        f"cache {cache['path']}: {cache['bytes'] / 2**20:.1f} MB, "
        + ("writable" if cache["writable"] else "NOT writable"),
        *(f"{name}={value}" for name, value in m["env"].items()),
    ]
    console.print()
    for line in lines:
        console.print(escape(line))

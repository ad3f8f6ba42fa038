"""`fusewright cache`: what the plan cache holds."""

from __future__ import annotations

import datetime
import json

import click
from rich.console import Console
from rich.table import Table

from fusewright import cachedir
from fusewright.plan import store


@click.group()
def cache() -> None:
    """List, measure or clear the plans kept on disk."""


@cache.command("list")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def list_entries(as_json: bool) -> None:
    """Every plan, least recently used first."""
    found = store.entries()
    if as_json:
        rows = [{"key": e.key, "bytes": e.bytes, "used": e.used} for e in found]
        click.echo(json.dumps({"version": 1, "directory": str(cachedir.path()), "plans": rows}))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("plan", "kB", "last used"):
        table.add_column(title, justify="right" if title == "kB" else "left")
    for e in found:
        when = datetime.datetime.fromtimestamp(e.used).isoformat(" ", "seconds")
        table.add_row(e.key[:16], f"{e.bytes / 1000:.1f}", when)
    Console().print(table)
    click.echo(f"{len(found)} plans in {cachedir.path()}")


@cache.command("size")
def size() -> None:
    """How many plans there are, and how much room they take."""
    found = store.entries()
    click.echo(f"{len(found)} plans, {sum(e.bytes for e in found) / 1e6:.2f} MB in {cachedir.path()}")


@cache.command("clear")
def clear() -> None:
    """Remove every plan and every remembered choice."""
    click.echo(f"{store.clear()} plans removed from {cachedir.path()}")

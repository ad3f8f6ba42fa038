"""`fusewright cache`: the content of the plan cache."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fusewright.cache import place, store
from fusewright.cache.store import Entry
from fusewright.errors import counted, printable


@click.group()
def cache() -> None:
    """List, measure or clear the plans kept on disk."""


@cache.command("list")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def list_entries(as_json: bool) -> None:
    """Every plan, least recently used first: its model, ops, backend, size, age and hits."""
    found = list(store.listed())
    if as_json:
        rows = [_row(e, facts) for e, facts in found]
        click.echo(json.dumps({"version": 2, "directory": _where(), "plans": rows}))
        return
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for title in ("model", "ops", "backend", "kB", "age", "hits", "plan"):
        right = title in ("ops", "kB", "age", "hits")
        table.add_column(title, justify="right" if right else "left", no_wrap=title != "model")
    for e, facts in found:
        row = _row(e, facts)
        told = (row["model"] or "?", row["ops"], row["backend"] or "?", f"{e.bytes / 1000:.1f}", _age(row["age"]), e.hits)
        table.add_row(*(escape(_printable(x)) for x in told), e.name[:8])
    Console(emoji=False).print(table)
    click.echo(f"{counted(len(found), 'plan')} in {_where()}")


def _row(e: Entry, facts: Mapping[str, Any]) -> dict[str, Any]:
    """An entry as JSON types; fields are None for an entry not written by this user on this machine, or written by an earlier
    version."""
    made = facts.get("made")
    return {
        "plan": e.name,
        "model": facts.get("model"),
        "phase": facts["key"]["phase"] if facts else None,
        "ops": facts.get("ops"),
        "backend": facts.get("backend"),
        "bytes": e.bytes,
        "age": time.time() - made if made else None,
        "used": e.used,
        "hits": e.hits,
    }


def _age(seconds: float | None) -> str:
    """Format in the largest unit of which there are at least two."""
    if seconds is None:
        return "?"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _printable(x: Any) -> str:
    return printable("?" if x is None else x)


@cache.command("size")
def size() -> None:
    """How many plans there are, and how much room all files take."""
    click.echo(f"{counted(len(store.entries()), 'plan')}, {store.total_bytes() / 1e6:.2f} MB in {_where()}")


@cache.command("clear")
def clear() -> None:
    """Remove every plan, every remembered choice and what unfinished writers left."""
    click.echo(f"{counted(store.clear(), 'plan')} removed from {_where()}")


def _where() -> str:
    found = place.existing_cache()
    try:
        return str(found.path if found else place.path())
    except RuntimeError as e:  # no home directory
        return f"nowhere: {e}"

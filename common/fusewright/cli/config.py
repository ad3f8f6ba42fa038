"""`fusewright config`: every option and environment variable, with its value here."""

from __future__ import annotations

import json
import os

import click

from fusewright import registry
from fusewright.config import ENV, PREFIX, env, unknown_env


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def config(as_json: bool) -> None:
    """List the options and environment variables with their values."""
    of_backends = registry.environment()
    rows = [
        {"name": name, "value": env(name.removeprefix(PREFIX)), "set": name in os.environ, "help": v.help}
        for name, v in ENV.items()
    ] + [
        {"name": name, "value": os.environ.get(name, ""), "set": name in os.environ, "help": text}
        for name, text in of_backends.items()
    ]
    unknown = unknown_env(of_backends)
    if as_json:
        click.echo(json.dumps({"version": 1, "variables": rows, "unknown": unknown}, indent=2))
        return
    for row in rows:
        mark = "*" if row["set"] else " "
        click.echo(f"{mark} {row['name']} = {row['value']!r}\n      {row['help']}")
    for name, fix in unknown.items():
        click.echo(f"! {name} is not read by anything; {fix}")

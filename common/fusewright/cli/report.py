"""`fusewright report`: what happened to a model, as one page for a browser."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from fusewright.cli import case
from fusewright.cli.files import Written
from fusewright.report_page import document, page


@click.command()
@case.arguments
@click.option("-o", "--output", type=Written(), required=True, help="The page, one HTML file.")
@click.option("--inductor/--no-inductor", default=True, show_default=True, help="Inductor's kernels beside ours.")
@click.option("--json", "json_file", type=Written(), help="Write the page's data here too.")
def report(
    model: str, backend: str, device: str | None, dtype: Any, size: Any, train: bool, given: tuple[str, ...], output: Path,
    inductor: bool, json_file: Path | None,
) -> None:  # fmt: skip
    """Write a page about MODEL, file.py:function or a name that bench knows: what ran where, the fusion graph, time of each kernel
    beside eager's and Inductor's, plan and source, the first call by stage, memory, and accuracy by layer.
    """
    chosen = case.chosen(model, backend, device, train, given)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch's profiler logs to the terminal when it starts
    asked = document.Asked(model, backend, dtype, size, train, chosen.options, inductor, chosen.device)
    found = document.collect(asked, lambda text: click.echo(f"{model}: {text}", err=True))
    output.write_text(page.render(found), encoding="utf-8")
    if json_file is not None:
        json_file.write_text(json.dumps(json.loads(page.as_text(found)), indent=1) + "\n")
    click.echo(f"{output}: {output.stat().st_size / 1e3:.0f} kB")

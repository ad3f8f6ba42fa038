"""`fusewright quantize`: quantize a model, report the cost in accuracy, and save it to a file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fusewright import quantization
from fusewright.bench import suite
from fusewright.cli.files import Written
from fusewright.errors import counted
from fusewright.interface import QuantizationReport

NOISY = 20.0
"""SQNR of a layer, in dB, below which keeping it in floats is suggested: noise of a tenth of the signal's magnitude."""


@click.command()
@click.argument("model")
@click.option("--recipe", default="static", show_default=True, help="static, dynamic or weight_only.")
@click.option("--backend", help="Whose int8. Default: the best here that quantizes.")
@click.option("--keep", multiple=True, help="Name of a module that stays in floats, wildcards allowed. Repeatable.")
@click.option("--report", "with_report", is_flag=True, help="Signal to noise of every layer, the worst first.")
@click.option("--dtype", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True, help="Of the model before it.")
@click.option("--size", type=click.Choice(["full", "small"]), default="full", show_default=True, help="Of a model of the suite.")
@click.option("--save", type=Written(), help="Write the model here, for fusewright.quantization.load.")
def quantize(
    model: str, recipe: str, backend: str | None, keep: tuple[str, ...], with_report: bool, dtype: str, size: str, save: Path | None
) -> None:
    """Quantize MODEL: file.py:function, which returns (module, args) or (module, args, kwargs), or a name of the suite.

    Its arguments are the calibration input; a function may return a list of tuples in their place: several inputs.
    """
    console = Console(emoji=False, highlight=False, width=None if Console().is_terminal else 160)
    module, inputs = _loaded(model, dtype, size)
    quantized = quantization.quantize(module, inputs, recipe, backend=backend, keep=keep)
    found = quantization.report(module, quantized, inputs[:8], backend)
    of = counted(len(found.layers), "product")
    console.print(f"{model}: {recipe}, {of}, {found.sqnr:.1f} dB signal to noise at the output", markup=False)
    for name, why in found.stayed.items():
        console.print(f"  in floats: {name}: {why}", markup=False)
    if with_report:
        console.print(table(found))
        for line in suggestions(found):
            console.print(line, markup=False)
    if save is not None:
        args, kwargs = (inputs[0], {}) if isinstance(inputs[0], tuple) else ((), inputs[0])
        torch.export.save(torch.export.export(quantized, args, kwargs), save)
        loading = f"from fusewright.quantization import load; load({str(save)!r})"
        console.print(f"saved; load it by `{loading}`, then torch.compile", soft_wrap=True)


def _loaded(model: str, dtype: str, size: str) -> tuple[torch.nn.Module, list[Any]]:
    """The module in eval mode, and its calibration inputs."""
    built = suite.build(model, size, dtype)  # type: ignore[arg-type]
    if built.module is None:
        raise click.UsageError(f"{model} gives {type(built.fn).__name__}; a torch.nn.Module can be quantized")
    several = len(built.args) == 1 and isinstance(built.args[0], list)
    inputs = list(built.args[0]) if several else [dict(built.kwargs) if built.kwargs and not built.args else built.args]
    exported = isinstance(built.module, torch.fx.GraphModule)  # such a module refuses `eval`
    return built.module if exported else built.module.eval(), inputs


def table(report: QuantizationReport) -> Table:
    """Layers, noisiest first."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("layer", "op", "result", "dB", "share of work"):
        made.add_column(title, justify="right" if title in ("dB", "share of work") else "left")
    work = sum(layer.work for layer in report.layers) or 1
    for layer in sorted(report.layers, key=lambda x: x.sqnr):
        shape = "x".join(map(str, layer.shape))
        made.add_row(escape(layer.name), layer.op, shape, f"{layer.sqnr:.1f}", f"{layer.work / work:.1%}")
    return made


def suggestions(report: QuantizationReport) -> list[str]:
    """Which layers to keep in floating point, and the cost."""
    work = sum(layer.work for layer in report.layers) or 1
    worst = [layer for layer in sorted(report.layers, key=lambda x: x.sqnr) if layer.sqnr < NOISY][:5]
    if not worst:
        low = min((layer.sqnr for layer in report.layers), default=math.inf)
        return [f"No layer below {NOISY:g} dB (lowest {low:.1f}): nothing to keep in floats."]
    cost = sum(layer.work for layer in worst) / work
    names = ", ".join(repr(layer.name) for layer in worst)
    return [f"Below {NOISY:g} dB. Keep them in bf16 or fp32, {cost:.1%} of the work: keep=[{names}]"]

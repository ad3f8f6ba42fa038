"""`fusewright bench`: the options, the order of work and the exit code. The measurements are in `fusewright.bench`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args

import click
from rich.console import Console
from rich.markup import escape

from fusewright import machine
from fusewright.bench import report
from fusewright.bench.cases import check_case, counts_bytes, graphs, kernels, large
from fusewright.bench.contenders import COPY, EAGER, Contender, from_backend
from fusewright.bench.device import check_device, default_device
from fusewright.bench.measure import measure
from fusewright.bench.steady import ModelFailed, Settings
from fusewright.bench.suite import SUITE, TRAINABLE, DType
from fusewright.bench.turns import TURNS
from fusewright.cli.files import Written
from fusewright.errors import counted, in_brief, nearest

Case = tuple[str, str]
PIPED = 120
"""Width in columns for output to a file or a pipe."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells."""
_FILE = click.Path(dir_okay=False, path_type=Path)


def _list(_context: click.Context, _parameter: click.Parameter, value: str | None) -> list[str] | None:
    return None if value is None else [item.strip() for item in value.split(",") if item.strip()]


@click.command()
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option("--suite", is_flag=True, help=f"All of: {', '.join(SUITE)}.")
@click.option("--train", is_flag=True, help=f"Training steps (default models: {', '.join(TRAINABLE)}).")
@click.option("--kernels", "only_kernels", is_flag=True, help="Memory-bound kernels and their bandwidth.")
@click.option("--graphs", "with_graphs", is_flag=True, help="Graph networks (also with --train) and NumPy k-means.")
@click.option("--large", "at_large", is_flag=True, help=f"Sizes that fill a data-centre device: {', '.join(large.names())}.")
@click.option("--int8", "in_int8", is_flag=True, help="Quantized products and models, beside torch's engines and Inductor's int8.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="How often to repeat an --int8 model's inputs.")
@click.option("--dtype", "dtypes", callback=_list, help="fp32, bf16, amp; a comma-separated list.")
@click.option("--device", help="Where the models are, as torch names it.  [default: where our backend computes]")
@click.option("--backend", default="fusewright", show_default=True, help="Ours: any torch.compile backend, or NAME[option=value].")
@click.option("--against", callback=_list, help="Backends beside it  [default: inductor]")
@click.option("--first-call/--no-first-call", default=True, show_default=True, help="Time first calls, with empty and full caches.")
@click.option("--thorough/--quick", default=None, help="Inductor with freezing too; first calls twice.  [default: with --suite]")
@click.option("--memory", is_flag=True, help="Peak memory of a steady call, in fresh processes.")
@click.option("--threads", type=click.IntRange(1), help="Default: the cores of this machine.")
@click.option("--seconds", type=click.FloatRange(0.1), default=10.0, show_default=True, help="Timing per model.")
@click.option("--timeout", type=click.FloatRange(1), default=300.0, show_default=True, help="For one compile.")
@click.option("--ahead", type=click.IntRange(0), default=0, show_default=True, help="Rows to prepare beside one.")
@click.option("--check", type=click.Choice(["all", "ours", "none"]), default="all", show_default=True, help="Held against fp64.")
@click.option("--size", type=click.Choice(["full", "small"]), default="full", show_default=True, help="Of the suite's models.")
@click.option("--json", "json_file", type=Written(), help="Write the document here, row by row.")
@click.option("--append", is_flag=True, help="Keep what the --json file holds and add to it.")
@click.option("--chart", type=Written(), help="Draw the comparison here, as SVG; also of what --show reads.")
@click.option("--show", type=_FILE, help="Print the tables of a saved document, or of its rows by MODEL and --dtype.")
@click.option("--baseline", type=_FILE, help="Exit with 1 when a speed-up over eager fell against this document.")
@click.option("--verbose", "-v", is_flag=True, help="A line for each step, on a terminal too.")
def bench(
    models: tuple[str, ...],
    suite: bool,
    train: bool,
    only_kernels: bool,
    with_graphs: bool,
    at_large: bool,
    in_int8: bool,
    batch: int,
    dtypes: list[str] | None,
    device: str | None,
    backend: str,
    against: list[str] | None,
    first_call: bool,
    thorough: bool | None,
    memory: bool,
    threads: int | None,
    seconds: float,
    timeout: float,
    ahead: int,
    check: Literal["all", "ours", "none"],
    size: str,
    json_file: Path | None,
    append: bool,
    chart: Path | None,
    show: Path | None,
    baseline: Path | None,
    verbose: bool,
) -> None:
    """Time MODELs (names of the suite, or file.py:function) in eager, Inductor and ours, interleaved, each in a
    process of its own.

    A function of a file returns (module, args) or (module, args, kwargs). Prints medians, speed-ups, errors
    against fp64 relative to eager's, and first calls. Exits with 0 unless nothing
    ran or --baseline regressed.
    """
    console = _console()
    if show is not None:
        _print(console, saved := _picked(report.load(show), models, dtypes))
        _draw(saved, chart)
        return
    if batch > 1 and not in_int8:
        raise click.UsageError("--batch repeats the inputs of quantized models: give --int8 too")
    if in_int8:
        settings = Settings(size=size, threads=threads or machine.cores(), seconds=seconds)
        _int8(console, models, batch, backend, against, settings, json_file, append)
        return
    if with_graphs:
        models = (*models, *graphs.names(train))
    if at_large:
        models = (*models, *large.names())
    if device is not None:
        check_device(device)
    cases = list(_cases(models, suite, train, only_kernels, dtypes))
    thorough = suite if thorough is None else thorough
    contenders = _contenders(backend, against, train, only_kernels, thorough)
    device = device or default_device(contenders[-1].backend or "", contenders[-1].options)
    before = report.load(baseline) if baseline is not None else None
    settings = Settings(
        size=size, train=train, threads=threads or machine.cores(), device=device, seconds=seconds, timeout=timeout,
        first_call=first_call and not only_kernels, memory=memory and not only_kernels, thorough=thorough,
        ahead=ahead, check=check,
    )  # fmt: skip
    if ahead and settings.first_call:
        raise click.UsageError("--ahead compiles beside other rows: first calls are not timed, give --no-first-call")
    document = _document(contenders[-1].name, settings, json_file if append else None)
    ran, failures, interrupted = _measure_all(console, document, cases, contenders, settings, json_file, verbose)
    if document["rows"]:
        _print(console, document)
        _draw(document, chart)
    for line in failures:
        console.print(f"! {line}", style="red", markup=False)
    worse = _compared(console, document, before) if before is not None else []
    sys.exit(INTERRUPTED if interrupted else 1 if worse or not ran else 0)


def _compared(console: Console, document: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Print the comparison and what could not be compared; return what got slower."""
    worse, missing = report.regressions(document, before), report.not_compared(document, before)
    for line in worse:
        console.print(f"regressed: {line}", style="bold red", markup=False)
    for line in missing:
        console.print(f"not compared: {line}", style="yellow", markup=False)
    if not worse and not missing:
        console.print(f"no row is slower than in the baseline by more than {report.TOLERANCE:.0%}")
    return worse


def _draw(document: dict[str, Any], file: Path | None) -> None:
    from fusewright.report_page.chart import of_bench

    if file is not None:
        file.write_text(of_bench(document))


def _int8(
    console: Console, models: Sequence[str], batch: int, backend: str, against: Sequence[str] | None, settings: Settings,
    file: Path | None, append: bool,
) -> None:
    """Print each row as it is measured, write the document, then print all: the contenders of a row depend on what runs here."""
    import torch

    from fusewright.quantization import bench as int8
    from fusewright.quantization import quantizing

    torch.set_num_threads(settings.threads)
    ours = quantizing() if backend == "fusewright" else backend
    document = _document(ours, settings, file if append else None)
    for part, row in int8.measure(models, settings.size, settings.seconds, ours, against != [], batch):  # type: ignore[arg-type]
        first = next(iter(row.seconds.values()), 0.0)
        cells = [f"{who} {t * 1e3:.3f} ms ({first / t:.2f}x)" for who, t in row.seconds.items()]
        console.print(f"{row.name}: {', '.join(cells)}", markup=False, soft_wrap=True)
        for who, why in row.failed.items():
            console.print(f"  ! {who}: {in_brief(why)}", style="red", markup=False, soft_wrap=True)
        report.put(document, row.as_json(f"int8 {part}, {counted(settings.threads, 'thread')}"))
        if file is not None:
            report.save(document, file)
    _print(console, document)


def _console() -> Console:
    console = Console(emoji=False, highlight=False, soft_wrap=False)
    return console if console.is_terminal else Console(emoji=False, highlight=False, width=PIPED)  # a pipe has no width of its own


def _cases(
    models: Sequence[str], suite: bool, train: bool, only_kernels: bool, dtypes: Sequence[str] | None
) -> Iterator[Case]:
    """Pairs of model and dtype, grouped by model. Every name is checked before anything runs."""
    chosen = [*models, *(SUITE if suite else ())]
    if only_kernels:
        if train or not all(map(kernels.is_kernel, chosen)):
            raise click.UsageError("--kernels takes no models (but names of kernels) and no --train")
        chosen = chosen or kernels.names()
    elif train and not chosen:
        chosen = list(TRAINABLE)
    elif not chosen:
        raise click.UsageError("name a MODEL, or give --suite, --large, --train, --kernels or --graphs")
    default = ["fp32", "bf16"] if suite or only_kernels else ["fp32", "amp"] if train else ["fp32"]
    on_devices = ["amp"] if train else ["bf16"]
    for dtype in dtypes or ():
        if dtype not in get_args(DType):
            raise click.UsageError(f"there is no dtype {dtype!r}; {nearest(dtype, get_args(DType))}")
        if only_kernels and dtype not in kernels.DTYPES:
            raise click.UsageError(f"kernels are measured in {', '.join(kernels.DTYPES)}, not {dtype}")
    for model in dict.fromkeys(chosen):
        check_case(model, train)
        for dtype in dtypes or (on_devices if large.is_large(model) else default):
            yield model, dtype


def _contenders(
    backend: str, against: Sequence[str] | None, train: bool, only_kernels: bool, thorough: bool
) -> list[Contender]:
    """Eager first, ours last."""
    if against is None:
        against = ["inductor", "inductor-freezing"] if thorough and not train and not only_kernels else ["inductor"]
    ours = from_backend(backend)
    others = [from_backend(name) for name in dict.fromkeys(against)]
    return [EAGER, *(c for c in others if c.name != ours.name), ours]


def _document(ours: str, settings: Settings, file: Path | None) -> dict[str, Any]:
    command = ["fusewright", *sys.argv[1:]]
    if file is None or not file.exists():
        return report.new_document(command, ours, asdict(settings))
    document = report.load(file)
    document["command"] += f"; {' '.join(command)}"
    document["backend"] = ours
    return document


def _measure_all(
    console: Console,
    document: dict[str, Any],
    cases: Sequence[Case],
    contenders: Sequence[Contender],
    settings: Settings,
    file: Path | None,
    verbose: bool,
) -> tuple[int, list[str], bool]:
    """Return how many cases ran, a line for each that could not, and whether Ctrl-C was pressed, which stops measuring but
    still prints the report."""
    ran, failures = 0, []
    show_status = console.is_terminal and not verbose
    pool = ThreadPoolExecutor(settings.ahead + 1)
    with console.status("") as status:

        def row_of(index: int, model: str, dtype: str) -> dict[str, Any]:
            head = f"[{index}/{len(cases)}] {model} {dtype}"

            def progress(text: str) -> None:
                if show_status:
                    status.update(f"{escape(head)}: {text}")
                else:
                    click.echo(f"{head}: {text}", err=True)

            return measure(model, dtype, [*contenders, *[COPY] * counts_bytes(model)], settings, progress)

        left = {pool.submit(row_of, k, *case): case for k, case in enumerate(cases, 1)}
        try:
            for future in as_completed(list(left)):
                model, dtype = case = left.pop(future)
                try:
                    row = future.result()
                except ModelFailed as error:
                    failures.append(f"{model} {dtype}: {error}")
                    continue
                except KeyboardInterrupt:
                    left[future] = case
                    raise
                ran += 1
                report.put(document, row)
                if file is not None:
                    report.save(document, file)
        except KeyboardInterrupt:
            failures.append(_interrupted([case for case in cases if case in left.values()]))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            if left:
                TURNS.stop()  # else threads would wait for their processes
            pool.shutdown()
            TURNS.open()  # what this process measures next is not stopped
    return ran, failures, bool(left)


def _interrupted(left: Sequence[Case]) -> str:
    """The message for rows that were not measured."""
    others = len(left) - 1
    return f"interrupted at {' '.join(left[0])}; {others} more {'was' if others == 1 else 'were'} not measured"


def _picked(document: dict[str, Any], models: Sequence[str], dtypes: Sequence[str] | None) -> dict[str, Any]:
    """The document's rows of these models and dtypes; all if none are named. `BadParameter` if it has none of them."""
    rows = [r for r in document["rows"] if (not models or r["model"] in models) and (not dtypes or r["dtype"] in dtypes)]
    if not rows and (models or dtypes):
        has = ", ".join(dict.fromkeys(f"{r['model']} {r['dtype']}" for r in document["rows"])) or "no rows"
        raise click.BadParameter(f"the document has {has}", param_hint="--show")
    return {**document, "rows": rows}


def _print(console: Console, document: dict[str, Any]) -> None:
    from fusewright.bench.tables import render

    where, threads = document["machine"], document["settings"]["threads"]
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    head = f"{where['device']}; " if "device" in where else ""
    used = f"{counted(threads, 'thread')} of {counted(where['cores'], 'core')}"
    head += f"{where['cpu']}, {used}, load {where['load_1min']}; {versions}"
    console.print(head, style="dim", markup=False)
    for part in render(document, console.width):
        console.print(part)

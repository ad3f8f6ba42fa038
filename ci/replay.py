"""Record every stage of compiling every suite model, as texts and digests, to prove that a refactoring changes nothing.

    python -m ci.replay check                       compare with the digests in ci/replay.json; exit code 1 if one differs
    python -m ci.replay check --against main        compare with another commit's texts; show the first differing lines
    python -m ci.replay accept --because "..."      write the digests of this tree, with the reason next to each changed one
    python -m ci.replay dump FOLDER                 write the texts, one file per case and section

`--backends`, `--models`, `--dtypes` and `--phases` take names, comma-separated.

A case is a model at small geometry, a backend, a dtype and a phase. Its sections follow the stages: the traced graph, the
simplified graph, constants, what was lowered, what computes each op and why, measured choices, the plan, the kernels' IR and
source. No backend builds or runs anything: devices are pinned, measured choices take their last candidate, and the graphs run in
eager. So the texts do not depend on paths, hash seed, CPU or number of threads, only on torch's minor version and the release of
transformers, for which the digests are kept. They do not show what only a first run finds (wrong metadata). Needs an x86-64 machine
with triton installed.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import torch
from torch.fx import GraphModule, Node

from fusewright import pipeline, registry, report
from fusewright.bench import suite
from fusewright.config import Options
from fusewright.errors import OptionError, nearest
from fusewright.interface import Backend, Device, KernelCode
from fusewright.toolkit.ir import Kernel
from fusewright.toolkit.ir.printer import to_text

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "ci/replay.json"
SECTIONS = ("canonicalize", "simplify", "constants", "lower", "partition", "choices", "plan", "kernels", "source")
THREADS = 4
CPU_ISA = "avx512"
"""The instruction set that CPU kernels are emitted for on any x86-64; they are not run."""

Texts: TypeAlias = Mapping[str, str]
Source: TypeAlias = Callable[[Backend, Any], str]


@dataclass(frozen=True)
class Case:
    """One case of the record."""

    backend: str
    model: str
    dtype: str
    phase: str

    def __str__(self) -> str:
        return f"{self.backend}/{self.model}/{self.dtype}/{self.phase}"


# ---------------------------------------------------------------- pinned devices, and their kernels' source


def _x86() -> Device:
    from fusewright_onednn.target import TARGETS

    best = TARGETS[0]
    return Device("cpu", best.arch, best.requires | {"avx512_bf16", "avx512_vnni", "mkldnn_bf16"}, "oneDNN")


def _arm() -> Device:
    from fusewright_acl.target import simulated

    features = simulated("neoverse-v1") or frozenset[str]()
    return Device("cpu", "neoverse-v1", features | {"acl", "mkldnn_bf16"}, simulated=True)


def _gpu(vendor: str, arch: str) -> Callable[[], Device]:
    def device() -> Device:
        from fusewright_triton import target

        found = (target.NVIDIA if vendor == "nvidia" else target.AMD)[arch]
        return Device("cuda", arch, found.all_features, simulated=True)

    return device


def _mac() -> Device:
    from fusewright_mps.target import TARGETS

    return Device("mps", "M3 Pro", TARGETS["M3 Pro"].features, simulated=True)


def _llvm(isa: str) -> Source:
    def source(backend: Backend, kernel: Any) -> str:
        from fusewright_cpu.run.codegen import kernels_to_text
        from fusewright_cpu.target import aarch64_target, x86_target

        target = x86_target(isa) if isa == CPU_ISA else aarch64_target(isa)
        return str(kernels_to_text({"kernel": kernel}, target, True)[0])

    return source


def _triton(backend: Any, kernel: Kernel) -> str:
    from fusewright_triton.emit.emitter import emit
    from fusewright_triton.emit.schedule import choose

    return emit(kernel, choose(kernel, backend.target(backend.running_on()))).text


def _metal(backend: Any, kernel: Any) -> str:
    from fusewright_mps.kernels.handwritten import Handwritten
    from fusewright_mps.runtime import Shaders, host_metal

    shaders = Shaders(kernel, host_metal(), backend.target(), True)
    assert isinstance(kernel, Kernel | Handwritten)
    return str(shaders.source(shaders.expected).text)


BACKENDS: dict[str, tuple[Callable[[], Device], Source]] = {
    "x86_onednn": (_x86, _llvm(CPU_ISA)),
    "graviton_acl": (_arm, _llvm("neoverse-v1")),
    "nvidia_triton": (_gpu("nvidia", "sm_90"), _triton),
    "rocm_triton": (_gpu("amd", "gfx942"), _triton),
    "apple_mps": (_mac, _metal),
}
MODELS = tuple(dict.fromkeys([*suite.SUITE, *suite.TRAINABLE]))
DTYPES, PHASES = ("fp32", "bf16"), ("infer", "train")


def cases(backends: Sequence[str], models: Sequence[str], dtypes: Sequence[str], phases: Sequence[str]) -> list[Case]:
    """Return the cases: inference of all suite models, training of those with a loss. bf16 in training means autocast."""
    rows = itertools.starmap(Case, itertools.product(backends, models, dtypes, phases))
    return [c for c in rows if c.model in (suite.SUITE if c.phase == "infer" else suite.TRAINABLE)]


# ---------------------------------------------------------------- one case


class Last:
    """Replaces `Tuner`: every choice is the last candidate, which is our own if the first is a library's."""

    settled = True
    made: list[str]

    def __init__(self, *_: Any) -> None: ...

    def choose(self, key: str, candidates: Mapping[str, Any]) -> str:
        names = list(candidates)
        self.made.append(f"{key}: {', '.join(names)}")
        return names[-1]

    def save(self) -> None: ...


@contextlib.contextmanager
def observed(name: str) -> Iterator[dict[str, list[str]]]:
    """In this context, `torch.compile(fn, backend=name)` records its texts by section, and the graphs run in eager."""
    device, source = BACKENDS[name]
    cls = registry.info(name).cls
    assert cls is not None, f"{name} is not installed"
    found: dict[str, list[str]] = {section: [] for section in SECTIONS}

    class Choices(Last):
        made = found["choices"]

    def create(_: str, options: Options) -> Backend:
        return cls(device(), options.backend)

    def load(self: Backend, kernels: Mapping[str, Any]) -> Mapping[str, KernelCode]:
        for key, kernel in kernels.items():
            found["kernels"].append(f"{key}: {_ir(kernel)}")
            found["source"].append(f"{key}:\n{source(self, kernel)}")
        return {key: KernelCode(_never, kernel=kernel) for key, kernel in kernels.items()}

    with (
        mock.patch.object(registry, "create", create),
        mock.patch.object(pipeline, "Tuner", Choices),
        mock.patch.object(pipeline, "compile_graph", _texts_of(pipeline.compile_graph, found)),
        mock.patch.object(cls, "load", load),
    ):
        yield found


def _never(*_: Any) -> None:
    raise AssertionError("nothing of a replay is run")


def _ir(kernel: Any) -> str:
    return to_text(kernel) if isinstance(kernel, Kernel) else repr(kernel)


def _texts_of(compile_graph: Callable[..., Any], found: dict[str, list[str]]) -> Callable[..., Any]:
    def compiled(
        backend: Backend, options: Options, gm: GraphModule, phase: str, const: frozenset[Node], mode: str, *more: Any
    ) -> Callable[[list[Any]], Any]:
        plain = GraphModule(gm, torch.fx.Graph())
        plain.graph.output(plain.graph.graph_copy(gm.graph, {}))
        plain.recompile()
        with report.recording() as reports:
            compile_graph(backend, options, gm, phase, const, mode, *more)
        for section in SECTIONS:
            if section in reports[-1].texts:
                found[section].append(f"# {phase}, {mode}\n{_canonical(reports[-1].texts[section])}")
        found["partition"].append(_partition(reports[-1]))
        return _boxed(plain)

    return compiled


def _boxed(gm: GraphModule) -> Callable[[list[Any]], Any]:
    def run(args: list[Any]) -> Any:
        given = list(args)
        args.clear()
        with _single_thread():
            return gm(*given)

    return run


@contextlib.contextmanager
def _single_thread() -> Iterator[None]:
    """Use one thread: with more than two, oneDNN's bf16 1x1 convolution (weight gradient, stride 2, 8 channels-last inputs)
    overruns its scratchpad, and eager itself crashes (docs/reliability.md)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _canonical(text: str) -> str:
    """Renumber launches from 0; in the code their number depends on how many names precede them."""
    numbers = itertools.count()
    return re.sub(r"\blaunch_\d+", lambda _: f"launch_{next(numbers)}", text)


def _partition(r: report.GraphReport) -> str:
    ops = [f"{o.op} {o.shape}: {o.where}; {o.verdict}; {o.note}" for o in r.ops]
    rules = [f"rule {name}: {count}" for name, count in sorted(r.rules.items())]
    return "\n".join([f"# {r.phase}: {r.regions} regions", *rules, *ops, *r.bugs])


def texts(case: Case) -> Texts:
    """Return all sections of a case, as in a new process: the count of shapes that oneDNN has code for is reset."""
    from fusewright_cpu.onednn.left_behind import SHAPES

    torch.compiler.reset()
    torch.manual_seed(0)
    SHAPES.clear()
    with observed(case.backend) as found:
        (_train if case.phase == "train" else _infer)(case)
    return {section: "\n\n".join(parts) + "\n" for section, parts in found.items()}


def _compiled(case: Case, fn: Any) -> Any:
    return torch.compile(fn, backend=case.backend, options={"cache": False, "fallback": "allow", "strict": True})


def _infer(case: Case) -> None:
    built = suite.build(case.model, "small", case.dtype)  # type: ignore[arg-type]
    with torch.no_grad():
        built.run(_compiled(case, built.fn))


def _train(case: Case) -> None:
    step = suite.train_step(case.model, "small", "amp" if case.dtype == "bf16" else "fp32")
    step.compiled = _compiled(case, step.module)
    step.backward()


def digests(found: Texts) -> dict[str, str]:
    """Return the first 64 bits of each section's SHA-256."""
    return {section: hashlib.sha256(text.encode()).hexdigest()[:16] for section, text in found.items()}


# ---------------------------------------------------------------- the record


def versions() -> str:
    """Return the versions that the digests of a record belong to."""
    import transformers

    return f"torch {'.'.join(torch.__version__.split('.')[:2])}, transformers {transformers.__version__}"


def first_difference(was: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """Return the earliest section that differs, which explains the later ones."""
    return next((s for s in SECTIONS if was.get(s) != now.get(s)), None)


def excerpt(was: str, now: str, name: str, lines: int = 30) -> str:
    """Return the first lines of a diff."""
    diff = difflib.unified_diff(was.splitlines(), now.splitlines(), f"{name} (was)", f"{name} (now)", lineterm="", n=2)
    return "\n".join(itertools.islice(diff, lines))


def compared(chosen: Sequence[Case], recorded: Mapping[str, Any], say: Callable[[str], None]) -> list[str]:
    """Return the differences from the record, one line per case."""
    wrong = []
    for case in chosen:
        start, row = time.monotonic(), recorded.get(str(case))
        now = digests(texts(case))
        section = first_difference(row["digests"], now) if row else "everything: it is not in the record"
        if section:
            wrong.append(f"{case}: {section}")
        say(f"{case}: {f'DIFFERS first in {section}' if section else 'same'} ({time.monotonic() - start:.1f} s)")
    return wrong


def _read() -> dict[str, Any]:
    return dict(json.loads(RECORD.read_text())) if RECORD.exists() else {}


def check(chosen: Sequence[Case]) -> int:
    record = _read()
    if versions() not in record:
        print(f"no digests of {versions()} in {RECORD.name}, but of {', '.join(record)}; use --against COMMIT")
        return 2
    wrong = compared(chosen, record[versions()], _say)
    if wrong:
        print(f"\n{len(wrong)} of {len(chosen)} cases differ, the first: {wrong[0]}")
        print("See the lines with --against COMMIT; where they are meant: python -m ci.replay accept --because REASON")
    return 1 if wrong else 0


def accept(chosen: Sequence[Case], because: str) -> int:
    record = _read()
    rows = record.setdefault(versions(), {})
    for case in chosen:
        found = digests(texts(case))
        section = first_difference(rows.get(str(case), {}).get("digests", {}), found)
        if section:
            rows[str(case)] = {"because": because, "digests": found}
        _say(f"{case}: {f'changed first in {section}' if section else 'same'}")
    record[versions()] = dict(sorted(rows.items()))
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def dump(chosen: Sequence[Case], folder: Path) -> int:
    for case in chosen:
        place = folder / str(case)
        place.mkdir(parents=True, exist_ok=True)
        for section, text in texts(case).items():
            (place / f"{section}.txt").write_text(text, encoding="utf-8")
        _say(str(case))
    return 0


def against(commit: str, chosen: Sequence[Case]) -> int:
    """Compare this tree with a commit, whose texts this file produces in a separate checkout."""
    wrong = []
    with tempfile.TemporaryDirectory() as temporary, _checkout(commit, Path(temporary) / "tree") as tree:
        for case in chosen:
            was = _dumped(tree, case, Path(temporary) / "was")
            now = texts(case)
            section = first_difference(was, now)
            if section:
                wrong.append(case)
                print(excerpt(was.get(section, ""), now[section], f"{case} {section}"), flush=True)
            else:
                _say(f"{case}: same")
    return 1 if wrong else 0


@contextlib.contextmanager
def _checkout(commit: str, place: Path) -> Iterator[Path]:
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(place), commit], check=True)
    try:
        yield place
    finally:
        subprocess.run([*git, "remove", "--force", str(place)], check=True)


def _dumped(tree: Path, case: Case, folder: Path) -> Texts:
    """Return the texts of a case in another tree."""
    packages = [tree, tree / "common", *sorted((tree / "backends").iterdir())]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, packages))}
    names = [f"--{key}s={value}" for key, value in asdict(case).items()]
    command = [sys.executable, str(Path(__file__).resolve()), "dump", str(folder), *names]
    subprocess.run(command, cwd=tree, env=env, check=True, stdout=subprocess.DEVNULL)
    return {p.stem: p.read_text(encoding="utf-8") for p in (folder / str(case)).glob("*.txt")}


def _say(text: str) -> None:
    print(text, flush=True)


# ---------------------------------------------------------------- command line


def _chosen(text: str, known: Sequence[str], what: str) -> Sequence[str]:
    names = known if text == "all" else text.split(",")
    for name in names:
        if name not in known:
            raise OptionError(f"there is no {what} {name!r}; {nearest(name, known)}")
    return names


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    checking, accepting, dumping = (commands.add_parser(name) for name in ("check", "accept", "dump"))
    checking.add_argument("--against", metavar="COMMIT", help="compare with another commit's texts")
    accepting.add_argument("--because", required=True, help="why these texts changed; kept beside the digests")
    dumping.add_argument("folder", type=Path)
    for command in (checking, accepting, dumping):
        for name in ("backends", "models", "dtypes", "phases"):
            command.add_argument(f"--{name}", default="all")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    a = _arguments(argv)
    os.environ |= {"FUSEWRIGHT_CPU_ISA": CPU_ISA, "FUSEWRIGHT_NATIVE": "0"}
    torch.set_num_threads(THREADS)
    chosen = cases(
        _chosen(a.backends, tuple(BACKENDS), "backend"), _chosen(a.models, MODELS, "model"),
        _chosen(a.dtypes, DTYPES, "dtype"), _chosen(a.phases, PHASES, "phase"),
    )  # fmt: skip
    if a.command == "dump":
        return dump(chosen, a.folder)
    if a.command == "accept":
        return accept(chosen, a.because)
    return against(a.against, chosen) if a.against else check(chosen)


if __name__ == "__main__":
    sys.exit(main())

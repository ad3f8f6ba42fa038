"""Compare first calls and steady times of this tree with those of another commit, in turns on one machine.

    git worktree add ../before COMMIT
    python -m ci.bench.first_calls ../before [--models bert,t5_small] [--train] [--rounds 3] [--threads 2] [--backend x86_onednn]

Each measurement runs in a process forked after torch, transformers and the model are loaded. It times the import of Fusewright,
Dynamo, the compile with empty caches (cold) or with those of the cold run (warm), and the first run. Seconds are the minimum over
rounds; "pairs" is the median of the ratios within rounds. Exit code 1 if a geometric mean of ratios of minimum seconds is above
1.05. Run nothing else meanwhile, and unset PYTHONDONTWRITEBYTECODE, because an installed wheel has its bytecode. 5 models in 3
rounds take six minutes on two cores.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fusewright.bench.models import MODELS, instantiate

HERE = Path(__file__).resolve().parents[2]
INFERENCE, TRAINING = "bert,t5_small,mobilenet_v2,gpt2,resnet50", "bert_small,resnet18"
PHASES, TIMES = ("cold", "warm"), ("first", "steady")
STEADY_SECONDS = 1.5
MOST = 1.05
"""Largest allowed geometric mean of ratios: repeated runs of one commit differ by this much."""

Row = dict[str, float]
Found = dict[tuple[str, str, str], list[Row]]
"""Rows by model, phase and tree."""


def main(argv: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(argv)
    names = (given.models or (TRAINING if given.train else INFERENCE)).split(",")
    torch.set_num_threads(1)  # a thread pool does not survive a fork
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    trees = {"before": given.before.resolve(), "now": HERE}
    found: Found = {}
    for name in names:
        built = instantiate(MODELS[name], "full", 0)
        for k in range(given.rounds):
            for phase, tree, row in _round(given, trees if k % 2 else dict(reversed(trees.items())), built):
                found.setdefault((name, phase, tree), []).append(row)
        for phase in PHASES:
            print(_line(name, phase, found), flush=True)
    return _verdict(names, found)


def _round(given: argparse.Namespace, trees: dict[str, Path], built: Any) -> Iterator[tuple[str, str, Row]]:
    with tempfile.TemporaryDirectory() as folder:
        for phase in PHASES:
            for tree, root in trees.items():
                yield phase, tree, _forked(given, root, Path(folder, tree), built)


def _forked(given: argparse.Namespace, root: Path, caches: Path, built: Any) -> Row:
    """Return a child's measurement. Raise RuntimeError if it failed."""
    fork = multiprocessing.get_context("fork")
    answer, end = fork.Pipe(duplex=False)
    child = fork.Process(target=lambda: end.send(_measured(given, root, caches, *built)))
    child.start()
    end.close()
    try:
        row: Row = answer.recv()
    except EOFError as e:  # multiprocessing has already printed why
        raise RuntimeError(f"a first call with {root} failed") from e
    child.join()
    return row


def _measured(
    given: argparse.Namespace, root: Path, caches: Path, module: torch.nn.Module, inputs: dict[str, Any], labels: dict[str, Any]
) -> Row:
    _use(root, caches)
    torch.set_num_threads(given.threads)
    module.train(given.train)

    def call(fn: Any) -> float:
        start = time.perf_counter()
        if given.train:
            fn(**inputs, **labels).loss.backward()
            module.zero_grad()
        else:
            with torch.no_grad():
                fn(**inputs)
        return time.perf_counter() - start

    call(module)
    gc.collect()  # or the parent's history decides whether a walk of its heap, 0.3 s, falls into the first call
    start = time.perf_counter()
    compiled = torch.compile(module, backend=given.backend)
    call(compiled)
    first = time.perf_counter() - start
    assert Path(sys.modules["fusewright"].__file__ or "").is_relative_to(root)
    times = [call(compiled) for _ in range(3)]
    end = time.perf_counter() + STEADY_SECONDS
    while time.perf_counter() < end:
        times.append(call(compiled))
    return {"first": first, "steady": statistics.median(times[3:] or times)}


def _use(root: Path, caches: Path) -> None:
    """Import Fusewright from a tree from now on, with its own caches."""
    for name in [n for n in sys.modules if n.partition(".")[0].startswith("fusewright")]:
        del sys.modules[name]
    packages = [root / "common", root / "common/native", *sorted((root / "backends").iterdir())]
    sys.path[:0] = [str(p) for p in packages if p.is_dir()]
    for variable in ("FUSEWRIGHT_CACHE_DIR", "FUSEWRIGHT_STATE_DIR"):
        folder = caches / variable
        folder.mkdir(0o700, parents=True, exist_ok=True)
        os.environ[variable] = str(folder)


def _line(name: str, phase: str, found: Found) -> str:
    cells = []
    for what in TIMES:
        before, now = ([row[what] for row in found[name, phase, tree]] for tree in ("before", "now"))
        pairs = statistics.median(b / a for a, b in zip(before, now, strict=True))
        cells.append(f"{what} {min(before):7.3f} {min(now):7.3f} s  {min(now) / min(before):.3f} (pairs {pairs:.3f})")
    return f"{name:14} {phase}  " + "  ".join(cells)


def _verdict(names: Sequence[str], found: Found) -> int:
    worst = 0.0
    for what in TIMES:
        for phase in PHASES:
            least = {t: [min(r[what] for r in found[n, phase, t]) for n in names] for t in ("before", "now")}
            mean = statistics.geometric_mean(b / a for a, b in zip(*least.values(), strict=True))
            print(f"geometric mean, {what} {phase}: {mean:.3f}")
            worst = max(worst, mean)
    return int(worst > MOST)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a checkout of the other commit")
    parser.add_argument("--models", help=f"of the suite [{INFERENCE}; with --train {TRAINING}]")
    parser.add_argument("--train", action="store_true", help="a training step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--backend", default="x86_onednn")
    return parser


if __name__ == "__main__":
    sys.exit(main())

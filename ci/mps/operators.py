"""Count the ATen operators that `apple_mps` covers, by torch's own OpInfo database: `python -m ci.mps.operators [--shard 1/4]`.

The first sample of every entry runs through the backend, forward and backward, simulated, with the kernels themselves computed by
the CPU's emitter. Every operator of a graph is lowered (to a Metal kernel), carried (torch's own MPS call, inside of a region), or
left to eager, which may or may not have code for it on MPS, according to torch's table of operators. An operator counts once, at
its worst result. Some operators that eager dispatches are no longer in the graph, because rows of the opset stand for several, or
a rule replaced them; they count if an entry that calls them runs wholly on the device. `--with` merges shards. Exit code 1
when fewer than `--least` operators are covered.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from ci.mps.fusion import Traffic, counting
from fusewright import ops, report
from fusewright_mps.backend import AppleMps
from tests.backends.mps.native import computes

LEAST = 300
"""The number of operators announced for PyTorch's own MPS backend (PyTorch 2.0 release notes, 2023)."""
ORDER = ("lowered", "view", "carried", "eager on MPS", "not on MPS")
"""From best to worst."""
DTYPES = (torch.float32, torch.int64)
"""An entry runs in the first of these that it supports."""
SAMPLES = 1


def operators(shard: tuple[int, int], until: float = math.inf) -> tuple[dict[str, str], int]:
    """Return every ATen operator of the entries' graphs with its worst result, and the number of entries not begun by `until`."""
    found: dict[str, str] = {}
    entries = [op for k, op in enumerate(op_db) if k % shard[1] == shard[0] - 1]
    for k, op in enumerate(entries):
        if time.monotonic() > until:
            return found, len(entries) - k
        merge(found, _of_entry(op))
    return found, 0


def merge(found: dict[str, str], more: Iterable[tuple[str, str]]) -> None:
    """Add operators to `found`; each keeps its worst result."""
    for name, where in more:
        found[name] = max(found.get(name, where), where, key=ORDER.index)


def _of_entry(op: Any) -> Iterator[tuple[str, str]]:
    for dtype in [t for t in DTYPES if t in op.supported_dtypes("cpu")][:1]:
        gradients = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
        for sample in samples(op, dtype, gradients):
            with Dispatched() as eager:
                run(lambda x, a, kw: op(x, *a, **kw), sample, gradients)
            with report.recording() as reports:
                run(compiled(op), sample, gradients)
            found = [(_operator(o.op), _where(o)) for r in reports for o in r.ops]
            yield from found
            worst = max((where for _, where in found), key=ORDER.index, default="not on MPS")
            if worst != "not on MPS":
                yield from ((name, worst) for name in eager.names - {name for name, _ in found} if _on_mps(name))


class Dispatched(TorchDispatchMode):
    """Records the operators that eager dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name().removesuffix(".default"))
        return func(*args, **(kwargs or {}))


def _on_mps(name: str) -> bool:
    """Return whether an operator exists on MPS, not on CPUs alone."""
    return computes(name.removeprefix("aten::"))


def samples(op: Any, dtype: torch.dtype, gradients: bool) -> list[Any]:
    torch.manual_seed(0)
    found = []
    with contextlib.suppress(RuntimeError, NotImplementedError):  # some need a library that this build lacks
        for sample in op.sample_inputs("cpu", dtype, requires_grad=gradients):
            found.append(sample)
            if len(found) == SAMPLES:
                break
    return found


def compiled(op: Any) -> Any:
    torch.compiler.reset()
    return torch.compile(
        lambda x, a, kw: op(x, *a, **kw), backend="apple_mps", options={"simulate": True, "cache": False}
    )


def run(fn: Any, sample: Any, gradients: bool) -> None:
    """Run a sample; failures are ignored, because `ci/operators/opinfo.py` checks results."""
    with contextlib.suppress(Exception):
        out = fn(sample.input, sample.args, sample.kwargs)
        leaves = [t for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
        if gradients and leaves:
            sum(t.abs().sum() for t in leaves).backward()  # type: ignore[union-attr]


def _operator(name: str) -> str:
    """The overload of a record: a row of the opset, or the full name ("aten.logit.default") of an op that is in none."""
    row = ops.OPS.get(name)
    return (row.qualname if row is not None else name.replace(".", "::", 1)).removesuffix(".default")


def _where(o: report.OpRecord) -> str:
    if o.where != "eager":
        return o.where
    return "eager on MPS" if computes(_operator(o.op).removeprefix("aten::")) else "not on MPS"


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--shard", default="1/1", metavar="I/N")
    p.add_argument("--least", type=int, default=LEAST)
    p.add_argument("--json", help="write every operator to this file")
    p.add_argument(
        "--with", dest="others", nargs="*", default=(), metavar="FILE", help="files of other shards, counted too"
    )
    p.add_argument(
        "--seconds", type=float, default=math.inf, help="begin no entry after that; what is left out is said"
    )
    a = p.parse_args(argv)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    first, parts = map(int, a.shard.split("/"))
    with counting(AppleMps, Traffic()):
        found, left = operators((first, parts), time.monotonic() + a.seconds)
    for path in a.others:
        merge(found, json.loads(Path(path).read_text()).items())
    found = {n: w for n, w in sorted(found.items()) if n.startswith("aten::")}
    if left:
        print(f"left out for want of time: {left} entries")
    packets = {n.partition(".")[0] for n, w in found.items() if w != "not on MPS"}
    for where in ORDER:
        print(f"{where:14} {sum(w == where for w in found.values()):4} overloads")
    print(f"covered: {len(packets)} ATen operators, {sum(w != 'not on MPS' for w in found.values())} overloads")
    print("not on MPS:", ", ".join(n for n, w in found.items() if w == "not on MPS") or "none")
    if a.json:
        Path(a.json).write_text(json.dumps(found, indent=1))
    return 0 if len(packets) >= a.least else 1


if __name__ == "__main__":
    sys.exit(main())

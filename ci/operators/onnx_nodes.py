"""Run ONNX's own node tests through `onnx2torch` and a backend, against eager.

    python -m ci.operators.onnx_nodes --backend x86_onednn

The model of each test is converted and called on the test's inputs, compiled and in eager; values (against fp64), dtypes,
shapes, strides, aliasing and errors are compared as for OpInfo. Tests that cannot be converted, or do not run in eager, are counted
by reason. Needs `pip install onnx`, and `onnx2torch` with `--no-deps` where no torchvision fits torch. Exit code 0 when no test
is wrong.
"""

from __future__ import annotations

import argparse
import logging
import sys
import types
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.testing._internal.opinfo.core import SampleInput

from ci.operators import one_call
from fusewright.conformance.ops import opinfo as check


@dataclass(frozen=True)
class Node:
    """One test: a converted model and inputs. `op` and `name` are what `opinfo` needs of an entry."""

    name: str
    op: torch.nn.Module
    inputs: tuple[torch.Tensor, ...]


def main(argv: Sequence[str] | None = None) -> int:
    a = _arguments(argv)
    logging.disable(logging.CRITICAL)
    skipped: Counter[str] = Counter()
    counted: Counter[str] = Counter()
    for node in nodes(skipped, a.only, a.every):
        outcome = checked(node, check.Compiler(a.backend, a.dynamic))
        if outcome.skipped:
            skipped[outcome.skipped] += 1
            continue
        counted["wrong" if outcome.problems else "wrong in aot_eager too" if outcome.shared else "right"] += 1
        counted["ops lowered"] += outcome.lowered
        counted["ops left to eager"] += outcome.eager
        for problem in outcome.problems or (outcome.shared if a.verbose else ()):
            print(f"{node.name}: {problem}", flush=True)
    print(f"{a.backend}: " + ", ".join(f"{n} {what}" for what, n in counted.items()))
    print(f"skipped {skipped.total()}: " + "; ".join(f"{n} {why}" for why, n in skipped.most_common()))
    return 1 if counted["wrong"] or not counted["right"] else 0


def nodes(skipped: Counter[str], only: str = "", every: int = 1) -> Iterator[Node]:
    """Yield every `every`th test whose name contains `only`; count in `skipped` why others are left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _torchvision()
        import onnx2torch
        from onnx.backend.test.loader import load_model_tests

        for case in sorted(load_model_tests(kind="node"), key=lambda c: c.name)[::every]:
            if only not in case.name:
                continue
            try:
                inputs = tuple(torch.from_numpy(np.array(x)) for x in case.data_sets[0][0])
            except (TypeError, ValueError):
                skipped["inputs of types that torch does not read from numpy"] += 1
                continue
            try:
                module = onnx2torch.convert(case.model).eval()
            except Exception as e:  # anything that a converter raises for a node it does not know
                skipped[_why(e)] += 1
                continue
            yield Node(case.name, module, inputs)


def checked(node: Node, by: check.Compiler) -> check.Outcome:
    """Return the differences between eager and compiled for one call."""
    if not node.inputs:
        return check.Outcome(node.name, "", skipped="no inputs")
    return one_call.checked(node, SampleInput(node.inputs[0], args=node.inputs[1:]), by)


def _why(e: Exception) -> str:
    """Return a converter's error without the parts that are particular to one node."""
    if isinstance(e, NotImplementedError):
        return "not converted: a node or a form of it that onnx2torch does not know"
    return f"not converted: {type(e).__name__}"


def _torchvision() -> None:
    """Stand in for torchvision, which two of onnx2torch's converters import, if none fits this torch; their nodes
    then raise."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        names = ("nms", "box_convert", "roi_align")
        stand_in, ops = types.ModuleType("torchvision"), types.ModuleType("torchvision.ops")
        ops.__dict__.update(dict.fromkeys(names, _absent))
        stand_in.__dict__["ops"] = ops
        sys.modules.update({"torchvision": stand_in, "torchvision.ops": ops})


def _absent(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("torchvision is not installed")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--backend", required=True)
    p.add_argument("--dynamic", action="store_true", help="compile with symbolic sizes")
    p.add_argument("--only", default="", help="tests whose names contain this")
    p.add_argument("--every", type=int, default=1, help="every N-th test, for a sample")
    p.add_argument("--verbose", action="store_true", help="show what aot_eager gets wrong too")
    return p.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

"""Pass every number argument of the opset's rows as a symbol through a backend, against eager.

    python -m ci.operators.symbolic_numbers --backend x86_onednn

`x[:, i]`, `torch.tril(x, k)` or `F.softplus(x, beta)` called with several numbers is compiled once, with a symbol for the number.
For each sample of a row, each number that torch may trace as a symbol is passed, with its own value and as 2; values (against
fp64), dtypes, shapes, strides and reported bugs are compared as for OpInfo. Exit code 0 when none is wrong.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._internal.opinfo.core import SampleInput

from ci.operators import one_call
from fusewright import ops
from fusewright.conformance.ops import opinfo as check
from fusewright.conformance.ops.calls import UNDEFINED, arguments, with_tensors
from fusewright.conformance.ops.cases import CASES
from fusewright.conformance.ops.samples import NotFinite
from fusewright.ops import Kind, Op, rules
from fusewright.ops.oracle import flat

TRACED = ("SymIntType", "NumberType")
"""Schema types whose numbers torch may trace as symbols."""


@dataclass(frozen=True)
class Call:
    """A row's call with one argument open. `op` and `name` are what `opinfo` needs of an entry."""

    row: Op
    argument: str
    number: int
    args: list[Any]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.row.name}({self.argument}={self.number})"

    @property
    def sample(self) -> SampleInput:
        return SampleInput(self.number, args=tuple(rules.tensors(self.args)))

    def op(self, number: int, *tensors: torch.Tensor) -> list[Any]:
        args, kwargs = with_tensors(self.args, iter(tensors)), dict(self.kwargs)
        if self.argument in kwargs:
            kwargs[self.argument] = number
        else:
            args[self._place()] = number
        made = flat(self.row.target(*args, **kwargs))
        kept = [o for k, o in enumerate(made) if o is not None and k not in UNDEFINED.get(self.row.name, ())]
        return [o.neg() if o.dtype.is_floating_point else o for o in kept]  # no backend claims views alone

    def _place(self) -> int:
        return [a.name for a in self.row.target._schema.arguments].index(self.argument)


def calls(rows: str = "") -> Iterator[Call]:
    """Yield calls of every row whose name the pattern matches."""
    for row in ops.ROWS:
        if row.kind is Kind.RANDOM or not re.search(rows, row.name):
            continue
        for case in CASES.get(row.name, ()):
            try:
                args, kwargs = arguments(row, case, torch.float32)
            except (NotFinite, LookupError):  # no such values, or an operator that this torch lacks
                continue
            for argument, number in _numbers(row, args, kwargs):
                yield Call(row, argument, number, args, kwargs)


def _numbers(row: Op, args: list[Any], kwargs: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield arguments that are numbers, with their place. 0 and 1 are never symbols."""
    for i, a in enumerate(row.target._schema.arguments):
        given = kwargs.get(a.name, args[i] if i < len(args) else None)
        kind = a.real_type.getElementType() if a.real_type.kind() == "OptionalType" else a.real_type
        if kind.kind() in TRACED and type(given) in (int, float):
            numbers = {2, given} if isinstance(given, int) else {3}
            yield from ((a.name, n) for n in sorted(numbers - {0, 1}))


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--backend", required=True)
    p.add_argument("--simulate", action="store_true", help="on a simulated device of the backend, on the CPU")
    p.add_argument("--rows", default="", metavar="REGEX", help="only rows whose name it finds")
    a = p.parse_args(argv)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    counted: Counter[str] = Counter()
    for call in calls(a.rows):
        outcome = one_call.checked(call, call.sample, check.Compiler(a.backend, dynamic=True, simulate=a.simulate))
        what = "skipped" if outcome.skipped else "wrong" if outcome.problems else "right"
        counted["wrong in aot_eager too" if outcome.shared and not outcome.problems else what] += 1
        counted["ops lowered"] += outcome.lowered
        for problem in outcome.problems:
            print(f"{call.name}: {problem}", flush=True)
    print(f"{a.backend}: " + ", ".join(f"{n} {what}" for what, n in counted.items()))
    return 1 if counted["wrong"] or not counted["right"] else 0


if __name__ == "__main__":
    sys.exit(main())

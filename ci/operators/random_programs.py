"""Run random programs through a backend, against eager: `python -m ci.operators.random_programs --backend x86_onednn --count 1000`.

A program is a compiled function of some ten calls of torch: arithmetic between dtypes, broadcasting, views, reductions,
products, norms, joins, indices, in-place writes to inputs and views. Sizes start at 0; inputs are dense, transposed,
expanded, with steps and offsets. Values (against fp64), dtypes, shapes, strides, aliasing, mutation and errors are compared as
for OpInfo. A program is determined by its seed: `--first SEED --count 1 --show` prints it.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._internal.opinfo.core import SampleInput

from ci.operators import one_call
from fusewright.conformance.ops import opinfo as check

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
I64, I32, U8, BOOL = torch.int64, torch.int32, torch.uint8, torch.bool
DTYPES = (F32, F32, F32, F32, BF16, F16, F64, I64, I32, U8, BOOL)
SIZES = (0, 1, 1, 2, 3, 4, 5, 8, 17)
MOST = 4096
"""The most elements of a value."""

SMOOTH = "tanh sigmoid exp sin cos erf"
KEEP = "neg abs relu square clone"
FUNCTIONALS = "gelu silu softplus hardswish mish elu leaky_relu"
SAME = "maximum minimum"
ARITHMETIC = "add sub mul"
COMPARE = "eq ne lt le gt ge"


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast to fp32, given as an argument of the program: in the fp64 run it is fp64."""
    return x.to(dtype)


def to_integer(x: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(x, 0.0, 9.0, -9.0).clamp(-100, 100).to(I64)


def divided(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Divide by values that are not near zero: sums that cancel to their rounding error would be misjudged."""
    return torch.div(x, y * y + 1)


def joined(x: torch.Tensor, y: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.cat([x, y], dim)


def stacked(x: torch.Tensor, y: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.stack([x, y], dim)


def piece(x: torch.Tensor, dim: int, start: int, end: int, step: int) -> torch.Tensor:
    return x[(slice(None),) * dim + (slice(start, end, step),)]


def written(x: torch.Tensor, y: torch.Tensor, dim: int, how: str) -> torch.Tensor:
    """Write into a view of `x`, in place."""
    view = x.select(dim, 0)
    getattr(view, how)(y)
    return x


def selected(x: torch.Tensor, index: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.index_select(x, dim, index)


def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return x.mul_(by)


@dataclass(frozen=True)
class Step:
    """One call: `fn(*values[k] for k in reads, *args)`."""

    fn: Callable[..., torch.Tensor]
    reads: tuple[int, ...]
    args: tuple[Any, ...] = ()

    def __str__(self) -> str:
        name = getattr(self.fn, "__name__", str(self.fn))
        return f"{name}({', '.join([f'v{k}' for k in self.reads] + [repr(a) for a in self.args])})"


class Program:
    """Values are numbered: the inputs, then the result of each step. `op` and `name` are what `opinfo` needs of an entry."""

    def __init__(self, seed: int) -> None:
        self.name, self.random = f"program {seed}", random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.inputs = [self._input() for _ in range(self.random.randint(1, 3))]
        self.values: list[torch.Tensor] = list(check.copies(SampleInput(self.inputs))[0])  # steps may write
        self.exact = [True] * len(self.inputs)
        """Which values are free of rounding: only these are compared, ordered or made integers, as one bit may flip a result."""
        self.steps: list[Step] = []
        for _ in range(self.random.randint(3, 12)):
            self._draw()
        made = range(len(self.inputs), len(self.values))
        self.outputs = sorted({*self.random.sample(made, min(2, len(made))), len(self.values) - 1})
        self.op = self._function()

    def __str__(self) -> str:
        lines = [f"v{k}: {x.dtype} {list(x.shape)} strides {list(x.stride())}" for k, x in enumerate(self.inputs)]
        lines += [f"v{k} = {step}" for k, step in enumerate(self.steps, len(self.inputs))]
        return "\n".join([f"# {self.name}", *lines, f"return {', '.join(f'v{k}' for k in self.outputs)}"])

    def _function(self) -> Callable[..., Any]:
        steps, outputs = tuple((s.fn, s.reads, s.args) for s in self.steps), tuple(self.outputs)

        def program(wide: torch.dtype, *inputs: torch.Tensor) -> list[torch.Tensor]:
            values = list(inputs)
            for fn, reads, args in steps:
                values.append(fn(*[values[k] for k in reads], *((wide,) if fn is cast else args)))
            return [values[k] for k in outputs]

        return program

    # -- inputs

    def _input(self) -> torch.Tensor:
        r = self.random
        shape = [r.choice(SIZES) for _ in range(r.randint(0, 4))]
        while len(shape) > 1 and torch.Size(shape).numel() > MOST // 8:
            shape.pop()
        x = self._filled(shape, r.choice(DTYPES))
        match r.randrange(5) if shape else 0:
            case 1:
                return x.transpose(r.randrange(len(shape)), r.randrange(len(shape)))
            case 2:
                return self._filled([2 * n + 1 for n in shape], x.dtype)[tuple(slice(1, None, 2) for _ in shape)]
            case 3:
                return x[:1].expand(shape[0], *shape[1:]) if shape[0] else x
            case 4 if len(shape) == 4:
                return x.contiguous(memory_format=torch.channels_last)
        return x

    def _filled(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if dtype is BOOL:
            return torch.rand(shape, generator=self.generator) > 0.5
        if not dtype.is_floating_point:
            return torch.randint(0 if dtype is U8 else -5, 6, shape, generator=self.generator).to(dtype)
        return torch.randn(shape, generator=self.generator, dtype=F64).to(dtype)

    # -- steps

    def _draw(self) -> None:
        """Add one step that eager can run; try a few times."""
        for _ in range(20):
            k = self.random.randrange(max(0, len(self.values) - 5), len(self.values))
            drawn = self.random.choice(STEPS)(self, k)
            if drawn is None:
                continue
            step, exact = drawn
            try:
                value = step.fn(*[self.values[i] for i in step.reads], *step.args)
            except (RuntimeError, IndexError, NotImplementedError):
                continue
            if value.numel() > MOST:
                continue
            self.steps.append(step)
            self.values.append(value)
            self.exact.append(exact and all(self.exact[i] for i in step.reads))
            if step.fn in (written, scaled) and not self.exact[-1]:
                self.exact = [False] * len(self.exact)  # any value may share the memory
            return

    def dim(self, k: int) -> int:
        return self.random.randrange(max(self.values[k].dim(), 1))

    def partner(self, k: int) -> int:
        """Return a value that broadcasts with the k-th, possibly itself."""
        shape = self.values[k].shape
        return self.random.choice([i for i, v in enumerate(self.values) if _broadcasts(v.shape, shape)])

    def floating(self, k: int) -> bool:
        return self.values[k].is_floating_point()


def _broadcasts(a: Sequence[int], b: Sequence[int]) -> bool:
    return all(n == m or 1 in (n, m) for n, m in zip(reversed(a), reversed(b), strict=False))


Drawn = tuple[Step, bool] | None
"""A step, and whether it is free of rounding; None if the value does not fit."""


def _named(module: Any, names: str, exact: bool, floats: bool = False) -> Callable[[Program, int], Drawn]:
    fns = [getattr(module, n) for n in names.split()]

    def draw(p: Program, k: int) -> Drawn:
        return (Step(p.random.choice(fns), (k,)), exact) if p.floating(k) or not floats else None

    return draw


def _binary(names: str, exact: bool, compares: bool = False) -> Callable[[Program, int], Drawn]:
    fns = [divided if n == "div" else getattr(torch, n) for n in names.split()]

    def draw(p: Program, k: int) -> Drawn:
        other = p.partner(k)
        if compares and not (p.exact[k] and p.exact[other]):
            return None
        whole = not (p.floating(k) or p.floating(other))
        return Step(p.random.choice(fns), (k, other)), exact or whole

    return draw


def _reduce(p: Program, k: int) -> Drawn:
    fn = p.random.choice((torch.sum, torch.mean, torch.amax, torch.amin, torch.var))
    return Step(fn, (k,), (p.dim(k),) if p.random.random() < 0.8 else ()), fn in (torch.amax, torch.amin)


def _ordered(p: Program, k: int) -> Drawn:
    fn = p.random.choice((torch.argmax, torch.argmin, torch.any, torch.all))
    return (Step(fn, (k,), (p.dim(k),)), True) if p.exact[k] else None


def _view(p: Program, k: int) -> Drawn:
    v, r = p.values[k], p.random
    n = v.dim()
    choices: list[Step] = [
        Step(torch.unsqueeze, (k,), (r.randint(0, n),)), Step(torch.flatten, (k,)), Step(torch.squeeze, (k,)),
        Step(torch.Tensor.contiguous, (k,)), Step(torch.Tensor.expand, (k,), (2, *v.shape)),
    ]  # fmt: skip
    if n:
        d, size = p.dim(k), v.shape[p.dim(k)]
        start = r.randint(0, size)
        choices += [
            Step(torch.transpose, (k,), (d, p.dim(k))), Step(torch.select, (k,), (d, 0)),
            Step(torch.permute, (k,), (r.sample(range(n), n),)), Step(torch.flip, (k,), ([d],)),
            Step(piece, (k,), (d, start, r.randint(start, size + 2), r.choice((1, 1, 2, 3)))),
            Step(torch.reshape, (k,), (r.choice(([-1], [1, -1], [v.shape[0], -1])),)),
            Step(torch.roll, (k,), (r.randint(-2, 2), d)), Step(torch.Tensor.repeat, (k,), (2, *(1,) * n)),
            Step(torch.diagonal, (k,)), Step(torch.tril, (k,)),
        ]  # fmt: skip
    return r.choice(choices), True


def _cast(p: Program, k: int) -> Drawn:
    if p.random.random() < 0.3:
        return (Step(to_integer, (k,)), True) if p.exact[k] else None
    return Step(cast, (k,), (F32,)), p.values[k].dtype is not F64


def _where(p: Program, k: int) -> Drawn:
    masks = [i for i, v in enumerate(p.values) if v.dtype is BOOL and _broadcasts(v.shape, p.values[k].shape)]
    if not masks:
        return None
    mask = p.random.choice(masks)
    if p.random.random() < 0.5:
        return Step(torch.masked_fill, (k, mask), (1,)), True
    return Step(torch.where, (mask, k, p.partner(k))), True


def _product(p: Program, k: int) -> Drawn:
    v = p.values[k]
    if not p.floating(k) or v.dim() == 0:
        return None
    same = [(i, w) for i, w in enumerate(p.values) if w.dtype is v.dtype and w.dim()]
    others = [i for i, w in same if w.shape[max(w.dim() - 2, 0)] == v.shape[-1]]
    if others and p.random.random() < 0.6:
        return Step(torch.matmul, (k, p.random.choice(others))), False
    rows = [i for i, w in same if w.dim() == 2 and w.shape[1] == v.shape[-1]]
    return (Step(torch.nn.functional.linear, (k, p.random.choice(rows))), False) if rows else None


def _normed(p: Program, k: int) -> Drawn:
    if not p.floating(k) or not p.values[k].dim():
        return None
    width = [p.values[k].shape[-1]]
    d = p.dim(k)
    functional = torch.nn.functional
    return p.random.choice((
        Step(functional.layer_norm, (k,), (width, None, None, 1e-2)), Step(torch.softmax, (k,), (d,)),
        Step(torch.log_softmax, (k,), (d,)), Step(torch.cumsum, (k,), (d,)), Step(torch.logsumexp, (k,), (d,)),
    )), False  # fmt: skip


def _joined(p: Program, k: int) -> Drawn:
    same = [i for i, v in enumerate(p.values) if v.shape == p.values[k].shape]
    return Step(p.random.choice((joined, stacked)), (k, p.random.choice(same)), (p.dim(k),)), True


def _indexed(p: Program, k: int) -> Drawn:
    v = p.values[k]
    if not v.dim():
        return None
    d = p.dim(k)
    indices = [w if w.dtype is I64 and w.dim() == 1 else None for w in p.values]
    fits = [i for i, w in enumerate(indices) if w is not None and all(0 <= int(n) < v.shape[d] for n in w)]
    return (Step(selected, (k, p.random.choice(fits)), (d,)), True) if fits else None


def _write(p: Program, k: int) -> Drawn:
    v = p.values[k]
    if p.random.random() < 0.4:
        return (Step(scaled, (k,), (2.0,)), True) if p.floating(k) else None
    if not v.dim() or 0 in v.shape:
        return None
    d = p.dim(k)
    part = v.select(d, 0)
    same = [(i, w) for i, w in enumerate(p.values) if w.dim() <= part.dim() and w.dtype is v.dtype]
    fits = [i for i, w in same if _broadcasts(w.shape, part.shape)]
    return (Step(written, (k, p.random.choice(fits)), (d, p.random.choice(("copy_", "add_")))), False) if fits else None


STEPS: tuple[Callable[[Program, int], Drawn], ...] = (
    _named(torch, SMOOTH, exact=False, floats=True), _named(torch, KEEP, exact=False),
    _named(torch.nn.functional, FUNCTIONALS, exact=False, floats=True), _binary(SAME, exact=True),
    _binary(ARITHMETIC, exact=False), _binary(ARITHMETIC, exact=False), _binary("div", exact=False),
    _binary(COMPARE, exact=True, compares=True), _reduce, _ordered, _view, _view, _view, _cast, _where, _product, _product,
    _normed, _joined, _indexed, _write,
)  # fmt: skip


def checked(p: Program, by: check.Compiler) -> check.Outcome:
    """Return the differences between eager and compiled for one call."""
    return one_call.checked(p, SampleInput(F32, args=tuple(p.inputs)), by)


def main(argv: Sequence[str] | None = None) -> int:
    p = arguments(__doc__)
    p.add_argument("--dynamic", action="store_true", help="compile with symbolic sizes")
    a = p.parse_args(argv)
    return compare_all(a, Program, lambda p: checked(p, check.Compiler(a.backend, a.dynamic)))


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """Return the arguments of a tool that runs programs by their seeds."""
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--backend", required=True)
    p.add_argument("--first", type=int, default=0, help="the first seed")
    p.add_argument("--count", type=int, default=200)
    p.add_argument("--show", action="store_true", help="print every program")
    return p


def compare_all(a: argparse.Namespace, program: Callable[[int], Any], judge: Callable[[Any], check.Outcome]) -> int:
    """Judge the programs of these seeds and print what is wrong; 1 if anything is, or nothing was right."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    counted: Counter[str] = Counter()
    for seed in range(a.first, a.first + a.count):
        p = program(seed)
        if a.show:
            print(p)
        outcome = judge(p)
        why = outcome.skipped or ("wrong" if outcome.problems else "wrong in aot_eager too" if outcome.shared else "right")
        counted[why] += 1
        counted["ops lowered"] += outcome.lowered
        counted["ops left to eager"] += outcome.eager
        if outcome.problems:
            print("\n".join([str(p), *outcome.problems]), flush=True)
    print(f"{a.backend}: " + ", ".join(f"{n} {what}" for what, n in counted.items()))
    return 1 if counted["wrong"] or not counted["right"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""Run random loops over steps through a backend, against eager: `python -m ci.operators.random_loops --backend x86_onednn`.

A program is the source of a function with one loop, as people write them: one to three states with gates, masks, comparisons,
products by weights, reductions of states; steps in either order; results stacked, filled in place or only the last; in training,
in inference, with symbolic sizes. Values and gradients (against fp64), dtypes, shapes, strides, aliasing and mutation are compared
as for OpInfo. A program is determined by its seed: `--first SEED --count 1 --show` prints it.
"""

from __future__ import annotations

import linecache
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.testing._internal.opinfo.core import SampleInput

from ci.operators import one_call
from ci.operators.random_programs import arguments, compare_all
from fusewright.conformance.ops import opinfo as check

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
DTYPES = (F32, F32, F32, F32, F64, F64, BF16, F16)

MAPS = (
    "torch.tanh({})", "torch.sigmoid({})", "torch.relu({})", "F.softplus({})", "F.gelu({})", "F.silu({})", "-{}", "{}.abs()",
    "{}.clamp(-1, 1)", "{}.clamp(min=-0.5)", "torch.exp(-{0} * {0})", "torch.sin({})", "{0} * {0}", "torch.log1p({}.abs())",
    "F.dropout({}, 0.3, training=False)", "{}.clone()", "{}.detach()", "F.leaky_relu({})", "1 - {}", "0.5 * {}", "{} / 2",
    "{} + 0.25",
)  # fmt: skip
"""Calls of one value."""

PAIRS = (
    "{} + {}", "{} + {}", "{} - {}", "{} * {}", "{} * {}", "torch.maximum({}, {})", "torch.minimum({}, {})",
    "torch.logaddexp({}, {})", "{} / (1 + {}.abs())", "torch.lerp({}, {}, 0.3)", "torch.sub({}, {}, alpha=0.5)",
    "torch.where({0} > {1}, {0}, 0.5 * {1})",
)  # fmt: skip
"""Calls of two values. Their operands are no halves that were compared: one bit may flip a result."""

STEPWISE = ("{} * (0.1 * t)", "{} / (t + 1)", "{} + 0.1 * (t % 2)", "({0} if t % 2 else -{0})", "({0} if t else 0.5 * {0})")
"""Calls that differ from step to step."""

MASKED = (
    "torch.where(k, {}, {})", "{0}.masked_fill(k, 0.0) + {1}", "torch.where(k, {0}, {1} * 0.5)", "{0} * k + {1} * (~k)",
    "torch.where({0} > 0.5, {0} - 0.5, {1})", "({0} > 0).to({0}.dtype) * {1}",
)  # fmt: skip

PRODUCTS = ("{} @ w", "F.linear({}, w)", "F.linear({}, w, b)", "torch.addmm(b, {}, w)", "torch.matmul({}, w.t())")
REDUCED = (
    "torch.softmax({}, -1)", "F.layer_norm({}, (D,))", "F.layer_norm({}, (D,), b, b)", "{0} / (1 + {0}.norm(dim=-1, keepdim=True))",
    "{0} - {0}.mean(-1, keepdim=True)", "{0} / (1 + {0}.abs().amax(-1, keepdim=True))", "{0} + {0}.sum(-1, keepdim=True) * 0.1",
    "{0} + {0}.sum(0, keepdim=True) * 0.1", "F.normalize({}, dim=-1, eps=0.1)", "{0} + {0}.flip(-1)", "{}.roll(1, -1)",
    "{0} - torch.logsumexp({0}, -1, keepdim=True)", "torch.cat({}.chunk(2, -1)[::-1], -1)", "{}.cumsum(-1) * 0.3",
)  # fmt: skip
"""What no pointwise step says."""

BOUNDED = ("torch.tanh({})", "torch.sigmoid({})", "{}.clamp(-2, 2)", "0.5 * {}", "a * {}", "{} / 3")
"""What keeps states small, so that rounding errors do not grow."""


class Program:
    """The source of a function of `x`, `y` ([B, T, D] or [T, B, D]), a mask, a decay, a weight, a bias and first states. `op` and
    `name` are what `opinfo` needs of an entry."""

    def __init__(self, seed: int) -> None:
        self.name, self.random = f"loop {seed}", random.Random(seed)
        r = self.random
        self.generator = torch.Generator().manual_seed(seed)
        self.training, self.dynamic = r.random() < 0.5, r.random() < 0.2
        self.dtype, self.dim = r.choice(DTYPES), r.choice((1, 1, 0))
        self.batch, self.steps, self.width = r.choice((1, 2, 3)), r.choice((8, 9, 12, 12, 17)), r.choice((2, 4, 6, 8))
        self.halves = self.dtype in (BF16, F16)
        self.wide = self.halves and r.random() < 0.4
        """Whether states are of a wider type than inputs."""
        self.level = r.choice((0, 0, 1, 2))
        """Pointwise steps alone; with products of states; with reductions too."""
        self.states = "hcn"[: r.choice((1, 1, 2, 2, 3))]
        self.inputs = self._inputs()
        self.source = "\n".join(self._lines())
        self.op = self._function()

    def __str__(self) -> str:
        how = f"# {self.name}: {'training' if self.training else 'inference'}{', dynamic' if self.dynamic else ''}"
        names = ("x", "y", "mask", "a", "w", "b", "h0")
        given = [f"# {n}: {x.dtype} {list(x.shape)} strides {list(x.stride())}" for n, x in zip(names, self.inputs, strict=True)]
        return "\n".join([how, *given, self.source])

    def _function(self) -> Callable[..., Any]:
        file = f"<{self.name}>"
        linecache.cache[file] = (len(self.source), None, self.source.splitlines(True), file)
        space: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
        exec(compile(self.source, file, "exec"), space)
        function: Callable[..., Any] = space["program"]
        return function

    # -- inputs

    def _inputs(self) -> list[torch.Tensor]:
        r, n = self.random, self.width
        lead = [self.batch, self.steps] if self.dim else [self.steps, self.batch]
        mask = torch.rand((*lead, r.choice((1, n))), generator=self.generator) > 0.4
        decay = r.choice(((n,), (self.batch, n), (1,), ()))
        found = [
            self._sequence(lead), self._sequence(lead), mask, self._drawn(decay).sigmoid(), self._drawn((n, n)) / n,
            self._drawn((n,)), self._drawn((self.batch, n)),
        ]  # fmt: skip
        wanted = [k == 0 or r.random() < 0.7 for k in range(len(found))]
        return [x.requires_grad_(self.training and w and x.is_floating_point()) for x, w in zip(found, wanted, strict=True)]

    def _drawn(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, dtype=F64).to(self.dtype)

    def _sequence(self, lead: Sequence[int]) -> torch.Tensor:
        match self.random.randrange(5):
            case 0:
                return self._drawn((lead[1], lead[0], self.width)).transpose(0, 1)
            case 1:
                return self._drawn((*lead, 2 * self.width))[..., : self.width]
            case 2:
                return self._drawn((*lead, 1)).expand(*lead, self.width)
        return self._drawn((*lead, self.width))

    # -- source

    def _lines(self) -> list[str]:
        r = self.random
        kind = "wide" if self.wide else "x.dtype"
        sizes = f"x.shape[{self.dim}], x.shape[{1 - self.dim}], x.shape[2]"
        head = ["def program(wide, x, y, mask, a, w, b, h0):", f"    T, B, D = {sizes}"]
        if self.wide:
            head.append("    a, w, b = a.to(wide), w.to(wide), b.to(wide)")
        if r.random() < 0.3:
            made = r.choice(("torch.sigmoid(y)", "torch.exp(-y * y)", "y @ w.to(y.dtype)", f"y.flip({self.dim})"))
            head.append(f"    y = {made}")
        shaped = "x.new_zeros(B, D, dtype={})", "torch.zeros(B, D, dtype={})", "h0.to({})", "torch.ones(B, D, dtype={})"
        begun = [text.format(kind) for text in shaped]
        head += [f"    {s} = {r.choice(begun)}" for s in self.states]
        how, self.filled = self._how(), r.random() < 0.3
        if self.filled:
            shape = "B, T, D" if self.dim else "T, B, D"
            head.append(f"    out = torch.{r.choice(('zeros', 'empty', 'zeros'))}({shape}, dtype={kind})")
        else:
            head.append("    out = []")
        return [*head, *how, *self._body(), *self._end()]

    def _how(self) -> list[str]:
        """The loop itself; each step reads `v`, `z` and `k`."""
        at = ":, t" if self.dim else "t"
        if not self.random.randrange(4):
            taken = ", ".join(f"{n}.unbind({self.dim})" for n in ("x", "y", "mask"))
            return [f"    for t, (v, z, k) in enumerate(zip({taken})):"]
        steps = self.random.choice(("range(T)", "range(T)", "range(T)", "reversed(range(T))", "range(T - 1, -1, -1)"))
        return [f"    for t in {steps}:", f"        v, z, k = x[{at}], y[{at}], mask[{at}]"]

    def _body(self) -> list[str]:
        r, pool, lines = self.random, ["v", "z", *self.states, *self.states], list[str]()
        if self.wide:
            lines.append("        v, z = v.to(wide), z.to(wide)")
        for k in range(r.randint(1, 5)):
            lines.append(f"        u{k} = {self._call(pool)}")
            pool.append(f"u{k}")
        early = r.choice(self.states)
        lines += [f"        {line}" for line in self._kept(early)] if r.random() < 0.15 else []
        if r.random() < 0.15:
            lines.append(f"        p = {early}")  # states of two steps before
            pool.append("p")
        together = len(self.states) > 1 and r.random() < 0.3
        new = [r.choice(BOUNDED).format(f"({self._mixed(s, pool)})") for s in self.states]
        if together:
            lines.append(f"        {', '.join(self.states)} = {', '.join(new)}")
        else:
            lines += [f"        {s} = {e}" for s, e in zip(self.states, new, strict=True)]
        if r.random() < 0.1:
            lines += [f"        {early} = {early}.clone()"] if self.training else []  # its gradient may need what it was
            lines.append(f"        {early} {r.choice(('+=', '*='))} {r.choice(('0.5', '0.1 * v', 'a'))}")
        kept = r.choice((self.states[0], self.states[-1], pool[-1], f"{self.states[0]} * z", f"{self.states[-1]} + v"))
        if r.random() < 0.8 or self.filled:
            lines += [f"        {line}" for line in self._kept(kept)]
        return lines

    def _kept(self, what: str) -> list[str]:
        if not self.filled:
            return [f"out.append({what})"]
        return [f"out[{':, t' if self.dim else 't'}] = {what}"]

    def _mixed(self, state: str, pool: Sequence[str]) -> str:
        """A step of one state: often linear, or gated."""
        r = self.random
        return r.choice((
            f"a * {state} + {r.choice(pool)}", f"{state} + {r.choice(pool)}", f"torch.sigmoid(z) * {state} + {r.choice(pool)} * v",
            self._call([state, *pool]), f"torch.where(k, {r.choice(pool)}, {state})", r.choice(PAIRS).format(state, r.choice(pool)),
        ))  # fmt: skip

    def _call(self, pool: Sequence[str]) -> str:
        r, x, y = self.random, self.random.choice(pool), self.random.choice(pool)
        kinds: list[tuple[str, ...]] = [MAPS, PAIRS, PAIRS, STEPWISE, MASKED]
        kinds += [PRODUCTS, PRODUCTS] if self.level else []
        kinds += [REDUCED, REDUCED] if self.level > 1 else []
        text = r.choice(r.choice(kinds))
        while self.halves and ">" in text:
            text = r.choice(r.choice(kinds))
        return text.format(x, y)

    def _end(self) -> list[str]:
        r, states = self.random, ", ".join(self.states)
        if self.filled:
            return [f"    return {r.choice(('out', f'out, {states}', f'(out * 2).sum({self.dim}), {self.states[0]}'))}"]
        join = r.choice((
            f"torch.stack(out, {self.dim})", f"torch.stack(out, {self.dim})", "torch.stack(out)", "torch.cat(out, -1)",
            "torch.stack(out[::-1], -1)", "torch.stack(out, 1) @ w.to(out[0].dtype)",
        ))  # fmt: skip
        some = r.choice((join, f"{join}, {states}", f"{join}.sum(0)", "out[-1]", "sum(out)", "out", f"out[0], {join}"))
        return [f"    if not out:\n        return {states}", f"    return {some}"]


def checked(p: Program, backend: str | Callable[..., Any]) -> check.Outcome:
    """Return the differences between eager and compiled for one call, and its gradients in training."""
    by = check.Compiler(backend, p.dynamic)  # type: ignore[arg-type]
    return one_call.checked(p, SampleInput(F32, args=tuple(p.inputs)), by, p.training)


def main(argv: Sequence[str] | None = None) -> int:
    a = arguments(__doc__).parse_args(argv)
    return compare_all(a, Program, lambda p: checked(p, a.backend))


if __name__ == "__main__":
    sys.exit(main())

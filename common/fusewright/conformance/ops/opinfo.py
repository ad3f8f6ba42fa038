"""Run one entry of torch's OpInfo database through a `torch.compile` backend, and compare everything observable with eager."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from fusewright import _torch_compat as compat
from fusewright import report
from fusewright.interface import HOST

JUDGE = "aot_eager"
"""Errors that this backend makes too are torch's own, not ours."""


@dataclass
class Outcome:
    """The result of one entry. `problems` are ours alone; `shared` are those that `aot_eager` has too."""

    entry: str
    dtype: str
    checks: int = 0
    uncaptured: int = 0
    lowered: int = 0
    carried: int = 0
    eager: int = 0
    problems: list[str] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)
    skipped: str = ""

    def settle(self, where: str, found: Sequence[str], judge: Callable[[], Sequence[str]]) -> None:
        """Record the findings of one check; `judge` runs the same check through `aot_eager`."""
        self.checks += 1
        if not found:
            return
        theirs = {f.split(":")[0] for f in judge()}
        for f in found:
            (self.shared if f.split(":")[0] in theirs else self.problems).append(f"{where}: {f}")


def lacks() -> str:
    """A package that torch's OpInfo database needs and that is not installed, or ""."""
    return next((name for name in ("expecttest", "pytest") if find_spec(name) is None), "")


def entries(dtype: torch.dtype, device: str = HOST) -> list[str]:
    """The names of all entries that support the dtype on the device, including variants, in database order."""
    return [full_name(op) for op in compat.op_database() if dtype in op.supported_dtypes(device)]


def full_name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


@dataclass(frozen=True)
class Compiler:
    """How a call is compiled, and the device of its samples. With `dynamic`, sizes are symbolic, and a graph serves every later
    sample that it fits."""

    backend: str
    dynamic: bool = False
    device: str = HOST
    simulate: bool = False

    def options(self) -> dict[str, Any] | None:
        """The options for `torch.compile`; None for a backend without options."""
        return {"simulate": True} if self.simulate else None

    def judge(self) -> Compiler:
        return replace(self, backend=JUDGE, simulate=False)


def check(name: str, dtype: torch.dtype, backend: Compiler, samples: int, gradients: bool) -> Outcome:
    """Run every check of one entry. `samples`: how many of its samples, evenly spread; 0 for all."""
    torch.compiler.reset()
    op = next(o for o in compat.op_database() if full_name(o) == name)
    outcome = Outcome(name, str(dtype).removeprefix("torch."))
    torch.manual_seed(0)
    inputs = spread(list(op.sample_inputs(backend.device, dtype, requires_grad=False)), samples)
    if not inputs:
        outcome.skipped = "the entry has no samples"
        return outcome
    for i, sample in enumerate(inputs):
        _check_forward(outcome, f"sample {i}", op, sample, dtype, backend)
    with contextlib.suppress(NotImplementedError, RuntimeError):  # some samples have no non-contiguous form
        strided = inputs[len(inputs) // 2].noncontiguous()
        _check_forward(outcome, "non-contiguous", op, strided, dtype, backend)
    if gradients and op.supports_autograd and dtype in op.supported_backward_dtypes(backend.device):
        torch.manual_seed(0)
        for i, sample in enumerate(spread(list(op.sample_inputs(backend.device, dtype, requires_grad=True)), samples)):
            _check_gradients(outcome, f"gradients of sample {i}", op, sample, dtype, backend)
    if op.error_inputs_func is not None:
        for i, error in enumerate(spread(list(op.error_inputs(backend.device)), samples)):
            _check_error(outcome, f"error input {i}", op, error.sample_input, backend)
    return outcome


def spread(items: list[Any], n: int) -> list[Any]:
    """`n` of the items, first and last among them; all of them for 0."""
    if n == 0 or len(items) <= n:
        return items
    return [items[round(k * (len(items) - 1) / max(n - 1, 1))] for k in range(n)]


# ---------------------------------------------------------------- one call


@dataclass
class Seen:
    """Everything observable of one call: the outputs, the inputs after it, and the gradients, all flattened."""

    outputs: list[Any]
    inputs: list[torch.Tensor]
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    error: BaseException | None = None


def copies(sample: Any) -> tuple[Any, Any, Any]:
    """Copies of the sample's tensor arguments with the same strides."""

    def copy(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if x.layout is not torch.strided or x.is_quantized or x.is_conj() or x.is_neg():
            new = x.detach().clone()
        else:  # keep overlapping elements, too
            memory = x.detach().untyped_storage().clone()
            new = torch.empty(0, dtype=x.dtype, device=x.device)
            new.set_(memory, x.storage_offset(), x.shape, x.stride())
        return new.requires_grad_(x.requires_grad)

    return tuple(tree_map(copy, (sample.input, sample.args, sample.kwargs)))


UNDEFINED = re.compile(r"empty")
"""Names of entries that return uninitialized memory."""


def call(
    op: Any, sample: Any, backend: Compiler | None, gradients: bool = False, outcome: Outcome | None = None
) -> Seen:
    """Make one call on copies of the sample, by eager (backend None) or compiled. Errors are caught and stored."""
    arguments = copies(sample)
    tensors = [t for t in tree_flatten(arguments)[0] if isinstance(t, torch.Tensor)]

    fn = _function(op.op)
    torch.manual_seed(1)
    try:
        with torch.set_grad_enabled(gradients):
            if backend is None:
                result = fn(*arguments)
            else:
                result = _compiled(fn, arguments, backend, outcome)
            seen = Seen(tree_flatten(result)[0], tensors)
            if gradients:
                seen.gradients = _gradients(sample.output_process_fn_grad(result), tensors)
    except Exception as e:  # errors are part of the comparison
        return Seen([], tensors, error=e)
    return seen


@functools.lru_cache(1)
def _function(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function object for every sample of an entry, because Dynamo caches by code object."""

    def fn(x: Any, args: Any, kwargs: Any) -> Any:
        return function(x, *args, **kwargs)

    return fn


def _compiled(fn: Callable[..., Any], arguments: Any, by: Compiler, outcome: Outcome | None) -> Any:
    if not by.dynamic or by.backend == JUDGE:
        torch.compiler.reset()
    with report.recording() as reports:
        result = torch.compile(fn, backend=by.backend, dynamic=by.dynamic, options=by.options())(*arguments)
    if outcome is not None:
        outcome.lowered += sum(r.count("lowered") for r in reports)
        outcome.carried += sum(r.count("carried") for r in reports)
        outcome.eager += sum(r.count("eager") for r in reports)
        outcome.uncaptured += not reports and not by.dynamic
        outcome.problems += [f"bug: {b}" for r in reports for b in r.bugs]
    return result


def _gradients(result: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    wanted = [t for t in tensors if t.requires_grad]
    outputs = [o for o in tree_flatten(result)[0] if isinstance(o, torch.Tensor) and o.requires_grad]
    if not outputs or not wanted:
        return []
    torch.manual_seed(2)
    cotangents = [_cotangent(o) if o.layout is torch.strided else torch.ones_like(o) for o in outputs]
    return list(torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True))


def _cotangent(out: torch.Tensor) -> torch.Tensor:
    """Random numbers that are equal in every dtype; torch draws different ones in each."""
    coarse = torch.randint(-16, 17, (*out.shape, 2) if out.is_complex() else out.shape, device=out.device) / 8
    drawn = torch.view_as_complex(coarse) if out.is_complex() else coarse
    return torch.empty_like(out).copy_(drawn)


# ---------------------------------------------------------------- comparisons


def _check_forward(outcome: Outcome, where: str, op: Any, sample: Any, dtype: torch.dtype, backend: Compiler) -> None:
    wanted = call(op, sample, None)
    if wanted.error is not None:
        return

    def found(by: Compiler, note: Outcome | None = None) -> list[str]:
        got = call(op, sample, by, outcome=note)
        return differences(op, wanted, got, Exact(op, sample, gradients=False))

    outcome.settle(where, found(backend, outcome), lambda: found(backend.judge()))


def _check_gradients(outcome: Outcome, where: str, op: Any, sample: Any, dtype: torch.dtype, backend: Compiler) -> None:
    wanted = call(op, sample, None, gradients=True)
    if wanted.error is not None or not wanted.gradients:
        return

    def found(by: Compiler, note: Outcome | None = None) -> list[str]:
        got = call(op, sample, by, gradients=True, outcome=note)
        return differences(op, wanted, got, Exact(op, sample, gradients=True))

    outcome.settle(where, found(backend, outcome), lambda: found(backend.judge()))


def _check_error(outcome: Outcome, where: str, op: Any, sample: Any, backend: Compiler) -> None:
    wanted = call(op, sample, None).error
    if wanted is None:
        return

    def found(by: Compiler) -> list[str]:
        got = call(op, sample, by).error
        if got is None:
            return [f"no error: eager raises {type(wanted).__name__}"]
        # Dynamo wraps what it sees while tracing in subclasses of eager's type.
        if not isinstance(got, type(wanted)):
            return [f"error type: {type(got).__name__}, eager raises {type(wanted).__name__}"]
        words, theirs = first_line(got), first_line(wanted)
        return [] if words == theirs else [f"error text: {words}; eager says {theirs}"[:300]]

    outcome.settle(where, found(backend), lambda: found(backend.judge()))


def first_line(error: BaseException) -> str:
    """The message of an error, without location and cause."""
    return str(error).partition("\n")[0].strip()


def differences(op: Any, wanted: Seen, got: Seen, exact: Exact) -> list[str]:
    """Differences between `got` and eager's `wanted`, each as "kind: detail"."""
    if got.error is not None:
        return [f"raises: {type(got.error).__name__}: {' '.join(str(got.error).split())[:160]}"]
    if len(wanted.outputs) != len(got.outputs):
        return [f"outputs: {len(got.outputs)}, eager has {len(wanted.outputs)}"]
    if UNDEFINED.search(op.name):
        wanted, got = _zeroed(wanted), _zeroed(got)
    found = list(_compare("value", wanted.outputs, got.outputs, exact, lambda seen: seen.outputs))
    found += _compare("mutation", wanted.inputs, got.inputs, exact, lambda seen: seen.inputs)
    found += _compare("gradient", wanted.gradients, got.gradients, exact, lambda seen: seen.gradients)
    if sharing(wanted) != sharing(got):
        found.append("alias: outputs share memory with inputs or each other otherwise than in eager")
    if type(op).__name__ not in ("UnaryUfuncInfo", "BinaryUfuncInfo"):  # another order of operations may give the other zero
        found = [f for f in found if not f.startswith("zero sign")]
    return found


def _zeroed(seen: Seen) -> Seen:
    """Everything except the values of the outputs."""
    for t in seen.outputs:
        if isinstance(t, torch.Tensor):
            t.detach().zero_()
    return seen


NEIGHBOURS = 3
"""Inputs one rounding step from the sample, on which eager is measured too."""


class Exact:
    """The same call in fp64, and eager's error near this sample, both computed on demand.

    One sample tells little of eager's error: where terms cancel, eager may be accurate by luck.
    """

    def __init__(self, op: Any, sample: Any, gradients: bool) -> None:
        self._op, self._sample, self._gradients = op, sample, gradients
        self._pairs: list[tuple[Seen, Seen]] = []
        self._seen: Seen | None = None

    def seen(self) -> Seen:
        """The call in fp64."""
        if self._seen is None:
            self._seen = call(self._op, _wide(self._sample), None, self._gradients)
        return self._seen

    def error_nearby(self, pick: Callable[[Seen], Any]) -> float:
        """Eager's largest error in the value that `pick` selects, over the neighbours; 0.0 if unknown."""
        if not self._pairs:
            near = [_nudged(self._sample, seed) for seed in range(NEIGHBOURS)]
            self._pairs = [
                (call(self._op, s, None, self._gradients), call(self._op, _wide(s), None, self._gradients))
                for s in near
            ]
        return max(_error(pick, eager, wide) for eager, wide in self._pairs)


def _error(pick: Callable[[Seen], Any], eager: Seen, wide: Seen) -> float:
    try:
        w, r = _dense(pick(eager)), _dense(pick(wide))
    except (IndexError, AttributeError, RuntimeError):
        return 0.0
    w, r = (torch.view_as_real(t) if t.is_complex() else t for t in (w, r))
    if w.shape != r.shape or not torch.equal(w.isfinite(), r.isfinite()) or not w.isfinite().any():
        return 0.0
    return float((w.double() - r.double())[w.isfinite()].abs().max())


def _nudged(sample: Any, seed: int) -> Any:
    """The sample with every number changed by up to one rounding step."""
    g = torch.Generator().manual_seed(seed)

    def nudge(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.layout is not torch.strided:
            return x
        step = torch.randint(-1, 2, x.shape, generator=g).to(x)
        return (x.detach() * (1 + step * torch.finfo(x.dtype).eps)).requires_grad_(x.requires_grad)

    return sample.transform(nudge)


def _compare(
    kind: str, wanted: Sequence[Any], got: Sequence[Any], exact: Exact, part: Callable[[Seen], Sequence[Any]]
) -> Iterator[str]:
    # A result of cancellation has the rounding errors of its summands: other results, or cotangents, which are about 1.
    scale = max(_largest(wanted), 1.0 if kind == "gradient" else 0.0)
    for i, (w, g) in enumerate(itertools.zip_longest(wanted, got)):
        if not isinstance(w, torch.Tensor) or not isinstance(g, torch.Tensor):
            same = type(w) is type(g) and (w == g or w != w)
            if not same:
                yield f"{kind}: {i} is {g!r}, eager has {w!r}"[:200]
            continue
        yield from _compare_tensor(kind, i, w, g, exact, functools.partial(_item, part, i), scale)


def _item(part: Callable[[Seen], Sequence[Any]], i: int, seen: Seen) -> Any:
    return part(seen)[i]


def _compare_tensor(
    kind: str, i: int, w: torch.Tensor, g: torch.Tensor, exact: Exact, pick: Callable[[Seen], Any], scale: float
) -> Iterator[str]:
    if w.dtype != g.dtype:
        yield f"dtype: {kind} {i} is {g.dtype}, eager has {w.dtype}"
    if w.device != g.device:
        yield f"device: {kind} {i} is on {g.device}, eager has {w.device}"
        return
    if w.shape != g.shape or w.layout != g.layout:
        yield f"shape: {kind} {i} is {g.layout} {tuple(g.shape)}, eager has {w.layout} {tuple(w.shape)}"
        return
    if w.requires_grad != g.requires_grad:
        yield f"requires_grad: {kind} {i} has {g.requires_grad}, eager has {w.requires_grad}"
    if kind == "value" and _strides(w) != _strides(g):
        yield f"stride: {kind} {i} has {g.stride()}, eager has {w.stride()}"
    if w.dtype == g.dtype:
        a, b = _dense(w), _dense(g)
        if reason := _value_difference(a, b, exact, pick, scale):
            yield f"{kind}: {i} {reason}"
        elif kind == "value" and torch.equal(a, b) and (n := _zeros_of_other_sign(a, b)):
            yield f"zero sign: {kind} {i} has {n} zeros of the other sign"


def _largest(tensors: Sequence[Any]) -> float:
    """The largest finite magnitude among the tensors."""
    floats = [t.detach() for t in tensors if isinstance(t, torch.Tensor) and t.is_floating_point() and t.numel()]
    dense = [_dense(t) for t in floats]
    return max((float(t[t.isfinite()].abs().max()) for t in dense if t.isfinite().any()), default=0.0)


def _zeros_of_other_sign(w: torch.Tensor, g: torch.Tensor) -> int:
    """Count them only if all else is equal: sums in another order may cancel to the other zero."""
    if not w.is_floating_point():
        return 0
    return int(((w == 0) & (g == 0) & (w.signbit() != g.signbit())).sum())


def _strides(t: torch.Tensor) -> list[int] | None:
    """The strides that matter: those of dimensions with more than one element."""
    if t.layout is not torch.strided or t.numel() == 0:
        return None
    return [s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1]


def _dense(t: torch.Tensor) -> torch.Tensor:
    t = t.detach()
    t = t.dequantize() if t.is_quantized else t
    t = (t if t.layout is torch.strided else t.to_dense()).resolve_conj().resolve_neg()
    return t.to(torch.complex64) if t.dtype == torch.complex32 else t


def _value_difference(
    w: torch.Tensor, g: torch.Tensor, exact: Exact, pick: Callable[[Seen], Any], floor_scale: float
) -> str:
    """Why `g` is wrong, or "". Floats pass if they equal eager's bits, or if their fp64 error is at most 2x eager's plus a
    floor.

    The floor is a few rounding errors at the largest value, or at `floor_scale` if that is larger. Eager's error is the largest
    over the sample and its neighbours.
    """
    if torch.equal(w, g) or w.numel() == 0:
        return ""
    if not (w.is_floating_point() or w.is_complex()):
        return f"{int((w != g).sum())} of {w.numel()} {w.dtype} elements differ"
    if w.is_complex():
        w, g = torch.view_as_real(w), torch.view_as_real(g)
    if not torch.equal(w.isnan(), g.isnan()):
        return "NaN where eager has none, or the other way round"
    w = _not_overflowed(w, g, lambda: _dense(pick(exact.seen())))
    infinite = w.isinf() | g.isinf()
    if not torch.equal(w[infinite], g[infinite]):
        return "Inf where eager has none, or the other way round"
    finite = w.isfinite()
    a, b = w[finite].double(), g[finite].double()
    if a.numel() == 0 or torch.equal(a, b):
        return ""
    eps = torch.finfo(w.dtype).eps
    wide = _reference(lambda: _dense(pick(exact.seen())), w)
    r = a if wide is None else wide[finite]
    scale = float(a.abs().max())
    eagers = float((a - r).abs().max())
    if eagers > max(0.05, 64 * eps) * max(
        scale, floor_scale
    ):  # not comparable: fp64 draws other random numbers
        r, eagers, wide = a, 0.0, None
    ours = float((b - r).abs().max())
    floor = (4 if wide is not None else 32) * eps * max(scale, floor_scale)
    if ours <= 2 * eagers + floor:
        return ""
    if wide is not None and ours <= 2 * exact.error_nearby(pick) + floor:
        return ""
    return f"error {ours:.3g}, eager's {eagers:.3g}, largest value {scale:.3g}"


def _not_overflowed(w: torch.Tensor, g: torch.Tensor, exact: Callable[[], torch.Tensor]) -> torch.Tensor:
    """`w` with the exact result where `g` is finite and eager is not: half types may overflow between eager's ops."""
    only = w.isinf() & g.isfinite()
    r = _in_fp64(exact, w) if only.any() else None
    return w if r is None else torch.where(only, r.to(w.dtype), w)


def _reference(exact: Callable[[], torch.Tensor], like: torch.Tensor) -> torch.Tensor | None:
    """The fp64 result if it can be compared; None otherwise, and for fp64, since it would be no more accurate."""
    r = _in_fp64(exact, like) if like.dtype != torch.float64 else None
    return r if r is not None and torch.equal(r.isfinite(), like.isfinite()) else None


def _in_fp64(exact: Callable[[], torch.Tensor], like: torch.Tensor) -> torch.Tensor | None:
    """The fp64 result, if there is one of this shape; complex numbers become pairs."""
    try:
        r = exact()
    except (IndexError, AttributeError, RuntimeError, TypeError):
        return None
    r = torch.view_as_real(r) if r.is_complex() else r
    return r if r.shape == like.shape and r.dtype == torch.float64 else None


def _wide(sample: Any) -> Any:
    def widen(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            return x.detach().double().requires_grad_(x.requires_grad)
        if isinstance(x, torch.Tensor) and x.is_complex():
            return x.detach().to(torch.complex128).requires_grad_(x.requires_grad)
        return torch.float64 if x in (torch.float32, torch.bfloat16, torch.float16) else x

    return sample.transform(widen)


def sharing(seen: Seen) -> list[tuple[int, int]]:
    """Pairs of outputs and inputs or other outputs that share memory, by position; -1 stands for a tensor without storage."""

    def storage(t: Any) -> int:
        if not isinstance(t, torch.Tensor) or t.layout is not torch.strided or t.numel() == 0 or t.is_quantized:
            return -1
        return t.untyped_storage().data_ptr()

    everything = [storage(t) for t in (*seen.inputs, *seen.outputs)]
    first = len(seen.inputs)
    return [
        (i, j) for i in range(first, len(everything)) for j in range(i)
        if everything[i] != -1 and everything[i] == everything[j]
    ]  # fmt: skip

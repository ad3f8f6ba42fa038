"""Strides of results where FakeTensor differs from eager: rules by row, measured over the whole opset.

`tests/ops/test_strides.py` compares every row with eager for inputs of many layouts; rows that need no rule have none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusewright import _torch_compat as compat
from fusewright.ops.core import Args, Op

Rule = Callable[[Args], tuple[torch.Tensor | None, ...]]
"""For each result, a traced tensor with the right strides; None if FakeTensor is right. Runs under the FakeTensorMode."""

aten = torch.ops.aten

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The memory format of dense images whose channels are innermost, by rank."""


def _operand(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=torch.float32, device=t.device)


def _converted(given: list[torch.Tensor]) -> list[torch.Tensor]:
    """Operands whose strides TensorIterator compares: on the CPU it first converts those of another than the common type, and the
    copy of an expanded one is dense."""
    common = torch.result_type(given[0], given[-1])
    kept = [t.dtype == common or t.device.type != "cpu" for t in given]
    return [_operand(t) if same else torch.empty_like(_operand(t)) for t, same in zip(given, kept, strict=True)]


def _iterated(*names: str) -> Rule:
    """The layout that TensorIterator chooses for these operands; torch's addition and product stand in for the op."""

    def rule(a: Args) -> tuple[torch.Tensor | None, ...]:
        given = [a[n] for n in names if isinstance(a[n], torch.Tensor)]
        if not given:  # a division of sizes
            return ()
        given = _converted(given)
        made = given[0].exp() if len(given) == 1 else aten.add.Tensor(*given)
        return (made,)

    return rule


_TWO = (
    "add sub mul div div_rounded fmod remainder maximum minimum fmax fmin atan2 hypot copysign logaddexp xlogy xlog1py eq ne"
    " lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor rsub fmod_scalar remainder_scalar"
    " eq_scalar ne_scalar lt_scalar le_scalar gt_scalar ge_scalar bitwise_and_scalar bitwise_or_scalar bitwise_xor_scalar"
)
BROADCAST: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_TWO.split(), ("self", "other")),
    "pow": ("self", "exponent"),
    "where": ("condition", "self", "other"),
    **dict.fromkeys(("addcmul", "addcdiv"), ("self", "tensor1", "tensor2")),
    "lerp": ("self", "end", "weight"),
}
"""Rows with operands that need not have one shape. Their results too have the strides of dims of size one."""


def _broadcast(names: Sequence[str], otherwise: Rule | None) -> Rule:
    """TensorIterator's order of the dims for operands of several shapes or a number, where an image is made that has a dim of size
    one. Tracing takes the memory format of operands that are dense in one, which says nothing of a single image's stride."""

    def rule(a: Args) -> tuple[torch.Tensor | None, ...]:
        given = [a[n] for n in names]
        tensors = [t for t in given if isinstance(t, torch.Tensor)]
        made = _of_single_image(tensors, len(tensors) < len(given))
        return (made,) if made is not None else () if otherwise is None else otherwise(a)

    return rule


def _of_single_image(tensors: Sequence[torch.Tensor], numbers: bool) -> torch.Tensor | None:
    """A tensor with eager's strides for an image that has a dim of size one, of operands of several shapes or of numbers too."""
    if max((t.dim() for t in tensors), default=0) not in CHANNELS_LAST:
        return None
    if not all(isinstance(n, int) for t in tensors for n in (*t.shape, *t.stride())):
        return None  # by sizes, which the first run compares
    if not numbers and len({t.shape for t in tensors}) == 1:
        return None  # as traced
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    if 1 not in shape or 0 in shape:
        return None
    strides = strides_of_broadcast(shape, tensors)
    same = next((t for t in tensors if t.shape == shape and list(t.stride()) == strides), None)
    return torch.empty_strided(shape, strides, device=tensors[0].device) if same is None else same


def strides_of_broadcast(shape: Sequence[int], given: Sequence[torch.Tensor]) -> list[int]:
    """TensorIterator's strides of a new result of operands that are expanded to this shape."""
    operands = [_expanded_strides(t, shape) for t in given]
    order = list(range(len(shape) - 1, -1, -1))  # the innermost dim first
    for i in range(1, len(order)):
        at = i
        for k in range(i - 1, -1, -1):
            found = _further_out(order[k], order[at], shape, operands)
            if found > 0:
                order[k], order[at], at = order[at], order[k], k
            elif found < 0:
                break
    made, step = [0] * len(shape), 1
    for d in order:
        made[d], step = step, step * shape[d]
    return made


def _expanded_strides(t: torch.Tensor, shape: Sequence[int]) -> list[int]:
    """Zero where the tensor is repeated, and where it lacks a dim."""
    own = [s if n == m else 0 for n, m, s in zip(t.shape, shape[len(shape) - t.dim() :], t.stride(), strict=True)]
    return [0] * (len(shape) - t.dim()) + own


def _further_out(d: int, e: int, shape: Sequence[int], operands: Sequence[Sequence[int]]) -> int:
    """Whether dim `d` belongs outside (1) or inside (-1) of dim `e`, by the first operand that tells."""
    for steps in operands:
        if steps[d] and steps[e] and steps[d] != steps[e]:
            return 1 if steps[d] > steps[e] else -1
        if steps[d] and steps[e] and shape[d] > shape[e]:
            return 1
    return 0


def _of_expanded(a: Args) -> tuple[torch.Tensor | None, ...]:
    """Torch's rules convert operands of half types to the type in which they compute, and the copy of an expanded one is dense."""
    given = [t for t in (a["self"], a["other"]) if isinstance(t, torch.Tensor)]
    expanded = any(compat.statically_true(s == 0) for t in given for s in t.stride())
    floats = len(given) == 2 and torch.result_type(*given).is_floating_point
    return _iterated("self", "other")(a) if expanded and floats else ()


def _in_format(x: torch.Tensor, how: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
    """A tensor of the sizes of `x` in a memory format: `x` itself if it has that format, because tracing another takes longer."""
    step, wanted = 1, [0] * x.dim()
    if all(isinstance(n, int) and n > 0 for n in x.shape):
        dims = range(x.dim() - 1, -1, -1) if how is torch.contiguous_format else (1, *range(x.dim() - 1, 1, -1), 0)
        for d in dims:
            wanted[d], step = step, step * x.shape[d]
        if x.stride() == tuple(wanted):
            return x
    return torch.empty(x.shape, device=x.device, memory_format=how)


def _contiguous(name: str, results: int = 1) -> Rule:
    return lambda a: (_in_format(a[name]),) * results


def _cloned(name: str) -> Rule:
    return lambda a: (torch.empty_like(_operand(a[name])),)


def _suggested(name: str) -> Rule:
    """Channels-last if the input's strides have that order, else contiguous."""

    def rule(a: Args) -> tuple[torch.Tensor | None, ...]:
        return (_in_format(a[name], _suggested_format(a[name])),)

    return rule


def _suggested_format(x: torch.Tensor) -> torch.memory_format:
    return CHANNELS_LAST[x.dim()] if x.dim() in CHANNELS_LAST and like_channels_last(x) else torch.contiguous_format


def like_channels_last(x: torch.Tensor) -> bool:
    """Torch's `suggest_memory_format`: strides grow from the channels over the last dimensions to the first."""
    step: Any = 0
    for d in (1, *range(x.dim() - 1, 1, -1), 0):
        n, s = x.shape[d], x.stride(d)
        if not compat.statically_true(s >= step) or compat.statically_true(s == 0) or compat.statically_true(n == 0):
            return False
        if d == 0 and compat.statically_true(step == x.stride(1)):
            return False  # ambiguous: contiguous
        step = s * n if not compat.statically_true(n == 1) else s
    return True


VIEWS = frozenset({"view", "reshape"})
"""Rows whose results have the strides of dims of size one too."""


def _viewed(size: str) -> Rule:
    """ATen's `computeStride`, for a view that has dims of size one: FakeTensor gives those other strides, and convolutions take the
    stride of a single image for a sign of its memory format."""

    def rule(a: Args) -> tuple[torch.Tensor | None, ...]:
        x, shape = a["self"], a[size]
        known = all(isinstance(n, int) for n in (*shape, *x.shape, *x.stride()))  # a size may depend on data
        if not known or 1 not in shape or min((*x.shape, *x.stride()), default=1) <= 0:
            return ()
        if list(x.stride()) == strides_of_view([x.numel()], [1], x.shape):
            return ()  # row-major, also in dims of size one: so is the view in a trace
        shape = [x.numel() // -math.prod(shape) if n == -1 else n for n in shape]
        strides = strides_of_view(x.shape, x.stride(), shape)
        return () if strides is None else (torch.empty_strided(shape, strides, device=x.device),)

    return rule


def strides_of_view(sizes: Sequence[int], strides: Sequence[int], shape: Sequence[int]) -> list[int] | None:
    """None where no view has this shape."""
    made: list[int] = []
    count, taken, step = 1, 1, strides[-1]
    for d in range(len(sizes) - 1, -1, -1):
        count *= sizes[d]
        if d and (sizes[d - 1] == 1 or strides[d - 1] == count * step):
            continue  # one run of memory with the dim before
        while len(made) < len(shape) and (taken < count or shape[-1 - len(made)] == 1):
            n = shape[-1 - len(made)]
            made.append(taken * step)
            taken *= n
        if taken != count:
            return None
        count, taken, step = 1, 1, strides[d - 1]
    return made[::-1] if len(made) == len(shape) else None


def _on_cpu(rule: Rule, name: str) -> Rule:
    """A rule of the CPU's kernels; those of other devices differ."""
    return _by_device(name, cpu=rule)


def _by_device(name: str, **rules: Rule) -> Rule:
    """A rule for the kernels of each device; for other devices, FakeTensor is right."""

    def rule(a: Args) -> tuple[torch.Tensor | None, ...]:
        found = rules.get(a[name].device.type)
        return () if found is None else found(a)

    return rule


def _cuda_batch_norm_backward(a: Args) -> tuple[torch.Tensor | None, ...]:
    """Dense; channels-last in training if both operands are."""
    x = a["input"]
    how = CHANNELS_LAST.get(x.dim(), torch.contiguous_format)
    last = a["train"] and all(_dense_in(t, how) for t in (x, a["grad_out"]))
    return (_in_format(x, how if last else torch.contiguous_format),)


def _dense_in(t: torch.Tensor, how: torch.memory_format) -> bool:
    return t.is_contiguous(memory_format=how) and not t.is_contiguous()


def _copied(name: str) -> Rule:
    """The input's strides, including gaps, unless elements share memory: torch's `clone_preserve_strides`. Its rule in 2.11
    keeps shared ones."""

    def rule(a: Args) -> tuple[torch.Tensor | None, ...]:
        x = a[name]
        steps = (s for n, s in zip(x.shape, x.stride(), strict=True) if not compat.statically_true(n == 1))
        return _cloned(name)(a) if any(compat.statically_true(s == 0) for s in steps) else ()

    return rule


def _padded(a: Args) -> tuple[torch.Tensor | None, ...]:
    """The layout suggested by the input. torch's rule in 2.11 says contiguous."""
    x, shape, pad = a["self"], list(a["self"].shape), a["padding"]
    for i in range(len(pad) // 2):
        shape[-1 - i] = shape[-1 - i] + pad[2 * i] + pad[2 * i + 1]
    return (torch.empty(shape, device=x.device, memory_format=_suggested_format(x)),)


def _of_prelu(a: Args) -> tuple[torch.Tensor | None, ...]:
    """The layout that TensorIterator chooses for three operands; torch traces no other op of three with symbolic sizes."""
    if not all(isinstance(n, int) for k in ("self", "weight", "grad_output") for n in a[k].shape):
        return ()
    made = aten.addcmul.default(*(_operand(a[n]) for n in ("self", "weight", "grad_output")))
    return made, made


def _kept(a: Args) -> tuple[torch.Tensor | None, ...]:
    """Without dimensions to reduce, `any` and `all` make a plain copy."""
    return _contiguous("self")(a) if a["dim"] == [] and a["self"].dim() else ()


def _unreduced(a: Args) -> tuple[torch.Tensor | None, ...]:
    """A loss of each element is iterated; a reduced one is a scalar."""
    return _iterated("self", "target")(a) if a["reduction"] == 0 else ()


RULES: dict[str, Rule] = {
    **dict.fromkeys(
        "add sub mul div fmod remainder maximum minimum fmax fmin atan2 hypot eq ne lt le gt ge".split(), _of_expanded
    ),
    **{
        n: _iterated("self", "other")
        for n in "div_rounded copysign logaddexp logical_and logical_or logical_xor xlogy xlog1py".split()
    },
    **{
        f"{n}_backward": _iterated("grad_output", "self")
        for n in "hardtanh hardswish hardsigmoid softplus logit".split()
    },
    **{f"{n}_backward": _iterated("self", "grad_output") for n in ("threshold", "leaky_relu")},
    "elu_backward": _iterated("grad_output", "self_or_result"),
    "dropout_backward": _by_device(
        "grad_output", cpu=_iterated("grad_output", "mask"), mps=_iterated("grad_output", "mask"), cuda=_suggested("grad_output")
    ),
    "scalar_pow": _contiguous("exponent"),
    **{n: _copied("self") for n in ("slice_scatter", "select_scatter", "diagonal_scatter")},
    **{f"{kind}_pad{n}d": _on_cpu(_padded, "self") for kind in ("reflection", "replication") for n in (2, 3)},
    **{f"{kind}_pad{n}d_backward": _on_cpu(_suggested("self"), "self") for kind in ("reflection", "replication") for n in (2, 3)},
    "prelu_backward": _of_prelu,
    "any": _kept,
    "all": _kept,
    "index_fill": _cloned("self"),
    **{n: _unreduced for n in ("mse_loss", "smooth_l1_loss")},
    **{f"{n}_loss_backward": _contiguous("self") for n in ("mse", "huber")},
    "huber_loss": _cloned("self"),
    "bce": lambda a: _cloned("self")(a) if a["reduction"] == 0 else (),
    "nll_loss2d": _contiguous("target"),
    "log_sigmoid_backward": _cloned("grad_output"),
    "smooth_l1_loss_backward": _contiguous("self"),
    "roll": _on_cpu(lambda a: (_suggested if a["dims"] else _contiguous)("self")(a), "self"),  # or as one row
    "channel_shuffle": _on_cpu(_suggested("self"), "self"),
    "bce_backward": _cloned("self"),
    "batch_norm": _on_cpu(_suggested("input"), "input"),
    **dict.fromkeys(("batch_norm_train", "batch_norm_no_stats"), _on_cpu(_suggested("input"), "input")),
    "batch_norm_backward": _by_device("input", cpu=_suggested("input"), cuda=_cuda_batch_norm_backward),
    "group_norm_backward": _on_cpu(_suggested("input"), "input"),
    "weight_norm": _on_cpu(lambda a: (*_contiguous("v")(a), a["g"]), "v"),
    "log_sigmoid": _on_cpu(_contiguous("self", 2), "self"),
    "view": _viewed("size"),
    "reshape": _viewed("shape"),
    "log_softmax_backward": _contiguous("grad_output"),
    "layer_norm_backward": _contiguous("input"),
    "rms_norm_backward": _contiguous("input"),
}
RULES |= {name: _broadcast(names, RULES.get(name)) for name, names in BROADCAST.items()}


def expected(row: Op, args: Any, kwargs: Any) -> tuple[torch.Tensor | None, ...]:
    """A traced tensor with eager's strides for each result that FakeTensor may get wrong. Call under the FakeTensorMode."""
    rule = RULES.get(row.name)
    return () if rule is None else rule(row.bind(args, kwargs))

"""Calls of the core's operators in plans as launches of its entries.

What `native` checks and converts at every call is settled once, from the specs of the tensors. A call stays a call where a tensor
would have to be copied first, nothing is known of it, or an argument is invalid.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from fusewright.interface import Dim, KernelCode, Size, TensorSpec
from fusewright.plan.ir import Bind, Bound, Call, Ref
from fusewright_int8.run import core, words

Specs: TypeAlias = Mapping[int, TensorSpec]


class _Unbound(Exception):
    """The call stays a call."""


def binds(entry: str) -> Bind:
    """What binds calls of the operator that `entry` computes."""
    return functools.partial(_bind, entry, _WORDS[entry])


def _bind(entry: str, words_of: Callable[..., Sequence[Any]], call: Call, specs: Specs) -> Bound | None:
    (out,) = call.outs
    try:
        if core.absent() is not None or call.kwargs or specs[out].device != "cpu":
            return None
        found = words_of(specs, Ref(out), *call.args)
        form = words.FORMATS[entry].replace(" ", "")
        typed = tuple(float(x) if kind == "d" else x for kind, x in zip(form, found, strict=True))
    except (_Unbound, KeyError, ValueError):  # KeyError: nothing is known of a tensor; ValueError: the call says what is wrong
        return None
    # A weight that does not fit 8 bits was left in floats.
    return Bound(_code(entry), typed, () if entry == "matmul" else ((call.args[1], torch.int8),))


@functools.cache
def _code(entry: str) -> KernelCode:
    def by_address_only(*_: Any) -> None:
        raise AssertionError(f"{entry} is called by its address")

    return KernelCode(by_address_only, core.extension().entries[entry], words.error)


def runner(call: Bound, given: Mapping[int, torch.Tensor]) -> Callable[[], None]:
    """Return a function that launches a call on these tensors, by id, at the cost that it has in a plan."""
    found = [given[x.id].data_ptr() if isinstance(x, Ref) else x for x in call.words]
    packed = struct.pack("".join("d" if isinstance(x, float) else "q" for x in found), *found)
    return functools.partial(core.extension().run, call.code.address, packed, torch.get_num_threads())


# -- tensors


def _need(fine: bool) -> None:
    if not fine:
        raise _Unbound


def _extent(size: Size) -> Any:
    return size.expr if isinstance(size, Dim) else size


def _joined(shape: Sequence[Size], stride: Sequence[Size]) -> tuple[Any, Any]:
    """These dimensions as one: its size and its step."""
    count: Any = 1
    step: Any = 0
    for size, jump in zip(map(_extent, reversed(shape)), map(_extent, reversed(stride)), strict=True):
        if size == 1:
            continue
        if count == 1:
            step = jump
        else:
            _need(jump == step * count)
        count = count * size
    return count, step


class _Rows(NamedTuple):
    """[..., k] as rows: how many, how far apart, how long."""

    m: Any
    step: Any
    k: int


def _rows(spec: TensorSpec) -> _Rows:
    _need(spec.rank > 0 and (spec.stride[-1] == 1 or spec.shape[-1] == 1))
    k = spec.shape[-1]
    if not isinstance(k, int):
        raise _Unbound
    m, step = _joined(spec.shape[:-1], spec.stride[:-1])
    return _Rows(m, step if m != 1 else k, k)


def _in_rows(spec: TensorSpec) -> _Rows:
    """The rows of a result, which lie one behind the other."""
    rows = _rows(spec)
    _need(rows.step == rows.k)
    return rows


def _pixels(spec: TensorSpec) -> TensorSpec:
    """Images as [batch, h, w, c]."""
    order = (0, 2, 3, 1)
    return TensorSpec(tuple(spec.shape[d] for d in order), tuple(spec.stride[d] for d in order), spec.dtype, spec.device)


def _residual(given: Ref | None, out: TensorSpec, specs: Specs, view: Callable[[TensorSpec], TensorSpec]) -> Any:
    """A residual of the result's shape for `words.after`."""
    if given is None:
        return None
    spec = specs[given.id]
    _need(spec.shape == out.shape and spec.dtype in words.TYPES)
    return given, _rows(view(spec)).step, spec.dtype


def _same(spec: TensorSpec) -> TensorSpec:
    return spec


def _ends(specs: Specs, out: Ref, rest: Sequence[Any], view: Callable[[TensorSpec], TensorSpec] = _same) -> tuple[Any, ...]:
    """The words of an epilogue from an operator's last arguments."""
    residual, scale, zero, post, post_args, dtype, *levels = rest
    spec = specs[out.id]
    _need(spec.dtype is dtype)
    low_high = levels[2:] if dtype in words.BYTES else (None, None)
    given = _residual(residual, spec, specs, view)
    return words.after(given, scale, zero, post, post_args, out, _in_rows(view(spec)).k, dtype, *levels[:2], *low_high)


def _float_ends(specs: Specs, out: Ref, rest: Sequence[Any]) -> tuple[Any, ...]:
    residual, post, post_args, dtype = rest
    return _ends(specs, out, (residual, 1.0, 0, post, post_args, words.float_type(dtype), 1.0, 0, None, None))


def _weights(specs: Specs, out: Ref, packed: Ref, scale: Ref, bias: Ref | None, k: int) -> tuple[Any, ...]:
    words.check_k(k)
    return packed, scale, _bias(specs, bias), specs[out.id].shape[-1], k


def _bias(specs: Specs, bias: Ref | None) -> Any:
    """A bias that was not prepared is one of the model's tensors, whose spec is known."""
    if bias is None:
        return 0
    spec = specs.get(bias.id)
    _need(spec is None or (spec.dtype is torch.float32 and spec.rank == 1 and (spec.stride == (1,) or spec.shape == (1,))))
    return bias


def _bytes(spec: TensorSpec, zero: int) -> bool:
    """Whether bytes are signed."""
    _need(spec.dtype in words.BYTES)
    words.check_zero("x_zero_point", zero, spec.dtype)
    return spec.dtype is torch.int8


# -- operators


def _linear(
    specs: Specs, out: Ref, x: Ref, packed: Ref, w_scale: Ref, bias: Ref | None, scale: float, zero: int, *rest: Any
) -> tuple[Any, ...]:
    spec = specs[x.id]
    rows = _rows(spec)
    _need(spec.shape[:-1] == specs[out.id].shape[:-1])
    weights = _weights(specs, out, packed, w_scale, bias, rows.k)
    return x, rows.step, int(_bytes(spec, zero)), scale, zero, rows.m, *weights, *_ends(specs, out, rest)


def _float_rows(specs: Specs, out: Ref, x: Ref) -> tuple[Any, ...]:
    spec = specs[x.id]
    rows = _rows(spec)
    _need(spec.dtype in words.FLOATS and spec.shape[:-1] == specs[out.id].shape[:-1])
    return x, words.TYPES[spec.dtype], rows.step, rows.m, rows.k


def _dynamic_linear(
    specs: Specs, out: Ref, x: Ref, packed: Ref, w_scale: Ref, bias: Ref | None, rule: str, *rest: Any
) -> tuple[Any, ...]:
    rows = _float_rows(specs, out, x)
    ends = _float_ends(specs, out, rest)
    return *rows, *_weights(specs, out, packed, w_scale, bias, rows[-1]), *words.rule_words(rule), *ends


def _weight_linear(specs: Specs, out: Ref, x: Ref, packed: Ref, w_scale: Ref, bias: Ref | None, *rest: Any) -> tuple[Any, ...]:
    rows = _float_rows(specs, out, x)
    return *rows, *_weights(specs, out, packed, w_scale, bias, rows[-1]), *_float_ends(specs, out, rest)


def _matmul(
    specs: Specs, out: Ref, x: Ref, y: Ref, x_scale: float, x_zero: int, y_scale: float, y_zero: int, *rest: Any
) -> tuple[Any, ...]:
    left, right = specs[x.id], specs[y.id]
    *outer, m, k = left.shape
    n = right.shape[-1]
    _need(left.rank >= 2 and right.shape == (*outer, k, n) and specs[out.id].shape == (*outer, m, n))
    if not isinstance(k, int) or not isinstance(n, int):
        raise _Unbound
    _need((left.stride[-1] == 1 or k == 1) and rest[0] is None)
    words.check_inner(k)
    batch, step = _joined(outer, left.stride[:-2])
    _, y_step = _joined(outer, right.stride[:-2])
    k_step, n_step = map(_extent, right.stride[-2:])
    return (
        x, step, _extent(left.stride[-2]), int(_bytes(left, x_zero)), x_scale, x_zero,
        y, y_step, k_step, n_step, int(_bytes(right, y_zero)), y_scale, y_zero,
        batch, _extent(m), _extent(n), _extent(k), *_ends(specs, out, rest),
    )  # fmt: skip


def _conv2d(
    specs: Specs, out: Ref, x: Ref, packed: Ref, w_scale: Ref, bias: Ref | None, scale: float, zero: int,
    kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int, *rest: Any,
) -> tuple[Any, ...]:  # fmt: skip
    spec, made = specs[x.id], specs[out.id]
    _need(spec.rank == made.rank == 4)
    c, n = spec.shape[1], made.shape[1]
    if not isinstance(c, int) or not isinstance(n, int):
        raise _Unbound
    _need(spec.stride[1] == 1 or c == 1)
    around = words.window(kernel, stride, padding, dilation)
    words.check_groups(c, n, groups)
    words.check_k(c // groups * kernel[0] * kernel[1])
    batch, _, h, w = map(_extent, spec.shape)
    if isinstance(h, int) and isinstance(w, int):
        _need(words.result_size((h, w), kernel, stride, padding, dilation) == made.shape[2:])
    oh, ow = map(_extent, made.shape[2:])
    batch_step, _, *steps = map(_extent, spec.stride)
    return (
        x, batch_step, *steps, int(_bytes(spec, zero)), scale, zero, packed, w_scale, _bias(specs, bias),
        batch, c, h, w, n, oh, ow, groups, *around, *_ends(specs, out, rest, _pixels),
    )  # fmt: skip


_WORDS: Mapping[str, Callable[..., Sequence[Any]]] = {
    "linear": _linear, "matmul": _matmul, "dynamic_linear": _dynamic_linear, "weight_linear": _weight_linear, "conv2d": _conv2d,
}  # fmt: skip

"""What the native core's entries take: checked arguments as words, in the order of `native/entries.cpp`.

A word is an address, an integer, or a float, which the core reads as a double.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from typing import Any

import torch

from fusewright_int8.run import core
from fusewright_int8.run.reference import POSTS, RULES, limits

MOST_K = 65_536
"""Longest sum of products that fits int32 for any values: 65,536 * 255 * 128 < 2**31."""

MOST_INNER = 33_025
"""The same limit for two operands with zero points: 33,025 * 255 * 255 < 2**31."""

MOST_TAPS = 1024
"""Largest window that the depthwise kernel takes."""

TYPES = {torch.uint8: 0, torch.int8: 1, torch.float32: 2, torch.bfloat16: 3}
BYTES = (torch.uint8, torch.int8)
FLOATS = (torch.float32, torch.bfloat16)
_POSTS = {name: k for k, name in enumerate(POSTS)}
_SOURCES = {"decomposed": 0, "affine": 1, "token": 2}
_RULES = {name: (r.per_row, r.symmetric, _SOURCES[r.source], r.eps, r.low, r.high) for name, r in RULES.items()}
_LIMITS = {torch.uint8: (0, 255), torch.int8: (-128, 127)}

_ROWS = "qqqqq"  # of floats: address, type, row stride, number of rows, length
_WEIGHTS = "qqqqq"  # packed, scales, bias, n, k
_RULE = "qqqdqq"
_AFTER = "qqqdq qdd qqqdqqq"  # residual: address, row stride, type, scale, zero point; post-op; result: the same, and its limits
FORMATS = {
    "linear": f"qqqdqq {_WEIGHTS} {_AFTER}",
    "matmul": f"qqqqdq qqqqqdq qqqq {_AFTER}",
    "dynamic_linear": f"{_ROWS} {_WEIGHTS} {_RULE} {_AFTER}",
    "weight_linear": f"{_ROWS} {_WEIGHTS} {_AFTER}",
    "conv2d": f"qqqqqdq qqq qqqqqqqq qqqqqqqq {_AFTER}",
    "quantize": f"{_ROWS} dqqqq",
    "quantize_dynamic": f"{_ROWS} {_RULE} qqq",
}
"""The words of each entry, as `struct` names them."""
_STRUCTS = {entry: struct.Struct(form) for entry, form in FORMATS.items()}


def run(entry: str, *words: Any) -> None:
    """Call an entry of the core."""
    ext = core.extension()
    code = ext.run(ext.entries[entry], _STRUCTS[entry].pack(*words), torch.get_num_threads())
    if code:
        raise error(code, ())


def error(code: int, block: Sequence[int]) -> Exception:
    """The exception for an entry's error code."""
    return MemoryError("the int8 core") if code == 1 else RuntimeError(f"the int8 core failed with code {code}")


# -- results


def after(
    residual: tuple[Any, Any, torch.dtype] | None, residual_scale: float, residual_zero_point: int, post: str,
    post_args: Sequence[float], out: Any, n: Any, out_dtype: torch.dtype, out_scale: float = 1.0, out_zero_point: int = 0,
    out_low: int | None = None, out_high: int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """The words of an epilogue. `residual`: address, row stride and type. `out`: the address of a result, whose rows are `n`
    apart."""
    address, row, kind = residual or (0, 0, torch.float32)
    level = levels(out_dtype, out_scale, out_zero_point, out_low, out_high)
    return (
        address, row, TYPES[kind], residual_scale, residual_zero_point, *post_words(post, post_args), out, n, *level,
    )  # fmt: skip


@functools.lru_cache(4096)
def levels(
    dtype: torch.dtype, scale: float, zero_point: int, low: int | None, high: int | None
) -> tuple[int, float, int, int, int]:
    """Return a result's type, the inverse of its scale, its zero point and its limits."""
    if dtype not in TYPES:
        raise ValueError(f"out_dtype is {dtype}; results are float32, bfloat16, uint8 or int8")
    if dtype not in BYTES:
        return TYPES[dtype], 1.0, zero_point, 0, 255
    check_zero("out_zero_point", zero_point, dtype)
    return TYPES[dtype], 1.0 / positive("out_scale", scale), zero_point, *checked_limits(dtype, low, high)


def post_words(post: str, args: Sequence[float]) -> tuple[int, float, float]:
    if post not in _POSTS:
        raise ValueError(f"there is no post-op {post!r}; the core has {', '.join(_POSTS)}")
    if len(args) != (2 if post == "clamp" else 0):
        raise ValueError(f"{post} takes {'two numbers' if post == 'clamp' else 'no numbers'}, not {list(args)}")
    low, high = args if args else (0.0, 0.0)
    return _POSTS[post], low, high


def rule_words(rule: str) -> tuple[Any, ...]:
    if rule not in _RULES:
        raise ValueError(f"there is no rule {rule!r} for dynamic quantization; there are {', '.join(_RULES)}")
    return _RULES[rule]


# -- numbers


def positive(name: str, scale: float) -> float:
    if not scale > 0.0:
        raise ValueError(
            f"{name} is {scale}; a scale is a positive number: calibrate with inputs that are not constant zero"
        )
    return scale


def float_type(dtype: torch.dtype) -> torch.dtype:
    if dtype not in FLOATS:
        raise ValueError(f"out_dtype is {dtype}; without a scale for its values it can be float32 or bfloat16")
    return dtype


def check_k(k: int) -> None:
    if k > MOST_K:
        raise ValueError(
            f"sums of {k} products of 8 bits can overflow int32; leave layers of more than {MOST_K} in floats"
        )


def check_inner(k: int) -> None:
    if k > MOST_INNER:
        raise ValueError(f"sums of {k} products can overflow int32; leave those of more than {MOST_INNER} in floats")


def check_zero(name: str, zero_point: int, dtype: torch.dtype) -> None:
    least, most = _LIMITS[dtype]
    if not least <= zero_point <= most:
        raise ValueError(f"{name} is {zero_point}; {dtype} holds {least} to {most}")


def checked_limits(dtype: torch.dtype, low: int | None, high: int | None) -> tuple[int, int]:
    """Return the limits of a result's levels. The core holds them in a byte, so others would wrap around."""
    least, most = limits(dtype, low, high)
    for name, level in (("out_low", least), ("out_high", most)):
        check_zero(name, level, dtype)
    return least, most


# -- windows


def window(
    kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> tuple[int, ...]:
    """Check the window of a convolution, and return the words for it: two numbers each. `padding` may have four: top, left, bottom
    and right."""
    pairs = {"kernel_size": (kernel_size, 1), "stride": (stride, 1), "padding": (padding, 0), "dilation": (dilation, 1)}
    for name, (given, least) in pairs.items():
        if len(given) not in ((2, 4) if name == "padding" else (2,)) or min(given) < least:
            raise ValueError(f"{name} is {tuple(given)}; conv2d takes two numbers from {least}")
    return tuple(int(v) for given, _ in pairs.values() for v in given[:2])


def result_size(
    size: tuple[Any, Any], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> tuple[int, int]:
    """Return the height and width of the result of a checked window on images of this height and width."""
    top, left, bottom, right = (*padding, *padding)[:4]
    both = (top + bottom, left + right)
    oh, ow = (_positions(*given) for given in zip(size, kernel, stride, both, dilation, strict=True))
    return oh, ow


def _positions(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """Return the size of the result along one dimension, with `padding` on both sides together."""
    room = size + padding - dilation * (kernel - 1) - 1
    if room < 0:
        raise ValueError(f"a window of {kernel} (dilation {dilation}) does not fit {size} with {padding} of padding")
    return room // stride + 1


def check_groups(c: int, n: int, groups: int) -> None:
    if groups < 1 or c % groups or n % groups:
        raise ValueError(f"{c} input and {n} output channels do not make {groups} groups of one size")


def is_depthwise(c: int, n: int, groups: int, taps: int) -> bool:
    return 1 < groups == c == n and taps <= MOST_TAPS


def packed_linear(n: int, k: int) -> int:
    """Bytes of a packed weight [n, k]: so many more than k exceeds a multiple of 64 by, which padding would hide from the size."""
    return int(core.extension().packed_bytes(n, k)) + k % 64


def packed_conv(n: int, c: int, kernel: Sequence[int], groups: int) -> int:
    """Bytes of a packed weight [n, c, *kernel]."""
    if is_depthwise(c * groups, n, groups, math.prod(kernel)):
        return int(core.extension().depthwise_bytes(n, *kernel))
    k = c * math.prod(kernel)
    return groups * int(core.extension().packed_bytes(n // groups, k)) + k % 64

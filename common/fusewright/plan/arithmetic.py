"""The Python functions that a plan may call: arithmetic on sizes and other numbers. A closed list, since plans may come from
disk."""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

PYTHON: Mapping[str, Callable[..., Any]] = {
    f"py::{module.__name__}.{name}": getattr(module, name)
    for module, names in (
        (operator, "abs add and_ eq floordiv ge getitem gt inv invert le lshift lt mod mul ne neg not_ or_ pos pow rshift "
                   "sub truediv truth xor"),
        (math, "acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh exp fabs floor fmod isfinite isinf isnan "
               "log log10 log1p log2 pow sin sinh sqrt tan tanh trunc"),
        (builtins, "abs bool float int max min pow round sum"),
        (torch, "sym_float sym_int sym_ite sym_max sym_min sym_not sym_sum"),
    )
    for name in names.split()
}  # fmt: skip
"""By the name used in a `Call`."""

"""Judging results: error against fp64, relative to eager's own error at that dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import torch

Pair: TypeAlias = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]
"""Results of a call in fp64 and in eager."""

LIMIT = 2.0
FLOOR = 4.0
"""Errors of this many rounding steps, at the scale of the output, always pass: libraries that add products in different orders
differ by that much (docs/studies/fp32-accuracy.md)."""
VANISHED = 2.0**-24
"""Below this fraction of eager's error, an fp64 result counts as zero up to rounding, e.g. the gradient of a key's bias, which
softmax cancels."""
_EPS = {
    "fp64": torch.finfo(torch.float64).eps,
    "fp32": torch.finfo(torch.float32).eps,
    "fp16": torch.finfo(torch.float16).eps,
    "bf16": torch.finfo(torch.bfloat16).eps,
    "amp": torch.finfo(torch.bfloat16).eps,
}
_FULL = ("fp64", "fp32")
"""Precisions in which libraries that add in different orders differ by `FLOOR` steps."""


@dataclass(frozen=True)
class Accuracy:
    """Worst output of a call. `ratio_*` = our error / eager's error; errors are absolute, against fp64.

    `passed` means every output has error <= 2x eager's + one epsilon of the dtype (four in fp32) at the output's scale, in max
    and rms norm, has eager's dtype and shape, and has NaN and Inf exactly where eager does. The scale of an output whose exact
    result is zero is that of the terms that cancel: any order of additions leaves their rounding, and some orders always more
    than eager's. fp64's own rounding, in fp64's epsilons, tells this scale. An error of the terms themselves is far larger, and
    results that are not zero keep their own scale.
    """

    passed: bool
    ratio_max: float
    ratio_rms: float
    err_max: float
    err_rms: float
    eager_err_max: float
    eager_err_rms: float
    reason: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def compare(
    wide: Sequence[torch.Tensor],
    eager: Sequence[torch.Tensor],
    ours: Sequence[torch.Tensor],
    dtype: str,
    near: Sequence[Pair] = (),
) -> Accuracy:
    """Compare `ours` with `eager`, output by output, and return the worst output (a failed one first, then the highest ratio).
    `near`: the same call on neighbouring numbers, in fp64 and in eager; the largest of eager's errors then applies.
    """
    if not len(wide) == len(eager) == len(ours):
        return _failed(f"{len(ours)} outputs, eager has {len(eager)}")
    leaves = [
        _compare_leaf(w, e, o, dtype, f"output {i}", [(ws[i], es[i]) for ws, es in near])
        for i, (w, e, o) in enumerate(zip(wide, eager, ours, strict=True))
    ]
    if not leaves:
        return _failed("no outputs to compare")
    return max(leaves, key=lambda leaf: (not leaf.passed, max(leaf.ratio_max, leaf.ratio_rms)))


def _failed(reason: str) -> Accuracy:
    return Accuracy(False, math.inf, math.inf, math.inf, math.inf, math.nan, math.nan, reason)


def _compare_leaf(
    wide: torch.Tensor,
    eager: torch.Tensor,
    ours: torch.Tensor,
    dtype: str,
    name: str,
    near: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> Accuracy:
    if ours.shape != eager.shape or ours.dtype != eager.dtype:
        return _failed(f"{name}: {ours.dtype} {tuple(ours.shape)}, eager has {eager.dtype} {tuple(eager.shape)}")
    if ours.device != eager.device:
        return _failed(f"{name}: on {ours.device}, eager's is on {eager.device}")
    eager, ours = eager.to(wide.device), ours.to(wide.device)  # to the host if the device has no fp64
    if not eager.dtype.is_floating_point:
        equal = torch.equal(ours, eager)
        return (
            Accuracy(True, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0)
            if equal
            else _failed(f"{name}: {eager.dtype} values differ from eager's")
        )
    finite = eager.isfinite()
    if not torch.equal(finite, ours.isfinite()) or not torch.equal(
        eager[~finite].nan_to_num(nan=0.0), ours[~finite].nan_to_num(nan=0.0)
    ):
        return _failed(f"{name}: NaN or Inf where eager has none, or the other way round")
    finite &= wide.isfinite()
    if not finite.any():
        return Accuracy(True, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0)
    exact = wide[finite].double()
    beside = [(e.double() - w.double())[finite] for w, e in near]
    errors = [_norms(eager[finite].double() - exact), *(_norms(d[d.isfinite()]) for d in beside if d.isfinite().any())]
    eager_max, eager_rms = (max(each) for each in zip(*errors, strict=True))
    ours_max, ours_rms = _norms(ours[finite].double() - exact)
    scale_max, scale_rms = _norms(exact)
    if dtype == "fp32" and scale_max <= VANISHED * eager_max:
        scale_max, scale_rms = scale_max / _EPS["fp64"], scale_rms / _EPS["fp64"]
    eps = FLOOR * _EPS[dtype] if dtype in _FULL else _EPS[dtype]
    passed = ours_max <= LIMIT * eager_max + eps * scale_max and ours_rms <= LIMIT * eager_rms + eps * scale_rms
    reason = "" if passed else f"{name}: error {ours_max:.3g} against eager's {eager_max:.3g}"
    # The ratio of two errors far below the floor means nothing, so bound the denominator by a hundredth of the floor.
    ratio_max = ours_max / max(eager_max, 0.01 * eps * scale_max, 1e-300)
    ratio_rms = ours_rms / max(eager_rms, 0.01 * eps * scale_rms, 1e-300)
    return Accuracy(passed, ratio_max, ratio_rms, ours_max, ours_rms, eager_max, eager_rms, reason)


def _norms(values: torch.Tensor) -> tuple[float, float]:
    """(max, root mean square) of the absolute values."""
    return float(values.abs().max()), float(values.square().mean().sqrt())

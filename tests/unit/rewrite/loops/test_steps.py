"""Recurrences of any pointwise step: which become scans, with eager's values at infinity and NaN, and how they are trained."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusewright.interface import RuleLog
from fusewright.ops.semantics.steps import parsed, pointwise_scan_op, written
from fusewright.rewrite.loops.recurrence import ID, recur
from tests.unit.rewrite.loops.test_recurrence import STEPS, A, B, H, graph_of, loop_of, scanned

Step = Callable[[Tensor, Tensor, Tensor], Tensor]

STATES: dict[str, Step] = {
    "a maximum that decays": lambda h, x, y: torch.maximum(h + x, y),
    "a decay of one number": lambda h, x, y: torch.maximum(h * 0.9, y),
    "two maxima": lambda h, x, y: torch.maximum(torch.maximum(h, x), y),
    "a sum in log space": lambda h, x, y: torch.logaddexp(h + x, y),
    "a recurrent unit": lambda h, x, y: torch.tanh(y + x * h),
    "gates of the state": lambda h, x, y: (x + h).sigmoid() * h + y,
    "squares": lambda h, x, y: (h * x) ** 2 - y,
    "a spike that resets": lambda h, x, y: (v := h * 0.9 + x) - (v > 0.5).to(v.dtype),
    "a mask": lambda h, x, y: torch.where(x > 0.5, y, h - x),
    "a reservoir": lambda h, x, y: (h + y).clamp(min=0.0),
    "a moving average": lambda h, x, y: torch.lerp(h, y, 0.25).relu(),
    "a variance": lambda h, x, y: (1 - (h + x) / (h + x + y.exp())) * (h + x),
}  # fmt: skip


def _running(step: Step, dim: int = 0) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda a, b, h: torch.stack(loop_of(step, a, b, first=h), dim)


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_pointwise_state_is_a_scan(name: str, dtype: torch.dtype) -> None:
    hits, names = scanned(_running(STATES[name], 1), [x.to(dtype) for x in (A, B, H)])
    assert hits == names.count("pointwise_scan") == 1
    assert len(names) < 2 * STEPS, names


def _rwkv(k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """Three states, of which two read the first before and after its step; the first step may read -1e38."""
    n, d, top, read = torch.zeros_like(k[0]), torch.zeros_like(k[0]), torch.zeros_like(k[0]) - 1e38, []
    for t in range(len(k)):
        here = torch.maximum(top, k[t] + u)
        e, f = torch.exp(top - here), torch.exp(k[t] + u - here)
        read.append((e * n + f * v[t]) / (e * d + f))
        after = torch.maximum(top + w, k[t])
        e, f = torch.exp(top + w - after), torch.exp(k[t] - after)
        n, d, top = e * n + f * v[t], e * d + f, after
    return torch.stack(read, 1)


def _slstm(i: Tensor, f: Tensor, z: Tensor, o: Tensor) -> Tensor:
    c = n = top = torch.zeros_like(i[0])
    read = []
    for t in range(len(i)):
        forget = torch.nn.functional.logsigmoid(f[t]) + top
        after = torch.maximum(forget, i[t])
        c = (forget - after).exp() * c + (i[t] - after).exp() * z[t].tanh()
        n = (forget - after).exp() * n + (i[t] - after).exp()
        top = after
        read.append(o[t].sigmoid() * (c / n))
    return torch.stack(read, 1)


def _kalman(z: Tensor, q: Tensor, r: Tensor, o: Tensor) -> Tensor:
    """The second state reads the first before its step, whose scan has to come earlier."""
    p, x, read = torch.ones_like(z[0]), torch.zeros_like(z[0]), []
    for t in range(len(z)):
        gain = (p + q[t].exp()) / (p + q[t].exp() + r[t].exp())
        x = gain * z[t] + (1 - gain) * x
        p = (1 - gain) * (p + q[t].exp())
        read.append(x)
    return torch.stack(read)


def _softmax(k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    top, n, d = torch.full_like(k[0], -math.inf), torch.zeros_like(k[0]), torch.zeros_like(k[0])
    for t in range(len(k)):
        after = torch.maximum(top, k[t])
        n = n * (top - after).exp() + (k[t] - after).exp() * v[t]
        d, top = d * (top - after).exp() + (k[t] - after).exp(), after
    return n / d


SEVERAL = {"rwkv": (_rwkv, 3), "slstm": (_slstm, 3), "kalman": (_kalman, 2), "online softmax": (_softmax, 3)}
E4 = [torch.randn(STEPS, 5, 4) for _ in range(4)]


@pytest.mark.parametrize("name", SEVERAL)
def test_states_that_read_others_are_scans_one_after_another(name: str) -> None:
    loop, states = SEVERAL[name]
    inputs = [*E4[:2], *(x[0, 0] for x in E4[2:])] if name == "rwkv" else E4
    hits, names = scanned(loop, inputs)
    assert hits == states == names.count("pointwise_scan") + names.count("linear_scan")
    assert len(names) < 6 * STEPS, "no step is left"


KEPT: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "a residual stream": lambda a, b, h: loop_of(lambda h, x, y: h + x, a, b, first=h)[-1],
    "a product with the state": lambda a, b, h: torch.stack(loop_of(lambda h, x, y: torch.tanh(h @ b[0, :4] + x), a, b, first=h)),
    "all states are results": lambda a, b, h: loop_of(STATES["a recurrent unit"], a, b, first=h),
    "another function": lambda a, b, h: torch.stack(loop_of(lambda h, x, y: torch.atan2(h, x), a, b, first=h)),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_other_steps_stay(name: str) -> None:
    log = RuleLog()
    recur(graph_of(KEPT[name], [A, B, H]), log)
    assert log.hits[ID] == 0


SPECIAL = st.sampled_from([0.0, -0.0, 1.0, -1.5, 1e38, -1e38, math.inf, -math.inf, math.nan])
FORMS = ("maximum(add(h, x0), x1)", "logaddexp(add(h, x0), x1)", "where(gt(h, x0), x1, sub(h, x0))", "minimum(mul(h, x0), x1)")


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(FORMS), st.integers(8, 14), st.integers(1, 3), st.data())
def test_special_values_are_eagers(form: str, steps: int, width: int, data: st.DataObject) -> None:
    """NaN passes maxima, -inf is nothing in log space, and an infinite operand reaches no other column."""
    values = st.lists(SPECIAL, min_size=steps * width, max_size=steps * width)
    a, b = (torch.tensor(data.draw(values)).view(steps, width) for _ in range(2))
    h = torch.tensor(data.draw(st.lists(SPECIAL, min_size=width, max_size=width)))
    step: dict[str, Step] = {
        FORMS[0]: lambda h, x, y: torch.maximum(h + x, y), FORMS[1]: lambda h, x, y: torch.logaddexp(h + x, y),
        FORMS[2]: lambda h, x, y: torch.where(h > x, y, h - x), FORMS[3]: lambda h, x, y: torch.minimum(h * x, y),
    }  # fmt: skip
    assert scanned(_running(step[form]), [a, b, h])[0] == 1
    expected = torch.stack(loop_of(step[form], a, b, first=h))
    torch.testing.assert_close(pointwise_scan_op(a, [b], h, 0, form), expected, equal_nan=True)


@pytest.mark.parametrize("name", STATES)
def test_gradients_are_those_of_the_loop(name: str) -> None:
    """Compiled training; ties of a maximum share a gradient."""
    inputs = [x.round(decimals=1).double().requires_grad_() for x in (A, B, H)]
    torch._dynamo.reset()
    compiled = torch.compile(_running(STATES[name], 1), backend="fusewright", dynamic=False)
    weights = torch.randn(5, STEPS, 4, dtype=torch.float64)
    both = [(f(*inputs) * weights).sum() for f in (compiled, _running(STATES[name], 1))]
    results = [torch.autograd.grad(y, inputs, materialize_grads=True) for y in both]
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y)


def test_a_state_of_compared_numbers_needs_no_gradient() -> None:
    loop = _running(lambda h, x, y: (h * 0.9 + x > y).to(x.dtype))
    assert scanned(loop, [A, B, H])[0] == 1
    compiled: Any = torch.compile(loop, backend="fusewright", dynamic=False)
    found = compiled(*(t.clone().requires_grad_() for t in (A, B, H)))
    assert not found.requires_grad and torch.equal(found, loop(A, B, H))


def test_a_step_is_text_that_reads_back() -> None:
    text = "where(gt_scalar(h, -0.5), clamp(x0, float('-inf'), 1.0), mul(h, x1))"
    assert written(parsed(text)) == text
    for wrong in ("h.x", "open(h)", "add(h, y := 1)", "h + x0"):
        with pytest.raises(ValueError, match="is no step"):
            parsed(wrong)

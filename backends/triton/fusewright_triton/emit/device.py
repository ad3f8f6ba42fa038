"""Functions that emitted kernels call: torch's semantics where Triton's operators differ, reductions and scans.

This module is compiled by Triton, on both vendors. `simulated` has the same names for Triton's interpreter.
Reductions keep their axis when it is axis 1 of a block, and give a scalar from a one-dimensional block.
"""

# mypy: disable-error-code="no-untyped-def"
# Parameters are Triton tensors, which have no static type.
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def sign(x):
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


@triton.jit
def signbit(x):
    if x.dtype == tl.float64:
        return x.to(tl.int64, bitcast=True) < 0
    else:
        return x.to(tl.int32, bitcast=True) < 0


@triton.jit
def reciprocal(x):
    return tl.div_rn(tl.full((), 1.0, tl.float32), x)


@triton.jit
def divide(a, b):
    """a / b to within 0.51 ulp: an approximate quotient and one step of Newton's method (Markstein, 1990), without a branch.

    A correctly rounded division takes a slow path for tiny dividends, such as most exponentials of a softmax with ALiBi.
    The step cannot improve quotients of zero or infinity, nor those of subnormal divisors; they stay."""
    if a.dtype == tl.float64:
        return a / b
    else:
        q = a / b
        better = tl.fma(tl.fma(-q, b, a), 1.0 / b, q)
        improves = (tl.abs(better) > 0) & (tl.abs(better) < float("inf"))
        return tl.where(improves, better, q)


@triton.jit
def divide_by(a, b, inverse):
    """The same for a divisor whose rounded reciprocal is known, and neither subnormal nor infinite: five instructions."""
    q = a * inverse
    better = tl.fma(tl.fma(-q, b, a), inverse, q)
    return tl.where(tl.abs(better) > 0, better, q)


@triton.jit
def sigmoid(x):
    return divide(tl.full((), 1.0, x.dtype), 1.0 + libdevice.exp(-x))


@triton.jit
def remainder(a, b):
    m = libdevice.fmod(a, b)
    return tl.where((m != 0) & ((m < 0) != (b < 0)), m + b, m)


@triton.jit
def floordiv(a, b):
    m = libdevice.fmod(a, b)
    q = divide(a - m, b)
    q = tl.where((m != 0) & ((m < 0) != (b < 0)), q - 1.0, q)
    whole = tl.floor(q)
    whole = tl.where(q - whole > 0.5, whole + 1.0, whole)
    quotient = divide(a, b)
    whole = tl.where(q != 0, whole, libdevice.copysign(q * 0.0, quotient))
    return tl.where(b == 0, quotient, whole)


@triton.jit
def int_floordiv(a, b):
    q = a // b
    r = a - q * b
    return tl.where((r != 0) & ((r < 0) != (b < 0)), q - 1, q)


@triton.jit
def int_remainder(a, b):
    r = a % b
    return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)


@triton.jit
def int_pow(a, n):
    """By squaring. A negative power is 0 but for bases 1 and -1."""
    bits: tl.constexpr = n.dtype.primitive_bitwidth
    result = tl.full((), 1, a.dtype) + (a ^ a) + (n ^ n)
    base = a + (n ^ n)
    rest = n + (a ^ a)
    for _ in tl.static_range(bits - 1):
        result = tl.where((rest & 1) != 0, result * base, result)
        base = base * base
        rest = rest >> 1
    odd = (n & 1) != 0
    ones = tl.where(a == 1, a, tl.where(a + 1 == 0, tl.where(odd, a, a * a), a ^ a))
    return tl.where(n < 0, ones, result)


@triton.jit
def shl(a, n):
    bits: tl.constexpr = a.dtype.primitive_bitwidth
    ok = (n >= 0) & (n < bits)
    return tl.where(ok, a << tl.where(ok, n, n ^ n), a ^ a)


@triton.jit
def shr(a, n):
    bits: tl.constexpr = a.dtype.primitive_bitwidth
    ok = (n >= 0) & (n < bits)
    return tl.where(ok, a >> tl.where(ok, n, n ^ n), a >> tl.full((), bits - 1, a.dtype))


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def _mul(a, b):
    return a * b


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _and(a, b):
    return a & b


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def reduce_sum(x, axis: tl.constexpr):
    return tl.reduce(x, axis, _add, keep_dims=axis == 1)


@triton.jit
def _add2(a, b, x, y):
    return a + x, b + y


@triton.jit
def _add3(a, b, c, x, y, z):
    return a + x, b + y, c + z


@triton.jit
def reduce_sum2(a, b, axis: tl.constexpr):
    """Two sums, for which warps wait for each other once."""
    return tl.reduce((a, b), axis, _add2, keep_dims=axis == 1)


@triton.jit
def reduce_sum3(a, b, c, axis: tl.constexpr):
    return tl.reduce((a, b, c), axis, _add3, keep_dims=axis == 1)


@triton.jit
def reduce_prod(x, axis: tl.constexpr):
    return tl.reduce(x, axis, _mul, keep_dims=axis == 1)


@triton.jit
def reduce_any(x, axis: tl.constexpr):
    return tl.reduce(x, axis, _or, keep_dims=axis == 1)


@triton.jit
def reduce_all(x, axis: tl.constexpr):
    return tl.reduce(x, axis, _and, keep_dims=axis == 1)


@triton.jit
def reduce_max(x, axis: tl.constexpr):
    if x.dtype.is_floating():
        return tl.reduce(x, axis, maximum, keep_dims=axis == 1)
    else:
        return tl.reduce(x, axis, _larger, keep_dims=axis == 1)


@triton.jit
def reduce_min(x, axis: tl.constexpr):
    if x.dtype.is_floating():
        return tl.reduce(x, axis, minimum, keep_dims=axis == 1)
    else:
        return tl.reduce(x, axis, _smaller, keep_dims=axis == 1)


@triton.jit
def beats_max(b, a):
    """Whether `b` displaces `a` as a maximum: larger, or the first NaN."""
    return (b > a) | ((b != b) & (a == a))


@triton.jit
def beats_min(b, a):
    return (b < a) | ((b != b) & (a == a))


@triton.jit
def _same(a, b):
    return (a == b) | ((a != a) & (b != b))


@triton.jit
def _first_max(a, i, b, j):
    other = beats_max(b, a) | (_same(a, b) & (j < i))
    return tl.where(other, b, a), tl.where(other, j, i)


@triton.jit
def _first_min(a, i, b, j):
    other = beats_min(b, a) | (_same(a, b) & (j < i))
    return tl.where(other, b, a), tl.where(other, j, i)


@triton.jit
def reduce_argmax(x, position, axis: tl.constexpr):
    """The largest value and the least of its positions; NaN is larger than everything."""
    return tl.reduce((x, position), axis, _first_max, keep_dims=axis == 1)


@triton.jit
def reduce_argmin(x, position, axis: tl.constexpr):
    return tl.reduce((x, position), axis, _first_min, keep_dims=axis == 1)


@triton.jit
def _welford(mean_a, m2_a, n_a, mean_b, m2_b, n_b):
    n = n_a + n_b
    share = tl.where(n == 0, n, n_b / n)
    d = mean_b - mean_a
    return mean_a + d * share, m2_a + m2_b + d * d * n_a * share, n


@triton.jit
def reduce_m2(mean, m2, count, axis: tl.constexpr):
    """Sum of squared deviations (and mean, count) of groups that are given by theirs. Chan, Golub, LeVeque 1983."""
    return tl.reduce((mean, m2, count), axis, _welford, keep_dims=axis == 1)


@triton.jit
def online(top, total, x):
    """The running maximum and sum of exp(x - maximum) of each lane, after one more element (see `online.py`)."""
    up = beats_max(x, top)
    e = libdevice.exp(tl.where(x == top, 0.0, -tl.abs(x - top)))
    return tl.where(up, x, top), tl.where(up, total * e + 1.0, total + e)


@triton.jit
def lanes_sum(x, each: tl.constexpr):
    """Sums of `each` elements, whichever a lane holds: no lane waits for another."""
    return tl.reduce(tl.reshape(x, [x.shape[0] // each, each], can_reorder=True), 1, _add)


@triton.jit
def online_lanes(top, total, x, each: tl.constexpr):
    """`online` for `each` elements to a running maximum. Their sum counts something as long as the maximum is -inf."""
    some = tl.reshape(x, [x.shape[0] // each, each], can_reorder=True)
    most = maximum(top, tl.reduce(some, 1, maximum))
    by = tl.where(most == float("-inf"), 0.0, most)
    more = tl.reduce(libdevice.exp(some - by[:, None]), 1, _add)
    return most, tl.where(most == float("-inf"), 1.0, total * libdevice.exp(top - by) + more)


@triton.jit
def welford_lanes(mean, m2, n, x, each: tl.constexpr):
    """Mean, squared deviations and count of each lane, after `each` more elements: their own, which the lane then adds to its
    own (Chan, Golub, LeVeque 1983)."""
    some = tl.reshape(x, [x.shape[0] // each, each], can_reorder=True)
    own = tl.reduce(some, 1, _add) * (1.0 / each)
    d = some - own[:, None]
    n += each
    apart = own - mean
    new = mean + apart * (each / n)
    return new, m2 + tl.reduce(d * d, 1, _add) + apart * (own - new) * each, n


@triton.jit
def welford_rest(mean, m2, n, x, mask, each: tl.constexpr):
    """The same for as many elements as `mask` has; the others are 0."""
    some = tl.reshape(x, [x.shape[0] // each, each], can_reorder=True)
    counted = tl.reshape(mask, [x.shape[0] // each, each], can_reorder=True)
    more = tl.reduce(counted.to(x.dtype), 1, _add)
    own = tl.reduce(some, 1, _add) / tl.maximum(more, 1.0)
    d = tl.where(counted, some - own[:, None], 0.0)
    n += more
    apart = tl.where(more == 0, 0.0, own - mean)
    new = mean + apart * (more / tl.maximum(n, 1.0))
    return new, m2 + tl.reduce(d * d, 1, _add) + apart * tl.where(more == 0, 0.0, own - new) * more, n


@triton.jit
def guarded(top, total):
    """The sum of exp(x - maximum) where an infinite maximum counts as 0."""
    whole = tl.where(top == float("inf"), top, total)
    return tl.where(top == float("-inf"), 0.0, whole)


@triton.jit
def reduce_online(top, total, axis: tl.constexpr, last: tl.constexpr):
    """The same over lanes. The `last` one gives NaN where the maximum is infinite, as inf - inf does."""
    most = reduce_max(top, axis)
    e = libdevice.exp(tl.where(top == most, 0.0, top - most))
    whole = reduce_sum(total * e, axis)
    if last:
        whole = tl.where((tl.abs(most) == float("inf")) & (whole != 0), float("nan"), whole)
    return most, whole


@triton.jit
def scan_sum(x, axis: tl.constexpr):
    return tl.associative_scan(x, axis, _add)


@triton.jit
def scan_prod(x, axis: tl.constexpr):
    return tl.associative_scan(x, axis, _mul)


@triton.jit
def scan_max(x, axis: tl.constexpr):
    if x.dtype.is_floating():
        return tl.associative_scan(x, axis, maximum)
    else:
        return tl.associative_scan(x, axis, _larger)


@triton.jit
def scan_min(x, axis: tl.constexpr):
    if x.dtype.is_floating():
        return tl.associative_scan(x, axis, minimum)
    else:
        return tl.associative_scan(x, axis, _smaller)


@triton.jit
def _scan(x, how: tl.constexpr):
    if how == "sum":
        return scan_sum(x, 0)
    elif how == "prod":
        return scan_prod(x, 0)
    elif how == "max":
        return scan_max(x, 0)
    else:
        return scan_min(x, 0)


@triton.jit
def _combined(a, b, how: tl.constexpr):
    if how == "sum":
        return a + b
    elif how == "prod":
        return a * b
    elif how == "max":
        return maximum(a, b) if a.dtype.is_floating() else tl.maximum(a, b)
    else:
        return minimum(a, b) if a.dtype.is_floating() else tl.minimum(a, b)


@triton.jit
def _before(x, carry, how: tl.constexpr, each: tl.constexpr):
    """What comes before each element, and after the last one. A lane holds `each` neighbours, since a split takes pairs from one
    lane; only their totals are scanned across lanes."""
    if each == 1:
        whole = _scan(x, how)
        lane = tl.arange(0, x.shape[0])
        previous = _combined(carry, tl.gather(whole, tl.maximum(lane - 1, 0), 0), how)
        last = tl.gather(whole, lane * 0 + (x.shape[0] - 1), 0)
        return tl.where(lane == 0, carry, previous), _combined(carry, last, how)
    else:
        a, b = tl.split(tl.reshape(x, [x.shape[0] // 2, 2]))
        first, carry = _before(_combined(a, b, how), carry, how, each // 2)
        return tl.reshape(tl.join(first, _combined(first, a, how)), [x.shape[0]]), carry


@triton.jit
def scan_lanes(x, carry, how: tl.constexpr, each: tl.constexpr):
    """A scan of one step of a row, after `carry`, and what the next step starts from."""
    before, carry = _before(x, carry, how, each)
    return _combined(before, x, how), carry


@triton.jit
def report(error_ptr, bad, code: tl.constexpr, site: tl.constexpr = 0, index=0):
    """Where `bad`, put `code` into the error flag. All writers of one launch write small codes; the last one stays. Which
    check failed, and of what index, only simulated devices tell: errors of GPUs are found later, like eager's there."""
    tl.store(error_ptr + (bad & False).to(tl.int32), tl.full((), code, tl.int32), mask=bad)


@triton.jit
def floor_index(a, b):
    """Floor division of index arithmetic, whose divisor is positive."""
    q = a // b
    return tl.where(q * b > a, q - 1, q)

"""FakeTensor's strides, corrected by the table's rules, equal eager's for every row and many input layouts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fusewright import _torch_compat as compat
from fusewright import ops, report
from fusewright.conformance.ops.cases import CASES, DTYPES
from fusewright.conformance.ops.samples import F32, NotFinite
from fusewright.graph import retrace
from fusewright.graph.canonicalize import canonicalize
from fusewright.ops import Kind, Op, strides

compat.register_quantized_decomposed()

FIRST_RUN = {"uniform", "dropout"}
"""Random rows run in eager; the first run compares their actual strides with the traced ones."""

PLAIN_INDICES = {"adaptive_max_pool3d_backward"}
"""Eager reads these indices as if they were contiguous, and with others writes out of bounds: only `grad_output` is varied."""

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.hardware("nvidia_triton"))]
MORE: dict[str, list[tuple[Any, ...]]] = {
    "roll": [
        (torch.randn(2, 4, 6, 5), [1], [1]), (torch.randn(2, 4, 6, 5), [1, 2], [0, 2]), (torch.randn(4, 6), [2], []),
        (torch.randn(2, 4, 6, 5), [2], []),
    ],
    "scalar_pow": [(0.5, torch.rand(3, 4)), (1, torch.rand(3, 4)), (2, torch.rand(3, 4))],
}


def layouts(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of the same shape with permuted strides, with gaps, and with overlapping elements."""
    if x.layout is not torch.strided or not x.numel() or not x.dim():
        return
    n = x.dim()
    orders = [tuple(reversed(range(n))), (*range(n - 2), n - 1, n - 2), (0, *range(2, n), 1), (1, 0, *range(2, n))]
    for order in dict.fromkeys(o for o in orders if n > 1 and sorted(o) == list(range(n)) and o != tuple(range(n))):
        back = [order.index(k) for k in range(n)]
        yield f"order {order}", x.permute(order).contiguous().permute(back)
        gaps = torch.empty(*(x.shape[k] for k in order[:-1]), 2 * x.shape[order[-1]], dtype=x.dtype, device=x.device)
        yield f"gaps in {order}", gaps[..., ::2].permute(back).copy_(x)
    yield "gaps", torch.empty(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype, device=x.device)[..., ::2].copy_(x)
    yield "first expanded", x[:1].expand(x.shape)
    yield "last expanded", x[..., :1].expand(x.shape)


def variants(args: list[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yield `args` with other layouts of one of its tensors, of all, or of the first two."""
    yield "plain", args
    found = {k: dict(layouts(a)) for k, a in enumerate(args) if isinstance(a, Tensor)}
    for k, of in found.items():
        for name, x in of.items():
            yield f"{k}: {name}", [x if j == k else a for j, a in enumerate(args)]
    for name in dict.fromkeys(n for of in found.values() for n in of):
        yield f"all: {name}", [found.get(k, {}).get(name, a) for k, a in enumerate(args)]
    for (j, first), (k, second) in itertools.combinations(list(found.items())[:2], 2):
        for m, n in itertools.product(list(first)[:4], list(second)[:4]):
            if m != n:
                yield f"{j}: {m}, {k}: {n}", [first[m] if i == j else second[n] if i == k else a for i, a in enumerate(args)]


def calls(op: Op) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    for args in MORE.get(op.name, ()):
        yield list(args), {}
    for case in CASES.get(op.name, ()):
        try:
            yield case.make(DTYPES.get(op.name, (F32,))[0])
        except NotFinite:
            continue


def flat(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple | list) else [result]


def moved(x: Any, device: str) -> Any:
    if isinstance(x, list):
        return [moved(y, device) for y in x]
    return x.to(device) if isinstance(x, Tensor) and x.layout is torch.strided else x


def traced(op: Op, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
    mode = compat.fake_mode()

    def fake(x: Any) -> Any:
        return [fake(y) for y in x] if isinstance(x, list) else mode.from_tensor(x) if isinstance(x, Tensor) else x

    given, named = fake(args), {k: fake(v) for k, v in kwargs.items()}
    with mode:
        return flat(retrace.as_eager(op, given, named, op.target(*given, **named)))


def steps(t: Tensor) -> list[tuple[int, int]]:
    return [(n, s) for n, s in zip(t.shape, t.stride(), strict=True) if n != 1]


def differences(op: Op, device: str) -> Iterator[str]:
    for args, kwargs in calls(op):
        plain = moved(args, device)
        found = variants(plain[:1]) if op.name in PLAIN_INDICES else variants(plain)
        for label, given in ((label, [*given, *plain[len(given) :]]) for label, given in found):
            try:
                want = flat(op.target(*given, **kwargs))
            except (RuntimeError, NotImplementedError):
                continue  # eager refuses this layout
            try:
                got = traced(op, given, kwargs)
            except (RuntimeError, NotImplementedError, ValueError):
                continue  # nothing is traced, so nothing is believed
            for k, (g, w) in enumerate(zip(got, want, strict=True)):
                if isinstance(w, Tensor) and w.layout is torch.strided and w.numel() and g.shape == w.shape:
                    if steps(g) != steps(w):
                        shapes = [(tuple(a.shape), a.stride()) for a in given if isinstance(a, Tensor)]
                        yield f"{label}: result {k} has {w.stride()}, traced {g.stride()} of {shapes}"


NAMES = [n for n, op in ops.OPS.items() if n in CASES and op.kind is not Kind.VIEW and n not in FIRST_RUN and op.available]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_traced_strides_are_eagers(name: str, device: str) -> None:
    assert not list(differences(ops.OPS[name], device))[:5]


LOSSES = [n for n in NAMES if n.endswith("_loss") or n in ("bce", "bce_with_logits")]


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_half_types_lies_in_memory_as_eagers(name: str) -> None:
    """Operands are converted before FakeTensor compares their strides, and the copy of an expanded one is dense."""
    op, compared = ops.OPS[name], 0
    for case in CASES[name]:
        args, kwargs = case.make(torch.float16)
        for _, given in variants(args):
            compared += 1
            got, want = flat(traced(op, given, kwargs)), flat(op.target(*given, **kwargs))
            assert [steps(g) for g in got] == [steps(w) for w in want]
    assert compared > 10


DENSE = "layer_norm_backward rms_norm_backward log_softmax_backward dropout_backward batch_norm_backward".split()


@pytest.mark.parametrize("name", DENSE)
def test_these_gradients_are_dense_on_a_gpu_whatever_the_layout_of_what_they_read(name: str) -> None:
    """As observed in eager on an H200; tracing needs no GPU."""
    op = ops.OPS[name]
    args, kwargs = CASES[name][0].make(F32)
    with compat.fake_mode():
        args = [backwards(a) if isinstance(a, Tensor) else a for a in args]
        dx, *_ = flat(retrace.as_eager(op, args, kwargs, op.target(*args, **kwargs)))
    assert dx.is_contiguous()


def backwards(t: Tensor) -> Tensor:
    """Make a similar tensor on a GPU with its dimensions in the reverse order in memory."""
    return torch.empty(*reversed(t.shape), dtype=t.dtype, device="cuda").permute(*reversed(range(t.dim())))


@pytest.mark.parametrize(("train", "last"), [(True, True), (False, False)])
def test_the_gradient_of_a_batch_norm_is_channels_last_on_a_gpu_in_training_alone(train: bool, last: bool) -> None:
    """According to ATen's source, its kernel for channels-last images exists only for training."""
    op = ops.OPS["batch_norm_backward"]
    with compat.fake_mode():
        image = torch.empty(2, 4, 6, 6, device="cuda").to(memory_format=torch.channels_last)
        c = torch.empty(4, device="cuda")
        args = [image, image, c, c, c, c, c, train, 1e-5, [True, True, True]]
        dx, *_ = retrace.as_eager(op, args, {}, op.target(*args))
    assert dx.is_contiguous(memory_format=torch.channels_last) is last


def test_what_lies_as_eager_lays_it_out_is_not_traced_again() -> None:
    for x in (torch.empty(1, 3, 4, 5), torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)):
        assert strides.RULES["batch_norm"]({"input": x})[0] is x
    gapped = torch.empty(2, 3, 4, 9)[..., :5]
    assert strides.RULES["batch_norm"]({"input": gapped})[0].stride() == (60, 20, 5, 1)


F16, I64 = torch.float16, torch.int64


@pytest.mark.parametrize("types", [(F16, F16), (F16, F32), (F32, F16), (F16, I64), (F32, I64), (I64, F32)])
@pytest.mark.parametrize("name", ["add", "mul", "div", "maximum", "eq", "copysign", "logical_and"])
def test_an_expanded_operand_of_a_half_type_or_another_type(name: str, types: tuple[torch.dtype, torch.dtype]) -> None:
    """Torch's rules convert operands of half types, and so does eager those of another type on a CPU: copies are dense."""
    op = ops.OPS[name]
    columns = torch.ones(2, 4, 3, 5).to(memory_format=torch.channels_last)
    for x, y in itertools.product((columns, columns[..., :1].expand(columns.shape), columns[:1].expand(columns.shape)), repeat=2):
        args = [torch.empty_strided(t.shape, t.stride(), dtype=dtype) for t, dtype in zip((x, y), types, strict=True)]
        (got,) = traced(op, args, {})
        assert steps(got) == steps(op.target(*args)), [a.stride() for a in args]


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_division_of_two_sizes_has_no_strides() -> None:
    """Longformer's encoder-decoder divides the length of its text."""

    def divided(x: torch.Tensor) -> torch.Tensor:
        return torch.div(x.size(0), x.size(1), rounding_mode="trunc") + x

    compiled = torch.compile(divided, backend="x86_onednn", dynamic=True)
    for x in (torch.randn(12, 3), torch.randn(9, 3)):
        assert torch.equal(compiled(x), divided(x))


def test_a_view_has_eagers_strides_where_a_dim_has_size_one() -> None:
    """Those tell a convolution of a single image its memory format, and so the strides of all that follows."""

    def image(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(x.transpose(1, 2).view(1, 6, 4, -1), w)

    given = torch.randn(1, 16, 6), torch.randn(5, 6, 3, 3)
    graph = make_fx(image, tracing_mode="fake")(*given).graph
    canonicalize(graph)
    view, conv = (n for n in graph.nodes if n.target in (torch.ops.aten.view.default, torch.ops.aten.convolution.default))
    x = given[0].transpose(1, 2)
    assert view.meta["val"].stride() == x.view(1, 6, 4, 4).stride()
    assert conv.meta["val"].stride() == image(*given).stride()


@pytest.mark.parametrize("name", sorted(strides.VIEWS))
@pytest.mark.parametrize("order", [(0, 3, 1, 2), (3, 0, 1, 2), (1, 2, 0, 3)], ids=str)
def test_a_view_of_what_counts_as_contiguous_has_eagers_strides(name: str, order: Any) -> None:
    """Dims of size one do not count there, and a trace keeps their strides."""
    x = torch.randn(1, 6, 6, 1).permute(order)
    (got,) = traced(ops.OPS[name], [x, list(x.shape)], {})
    assert got.stride() == ops.OPS[name].target(x, list(x.shape)).stride()


@pytest.mark.parametrize("seed", range(200))
def test_strides_of_views(seed: int) -> None:
    draw = random.Random(seed)
    sizes = draw.choices([1, 1, 2, 3, 4, 6], k=draw.randint(1, 4))
    x = torch.empty(sizes).permute(draw.sample(range(len(sizes)), len(sizes)))[..., :: draw.choice([1, 1, 2])]
    shape: list[int] = []
    left = x.numel()
    while left > 1:
        shape.append(draw.choice([n for n in range(1, left + 1) if left % n == 0]))
        left //= shape[-1]
    shape.insert(draw.randint(0, len(shape)), 1)
    try:
        want = list(x.view(shape).stride())
    except RuntimeError:  # there is none
        want = None
    assert strides.strides_of_view(x.shape, x.stride(), shape) == want


def operand(draw: random.Random, sizes: list[int], whole: bool) -> Tensor:
    """A tensor of these sizes, or one that is expanded to them, with any strides."""
    sizes = [n if whole or draw.random() < 0.6 else 1 for n in sizes][0 if whole else draw.choice([0, 0, 1, 2]) :]
    order = draw.sample(range(len(sizes)), len(sizes))
    x = torch.empty([sizes[d] for d in order]).permute([order.index(d) for d in range(len(sizes))])
    steps = [s if n > 1 else draw.choice([1, 3, s, x.numel()]) for n, s in zip(x.shape, x.stride(), strict=True)]
    return x.as_strided(x.shape, steps)


@pytest.mark.parametrize("seed", range(200))
def test_strides_of_operands_of_several_shapes(seed: int) -> None:
    draw = random.Random(seed)
    sizes = draw.choices([1, 1, 2, 3, 4], k=draw.choice([3, 4, 4, 5]))
    given = [operand(draw, sizes, True), operand(draw, sizes, False) if seed % 2 else torch.tensor(2.0)]
    if given[1].shape == given[0].shape:
        given[1] = given[1].unsqueeze(0)
    draw.shuffle(given)
    want = torch.mul(*given)
    assert strides.strides_of_broadcast(want.shape, given) == list(want.stride())


@pytest.mark.parametrize("name", sorted(strides.BROADCAST))
def test_a_single_image_beside_a_number_or_another_shape_has_eagers_strides(name: str) -> None:
    """Dims of size one too: they tell the memory format."""
    op, x = ops.OPS[name], torch.ones(1, 8, 18).transpose(1, 2).unflatten(2, (2, 4))
    x = x.long() if "bitwise" in name else x
    x = x > 0 if "logical" in name else x
    others: list[Any] = [1] if name.endswith(("_scalar", "rsub")) else [torch.ones((), dtype=x.dtype), x[:, :1]]
    for other in others:
        given = [x] * (len(strides.BROADCAST[name]) - 1) + [other]
        if name == "where":
            given[0] = x > 0
        kwargs = {"rounding_mode": "floor"} if name == "div_rounded" else {}
        assert traced(op, given, kwargs)[0].stride() == op.target(*given, **kwargs).stride()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("times", [lambda x: x * 1.5, lambda x: torch.where(x > 0, x, 0.5)], ids=["product", "choice"])
def test_what_reads_the_format_of_a_single_image_gets_eagers(times: Any) -> None:
    """Beside a number, eager keeps the stride of a single image, which is not that of channels-last ones."""

    def image(x: Tensor) -> Tensor:
        return torch.nn.functional.pixel_unshuffle(times(x.transpose(1, 2).unflatten(2, (2, 4))), 2)

    x = torch.randn(1, 8, 18)
    assert torch.compile(image, backend="x86_onednn")(x).stride() == image(x).stride()


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_single_image_of_symbolic_sizes_is_compiled() -> None:
    """The order of dims is then not asked for: symbols have neither hashes nor an order."""

    def image(x: Tensor) -> Tensor:
        y = x.transpose(1, 2).unflatten(2, (2, 4))
        return torch.where(y > 0, y * y[:, :, :1], y + y).tanh()

    x = torch.randn(1, 8, 18)
    torch.testing.assert_close(torch.compile(image, backend="x86_onednn", dynamic=True)(x), image(x))


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_step_with_one_image_is_compiled_again_once() -> None:
    """AOTAutograd traces saved views with other strides of dims of size one. All are mended together, and gradients follow."""
    convs = torch.nn.ModuleList(torch.nn.Conv2d(24, 24, 3, padding=1) for _ in range(3))
    x = torch.randn(1, 64, 24)

    def images(x: Tensor) -> Tensor:
        for conv in convs:
            x = conv(x.sin().transpose(1, 2).reshape(1, 24, 8, 8)).flatten(2).transpose(1, 2)
        return x

    def step(run: Any) -> list[Tensor]:
        convs.zero_grad()
        run(x).square().mean().backward()
        return [p.grad.clone() for p in convs.parameters() if p.grad is not None]

    want = step(images)
    with report.recording() as reports:
        got = step(torch.compile(images, backend="x86_onednn"))
    assert sum(r.superseded for r in reports) <= 1
    torch.testing.assert_close(got, want)

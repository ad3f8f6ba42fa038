"""Convolutions of a training step are channels-last; values whose strides are visible keep eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fusewright import _torch_compat as compat
from fusewright.capture import layouts
from fusewright.ops.strides import CHANNELS_LAST

LAST = torch.channels_last


class Images(nn.Module):
    """Two convolutions of two or three spatial dims, the second perhaps a transposed one, followed by other ops."""

    def __init__(
        self, then: Callable[..., Any], outs: int = 8, kernel: Any = 3, width: int = 8, kind: str = "Conv2d", ins: int = 4,
        **how: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        dims = int(kind[-2])
        self.first, self.norm = getattr(nn, f"Conv{dims}d")(ins, width, 3), getattr(nn, f"BatchNorm{dims}d")(width)
        self.second, self.then = getattr(nn, kind)(width, outs, kernel, **how), then
        self.shape = (2, ins, *(9, 9, 8)[:dims])

    def forward(self, x: torch.Tensor) -> Any:
        return self.then(self.second(F.relu(self.norm(self.first(x)))))


def run(module: nn.Module, dtype: torch.dtype = torch.bfloat16) -> tuple[bool, list[torch.Tensor], list[torch.Tensor]]:
    """Return whether the graph was rewritten, its results, and the gradients of the weights."""
    rewritten: list[bool] = []

    def backend(gm: Any, inputs: Any) -> Any:
        before = str(gm.graph)
        laid = layouts.channels_last(gm)
        assert str(gm.graph) == before
        rewritten.append(laid is not None)
        if laid is None:
            return gm.forward
        laid.graph.lint()
        return laid.forward

    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
        results = torch.compile(module, backend=backend)(torch.randn(module.shape))
    results = list(results) if isinstance(results, tuple) else [results]
    weights = [module.first.weight, module.second.weight]  # type: ignore[union-attr]
    return rewritten[0], results, list(torch.autograd.grad(sum(r.float().sin().sum() for r in results), weights))  # type: ignore[arg-type]


def eager(module: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = module(torch.randn(module.shape))
    results = list(results) if isinstance(results, tuple) else [results]
    weights = [module.first.weight, module.second.weight]  # type: ignore[union-attr]
    return results, list(torch.autograd.grad(sum(r.float().sin().sum() for r in results), weights))  # type: ignore[arg-type]


def assert_same(ours: list[torch.Tensor], eagers: list[torch.Tensor]) -> None:
    """Check values up to their rounding: kernels of two layouts may add in other orders, so that elements which cancel differ."""
    for a, b in zip(ours, eagers, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert (a - b).norm() <= 2 * torch.finfo(torch.bfloat16).eps * b.norm()


def assert_rewritten(then: Callable[..., Any], kind: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Check values and strides of a rewritten graph's results and gradients. Return its results and eager's."""
    torch.manual_seed(1)
    module = Images(then, kind=kind)
    wanted, gradients = eager(module)
    rewritten, results, found = run(module)
    assert rewritten
    assert_same([*results, *found], [*wanted, *gradients])
    assert [t.stride() for t in (*results, *found)] == [t.stride() for t in (*wanted, *gradients)]
    return results, wanted


def _seen(x: torch.Tensor, found: list[bool]) -> torch.Tensor:
    found.append(x.is_contiguous(memory_format=CHANNELS_LAST[x.dim()]))
    return x


KINDS = ("Conv2d", "Conv3d", "ConvTranspose2d", "ConvTranspose3d")


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize(
    "then",
    [
        lambda x: x,
        lambda x: x * 2,
        lambda x: x.flatten(2).transpose(1, 2),
        lambda x: (x + 1, x.mean((2, 3))),
        lambda x: F.dropout(x, 0.5),
        lambda x: torch.feature_dropout(x, 0.5, True).movedim(1, -1),
        lambda x: torch.bernoulli(x.sigmoid()) * x,
    ],
    ids=["itself", "more", "rows", "two", "dropout", "channels dropped", "drawn"],
)  # fmt: skip
def test_results_and_gradients_are_eagers(then: Callable[..., Any], kind: str) -> None:
    assert_rewritten(then, kind)


@pytest.mark.parametrize("ins", [4, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_images_are_channels_last_between_convolutions(kind: str, ins: int) -> None:
    """The second convolution receives the layout that it requests, also where an image of one channel is in either layout."""
    module, asked = Images(lambda x: x, kind=kind, ins=ins), list[bool]()
    convolutions = {torch.conv2d, torch.conv3d, torch.conv_transpose2d, torch.conv_transpose3d}

    def backend(gm: Any, inputs: Any) -> Any:
        laid = layouts.channels_last(gm)
        assert laid is not None

        class Watch(torch.fx.Interpreter):
            def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
                made = super().call_function(target, args, kwargs)
                for image in args[:2] if target in convolutions else ():
                    _seen(image, asked)
                return made

        return Watch(laid).run

    torch._dynamo.reset()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.compile(module, backend=backend)(torch.randn(module.shape))
    assert len(asked) == 4 and all(asked)


@pytest.mark.parametrize("kind", KINDS)
def test_images_of_one_channel_give_eagers_results(kind: str) -> None:
    torch.manual_seed(1)
    module = Images(lambda x: x, kind=kind, ins=1)
    wanted, gradients = eager(module)
    rewritten, results, found = run(module)
    assert rewritten
    assert_same([*results, *found], [*wanted, *gradients])
    assert all(t.is_contiguous() for t in (*results, *found, *wanted, *gradients))


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_lies_as_its_weight_does(kind: str) -> None:
    _, _, planes = run(Images(lambda x: x, kind=kind))
    assert all(g.is_contiguous() for g in planes)
    module = Images(lambda x: x, kind=kind)
    for weight in (module.first.weight, module.second.weight):
        weight.data = weight.data.contiguous(memory_format=CHANNELS_LAST[weight.dim()])
    _, _, gradients = run(module)
    assert all(g.is_contiguous(memory_format=CHANNELS_LAST[g.dim()]) for g in gradients)


@pytest.mark.parametrize("kind", KINDS)
def test_one_image_without_a_batch_is_left_in_planes(kind: str) -> None:
    torch.manual_seed(1)
    module = Images(lambda x: x, kind=kind)
    module.norm, module.shape = nn.Identity(), module.shape[1:]
    wanted, gradients = eager(module)
    _, results, found = run(module)
    assert_same([*results, *found], [*wanted, *gradients])
    assert [t.stride() for t in (*results, *found)] == [t.stride() for t in (*wanted, *gradients)]


def _strided(x: torch.Tensor) -> torch.Tensor:
    return torch.as_strided(x, (2, 8), (8, 1))


def _shared(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x, x[:, :2]


def _overlapping(x: torch.Tensor) -> torch.Tensor:
    return x[:, :, :1].expand(-1, -1, 3, -1)


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("then", [
    _shared,
    lambda x: x.split([2, 6], 1),
    lambda x: ((y := x.flatten(2).mean(2) * 2), y.t()),
    lambda x: (x.flatten(1), x.mean(), x.unflatten(1, (2, 4))),
], ids=["a part", "parts", "a transpose", "views"])  # fmt: skip
def test_results_that_share_memory_still_do(then: Callable[..., Any], kind: str) -> None:
    results, wanted = assert_rewritten(then, kind)
    ours, eagers = ([compat.storage_id(t) for t in ts] for ts in (results, wanted))
    assert [ours.index(s) for s in ours] == [eagers.index(s) for s in eagers]


@pytest.mark.parametrize("then", [_strided, _overlapping])
def test_what_strides_mean_something_to_is_left_alone(then: Callable[..., Any]) -> None:
    assert not run(Images(then))[0]


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize(("norm", "affine"), [("group", True), ("instance", True), ("instance", False)])
def test_norms_of_rows_leave_images_channels_last(norm: str, affine: bool, kind: str) -> None:
    """Behind a norm of groups or instances, and behind its gradient."""
    torch.manual_seed(1)
    module, laid, last = Images(lambda x: x, kind=kind), list[Any](), CHANNELS_LAST[int(kind[-2]) + 2]
    module.norm = nn.GroupNorm(2, 8) if norm == "group" else getattr(nn, f"InstanceNorm{kind[-2]}d")(8, affine=affine)
    wanted, gradients = eager(module)
    rewritten, results, found = run(module)
    assert rewritten
    assert_same([*results, *found], [*wanted, *gradients])
    assert [t.stride() for t in (*results, *found)] == [t.stride() for t in (*wanted, *gradients)]

    def backend(gm: Any, inputs: Any) -> Any:
        laid.append(layouts.channels_last(gm))
        return gm.forward

    torch._dynamo.reset()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.compile(module, backend=backend)(torch.randn(module.shape))
    (found,) = (n for n in laid[0].graph.nodes if f"{norm}_norm" in str(n.target))
    (copy,) = found.users
    assert copy.target == "contiguous" and copy.kwargs == {"memory_format": last}
    image = torch.randn(2, 8, *module.shape[2:], requires_grad=True)
    (gradient,) = torch.autograd.grad(layouts.channels_last_gradient(image).sum(), image)
    assert gradient.is_contiguous(memory_format=last)


def test_a_stream_of_images_in_planes_is_channels_last_from_its_first_group_norm() -> None:
    """A sum begins with planes, which a reshape made; without the copy it and all sums behind it would stay so."""
    norm, strides = nn.GroupNorm(2, 8), list[tuple[int, ...]]()

    def blocks(x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(2).transpose(1, 2).reshape(2, 8, 5, 5)
        return F.conv2d(x + norm(x), torch.ones(8, 8, 1, 1))

    torch.manual_seed(1)
    module = Images(blocks)
    wanted, gradients = eager(module)
    rewritten, results, found = run(module)
    assert rewritten
    assert_same([*results, *found], [*wanted, *gradients])

    def backend(gm: Any, inputs: Any) -> Any:
        laid = layouts.channels_last(gm)

        class Watch(torch.fx.Interpreter):
            def run_node(self, n: torch.fx.Node) -> Any:
                made = super().run_node(n)
                strides.extend([made.stride()] if n.name == "add" else [])
                return made

        assert laid is not None
        return Watch(laid).run

    torch._dynamo.reset()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.compile(module, backend=backend)(torch.randn(2, 4, 9, 9))
    assert strides == [(200, 1, 40, 8)]


@pytest.mark.parametrize("kind", KINDS)
def test_only_half_precision(kind: str) -> None:
    assert not run(Images(lambda x: x, kind=kind), torch.float32)[0]


MANY = {"groups": 2, "width": 64}


@pytest.mark.parametrize(
    "how",
    [
        {}, {"kernel": 5}, {"kernel": 7}, {"stride": 2}, {"padding": "same"},
        {**MANY, "outs": 64}, {**MANY, "outs": 64, "kernel": 7},
        {"groups": 2}, {"groups": 4, "kernel": (3, 5)}, {"groups": 4, "outs": 16, "kernel": 1},
        {"groups": 4, "width": 48, "outs": 48}, {"groups": 2, "dilation": 2},
    ],
    ids=str,
)  # fmt: skip
def test_grouped_convolutions_are_channels_last(how: dict[str, Any]) -> None:
    torch.manual_seed(1)
    module = Images(lambda x: x, **{"groups": 8, **how})
    wanted, gradients = eager(module)
    rewritten, results, found = run(module)
    assert rewritten
    assert_same([*results, *found], [*wanted, *gradients])
    assert all(t.is_contiguous() for t in (*results, *found, *wanted, *gradients))


@pytest.mark.parametrize(
    "how",
    [
        {"outs": 16}, {"dilation": 2}, {"kernel": (3, 5)}, {"stride": 3},
        {"groups": 2, "kernel": 7}, {"groups": 2, "stride": (1, 2)}, {"groups": 2, "width": 12, "outs": 12},
        {"kind": "Conv3d"}, {**MANY, "outs": 64, "kind": "Conv3d"},
    ],
    ids=str,
)  # fmt: skip
def test_groups_without_kernels_of_this_layout_are_left_alone(how: dict[str, Any]) -> None:
    assert not run(Images(lambda x: x, **{"groups": 8, **how}))[0]


def test_images_that_are_groups_of_one_image_are_left_alone() -> None:
    """StyleGAN's convolutions have weights for each image."""

    class Modulated(Images):
        def forward(self, x: torch.Tensor) -> Any:
            x = self.first(x).relu()
            weight = self.second.weight * x.mean((2, 3))[:, None, :, None, None]
            return F.conv2d(x.reshape(1, -1, *x.shape[2:]), weight.flatten(0, 1), groups=len(x)).view(len(x), -1, 5, 5)

    assert not run(Modulated(lambda x: x))[0]


@pytest.mark.parametrize(
    ("conv", "then", "worth"),
    [
        (nn.Conv2d(8, 8, 3), lambda x: x.flatten(2), True),
        (nn.Conv2d(8, 8, 3, groups=8), lambda x: x.flatten(2), True),
        (nn.ConvTranspose2d(8, 8, 3, 3), lambda x: x.sin(), True),
        (nn.Conv2d(8, 8, 3, stride=3), lambda x: x.flatten(2), False),
        (nn.Conv2d(8, 8, 1), lambda x: x.flatten(2), False),
        (nn.Conv2d(8, 8, 3), lambda x: F.layer_norm(x.relu(), x.shape[-1:]), False),
        (nn.Conv2d(8, 8, 3), lambda x: F.layer_norm(x.permute(0, 2, 3, 1), x.shape[1:2]), True),
    ],
    ids=["windows", "depthwise", "transposed", "patches", "pixels", "rows", "rows of channels"],
)
def test_one_convolution_is_a_reason_where_a_library_copies_its_image(
    conv: nn.Module, then: Callable[[torch.Tensor], torch.Tensor], worth: bool
) -> None:
    """Patches and pixels are products, and what is normalized along rows of the image is read in planes."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = self.second = conv
            self.shape = (2, 8, 9, 9)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return then(self.first(x))

    assert bool(run(One())[0]) == worth


@pytest.mark.parametrize(
    ("conv", "turned"),
    [
        (nn.ConvTranspose2d(5, 7, (3, 4), padding=(1, 2)), True),
        (nn.ConvTranspose3d(4, 6, 3, dilation=2), True),
        (nn.ConvTranspose2d(5, 7, 3, padding=1, bias=False), True),
        (nn.ConvTranspose2d(8, 8, 3, stride=(1, 2)), False),
        (nn.ConvTranspose2d(8, 8, 3, padding=3), False),
        (nn.ConvTranspose2d(32, 8, 3), False),
        (nn.ConvTranspose2d(8, 8, 3, stride=2, output_padding=1), False),
    ],
)
def test_a_transposed_convolution_of_few_channels_that_steps_by_one_is_a_convolution(conv: nn.Module, turned: bool) -> None:
    """For gradients of the former's weights cuDNN may have a kernel that takes seconds."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = self.second = conv
            self.shape = (2, conv.in_channels, *(9, 8, 7)[: conv.weight.dim() - 2])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x).sin()  # type: ignore[no-any-return]

    calls: list[str] = []

    def backend(gm: Any, inputs: Any) -> Any:
        laid = layouts.channels_last(gm)
        assert laid is not None
        calls.extend(n.target.__name__ for n in laid.graph.nodes if n.target in (torch.conv2d, torch.conv3d))
        return laid.forward

    torch._dynamo.reset()
    wanted = eager(One())
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.compile(One(), backend=backend)(torch.randn(One().shape))
    grads = torch.autograd.grad(found.float().sin().sum(), [conv.weight, conv.weight])
    assert bool(calls) == turned
    assert_same([found, *grads], [*wanted[0], *wanted[1]])
    assert [t.stride() for t in (found, *grads)] == [t.stride() for t in (*wanted[0], *wanted[1])]


def test_inference_is_left_alone() -> None:
    module = Images(lambda x: x)
    found: list[Any] = []

    def backend(gm: Any, inputs: Any) -> Any:
        found.append(layouts.channels_last(gm))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        torch.compile(module, backend=backend)(torch.randn(2, 4, 9, 9))
    assert found == [None]


class Stream(nn.Module):
    """Two mixing blocks behind patches, as in MLP-Mixer; `begin` makes the stream from the image of patches."""

    def __init__(self, begin: Callable[..., Any], then: Callable[..., Any] = lambda x: x.mean(1)) -> None:
        super().__init__()
        self.first, self.begin, self.then = nn.Conv2d(3, 8, 4, 4), begin, then
        self.second, self.norm, self.scale = nn.Linear(16, 16), nn.LayerNorm(8), nn.Parameter(torch.rand(8))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.begin(self.first(x).flatten(2).transpose(1, 2))
        x = x + self.scale * self.second(self.norm(x).transpose(1, 2)).transpose(1, 2)
        x = self.scale * x + x
        return self.then(x)


def stepped(module: nn.Module, backend: Callable[..., Any] | str) -> list[torch.Tensor]:
    """Results and the gradients of all weights."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    results = torch.compile(module, backend=backend)(torch.randn(2, 3, 16, 16))
    results = results if isinstance(results, tuple) else (results,)
    found = torch.autograd.grad(sum(r.sin().sum() for r in results), [*module.parameters()])  # type: ignore[arg-type]
    return [*results, *found]


def in_rows(rewritten: list[str]) -> Callable[..., Any]:
    def backend(gm: Any, inputs: Any) -> Any:
        before = str(gm.graph)
        laid = layouts.row_major(gm)
        assert str(gm.graph) == before
        if laid is None:
            return gm.forward
        laid.graph.lint()
        rewritten.append(str(laid.graph))
        return laid.forward

    return backend


def _written(x: torch.Tensor) -> torch.Tensor:
    x += 1
    return x


@pytest.mark.parametrize(
    "begin, then",
    [
        (lambda x: x, lambda x: x.mean(1)),
        (_written, lambda x: x),
        (lambda x: x + 1, lambda x: (x, x.flatten(1))),
        (lambda x: F.dropout(x, 0.0), lambda x: x.transpose(1, 2).reshape(2, 8, 4, 4)),
        (lambda x: F.dropout(x, 0.5), lambda x: F.dropout(x, 0.5)),
    ],
    ids=["itself", "written in place", "shifted", "inert", "dropped"],
)  # fmt: skip
def test_a_transposed_stream_is_row_major(begin: Callable[..., Any], then: Callable[..., Any]) -> None:
    torch.manual_seed(1)
    module, rewritten = Stream(begin, then), list[str]()
    wanted, found = stepped(module, "eager"), stepped(module, in_rows(rewritten))
    assert rewritten
    for a, b in zip(wanted, found, strict=True):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()


def test_what_shares_memory_with_a_stream_sees_what_is_written_to_it() -> None:
    """By a function that is asked to write."""

    def begin(x: torch.Tensor) -> torch.Tensor:
        image = x.transpose(1, 2)
        stream = image.transpose(1, 2)
        twice = stream * 2
        F.relu(stream, True)
        return twice + stream + image.mean()

    torch.manual_seed(1)
    module = Stream(begin)
    for a, b in zip(stepped(module, "eager"), stepped(module, in_rows([])), strict=True):
        torch.testing.assert_close(a, b)


def test_a_stream_is_copied_where_it_begins() -> None:
    rewritten = list[str]()
    stepped(Stream(lambda x: x), in_rows(rewritten))
    assert rewritten[0].count("target=contiguous") == 2  # the other is the result's


@pytest.mark.parametrize(
    "begin, then",
    [(lambda x: x.contiguous(), lambda x: x), (lambda x: x, lambda x: torch.as_strided(x, (2, 8), (8, 1)))],
    ids=["row-major in eager", "strides are asked for"],
)  # fmt: skip
def test_other_streams_are_left_alone(begin: Callable[..., Any], then: Callable[..., Any]) -> None:
    rewritten = list[str]()
    stepped(Stream(begin, then), in_rows(rewritten))
    assert not rewritten


def test_a_step_that_needs_a_transposed_stream_keeps_it() -> None:
    """A view that row-major memory does not have."""
    torch.manual_seed(1)
    module = Stream(lambda x: x, lambda x: x.transpose(1, 2).view(2, 8, 4, 4))
    wanted = stepped(module, "eager")
    torch._dynamo.reset()
    torch.manual_seed(0)
    ours = torch.compile(module, backend="nvidia_triton", options={"simulate": True})(torch.randn(2, 3, 16, 16))
    torch.testing.assert_close(ours, wanted[0])
    assert ours.stride() == wanted[0].stride()

"""Which ops share a kernel, which stay views, and where values are computed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from fusewright.interface import Device, DevicePolicy, Splits, Value
from fusewright.plan.ir import Call, Launch, Ref
from fusewright.sizes.expr import Atom
from fusewright.toolkit.fuse import fuser, group
from fusewright.toolkit.fuse.build import Built, size_hints
from fusewright.toolkit.fuse.fuser import fuse
from fusewright.toolkit.fuse.group import Group
from fusewright.toolkit.fuse.signature import KernelMemo
from fusewright.toolkit.lower.tables import RULES
from fusewright.toolkit.rules.space import NotAligned
from fusewright_cpu.policy import CPU
from fusewright_cpu.policy import EAGER as CONDITIONS
from tests.fragments import Context, Sketch
from tests.unit.fuse.running import LOADERS, by_llvm, fused, kernel_count, run_sketch


def check(g: Sketch, outputs: list[Value], kernels: int) -> list[Launch]:
    """Check values and strides with both loaders, and the number of kernels."""
    for loader in LOADERS.values():
        fragment, got = run_sketch(g, outputs, loader)
        for ours, eager in zip(got, g.expected(outputs), strict=True):
            torch.testing.assert_close(ours, eager, equal_nan=True)
            assert ours.stride() == eager.stride()
    assert kernel_count(fragment) == kernels
    return [i for i in fragment.instructions if isinstance(i, Launch)]


def test_pointwise_chain_is_one_kernel() -> None:
    g = Sketch()
    x, bias = g.input(torch.randn(4, 8)), g.input(torch.randn(8))
    y = g.op("gelu", g.op("add", x, bias))
    (launch,) = check(g, [y], 1)
    assert launch.outs == (y.id,), "the sum is not stored"


def test_residual_and_norm_are_one_kernel_with_two_results() -> None:
    g = Sketch()
    x, r, w, b = (g.input(torch.randn(*s)) for s in ((4, 8), (4, 8), (8,), (8,)))
    s = g.op("add", x, r)
    y = g.op("layer_norm", s, [8], w, b, 1e-5)
    (launch,) = check(g, [s, y], 1)
    assert set(launch.outs) == {s.id, y.id}, "mean and rstd are not stored"


def test_masked_scaled_softmax_is_one_kernel() -> None:
    g = Sketch()
    scores, mask = g.input(torch.randn(2, 3, 5, 5)), g.input(torch.rand(2, 1, 1, 5) > 0.3)
    masked = g.op("masked_fill", g.op("mul", scores, 0.125), mask, -1e9)
    check(g, [g.op("softmax", masked, -1, False)], 1)


def test_mean_and_variance_feed_what_follows_in_the_same_kernel() -> None:
    g = Sketch()
    x = g.input(torch.randn(6, 16))
    g.op("var_mean", x, [1], correction=0, keepdim=True)
    var, mean = g.ops[-1].outs
    y = g.op("mul", g.op("sub", x, mean), g.op("rsqrt", g.op("add", var, 1e-5)))
    check(g, [y], 1)


def test_reshape_between_ops_costs_nothing() -> None:
    g = Sketch()
    x = g.input(torch.randn(2, 3, 4))
    y = g.op("view", g.op("exp", x), [6, 4])
    check(g, [g.op("softmax", y, -1, False)], 1)


def test_transposed_reader_of_a_row_result_gets_it_from_memory() -> None:
    g = Sketch()
    x = g.input(torch.randn(5, 5))
    p = g.op("softmax", x, -1, False)
    check(g, [g.op("add", p, g.op("t", p))], 2)


def test_siblings_over_one_tensor_share_a_kernel() -> None:
    g = Sketch()
    x = g.input(torch.randn(64, 64))
    check(g, [g.op("sin", x), g.op("cos", x)], 1)


def test_counters_that_have_nothing_in_common_share_a_kernel() -> None:
    g = Sketch("forward")
    counters = [g.input(torch.tensor(n)) for n in range(5)]
    check(g, [g.op("add", c, 1) for c in counters], 1)


def test_two_producers_of_one_op_merge() -> None:
    g = Sketch()
    x, y = g.input(torch.randn(8, 8)), g.input(torch.randn(8, 8))
    check(g, [g.op("add", g.op("exp", x), g.op("tanh", y))], 1)


def test_no_kernel_waits_for_itself() -> None:
    g = Sketch()
    x, w = g.input(torch.randn(8, 8)), g.input(torch.randn(8, 8))
    a = g.op("exp", x)
    b = g.op("mm", a, w)  # runs in eager, between the two ends
    check(g, [g.op("add", a, b)], 2)


def test_a_view_that_leaves_the_region_is_a_view() -> None:
    g = Sketch()
    x = g.input(torch.randn(4, 6))
    y = g.op("exp", x)
    v = g.op("transpose", y, 0, 1)
    fragment, (base, view) = run_sketch(g, [y, v])
    assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    assert kernel_count(fragment) == 1


def test_masks_from_positions_are_computed_where_they_are_used() -> None:
    g = Sketch("forward")
    x = g.input(torch.randn(3, 8, 8))
    rows = g.op("unsqueeze", g.op("arange", 0, 8), 1)
    keep = g.op("le", g.op("arange", 0, 8), rows)
    check(g, [g.op("where", keep, x, g.op("scalar_tensor", -1.0))], 1)


def test_what_depends_on_weights_alone_stays_a_call_that_runs_once() -> None:
    g = Sketch("infer")
    x, w = g.input(torch.randn(4, 8)), g.input(torch.randn(8), const=True)
    check(g, [g.op("mul", x, g.op("exp", w))], 1)
    fragment, _ = fused(g.region([g.ops[-1].out]))
    assert [i.target for i in fragment.instructions if isinstance(i, Call)] == ["aten::exp.default"]


def test_loops_follow_the_memory_of_the_result() -> None:
    g = Sketch()
    x = g.input(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    (launch,) = check(g, [g.op("relu", g.op("add", x, 1.0))], 1)
    fragment, _ = fused(g.region([g.ops[-1].out]))
    assert fragment.kernels[launch.kernel].p == (120,), "one dense axis, though dim 1 is innermost"


def test_loops_follow_memory_through_a_reshape() -> None:
    """A group norm sees [2, 2, 4, 35]; in memory the four channels of a group are neighbours."""
    g = Sketch()
    x = g.input(torch.randn(2, 8, 5, 7).to(memory_format=torch.channels_last))
    weight, bias = g.input(torch.rand(8)), g.input(torch.rand(8))
    y = g.op("group_norm", x, weight, bias, 2, 8, 35, 2, 1e-5)
    fragment, got = run_sketch(g, [y], by_llvm, DevicePolicy())
    torch.testing.assert_close(got, list(g.expected([y])))
    (kernel,) = fragment.kernels.values()
    inner = len(kernel.sizes) - 1
    images = [n.index for n in kernel.nodes() if n.op in ("load", "store") and n.index and len(n.index.axes()) > 2]
    assert images and all(i.stride_of(inner) == 1 for i in images)


def test_rows_too_long_to_hold_read_a_stored_sum_again_rather_than_all_of_its_operands() -> None:
    """The residual stream in front of a norm over an image: it is stored in any case."""
    g = Sketch()
    x, y, z = (g.input(torch.randn(2, 96)) for _ in range(3))
    total = g.op("add", g.op("add", x, y), z)
    outputs = [g.op("layer_norm", total, [96], None, None, 1e-5), total]
    names = {}
    for held in (96, 64):
        fragment, got = run_sketch(g, outputs, by_llvm, DevicePolicy(splits=Splits(held_row=held)))
        torch.testing.assert_close(got, list(g.expected(outputs)), rtol=1e-4, atol=1e-4)
        names[held] = [fragment.kernels[i.kernel].name for i in fragment.instructions if isinstance(i, Launch)]
    assert names == {96: ["add_layer_norm"], 64: ["add", "layer_norm"]}


def test_columns_short_enough_to_hold_are_read_once() -> None:
    """A norm over channels, softmax over channels and what follows it."""
    g = Sketch()
    x = g.input(torch.rand(2, 24, 40))
    root = g.op("sqrt", g.op("mean", g.op("mul", x, x), [1], True))
    outputs = [g.op("div", x, root), g.op("mul", g.op("softmax", x, 1, False), x)]
    counts = {}
    for held in (24, 23):
        fragment, got = run_sketch(g, outputs, by_llvm, DevicePolicy(splits=Splits(held_column=held)))
        torch.testing.assert_close(got, list(g.expected(outputs)), rtol=1e-4, atol=1e-5)
        counts[held] = len([i for i in fragment.instructions if isinstance(i, Launch)])
    assert counts[24] < counts[23]


def test_a_cast_to_a_wider_type_is_read_before_it() -> None:
    """Two kernels that cannot be one read the half type; nobody stores what is twice as large."""
    g = Sketch()
    x, y = g.input(torch.randn(64, 32).bfloat16()), g.input(torch.rand(64, 32))
    wide = g.op("cast", x, torch.float32)
    total = g.op("sum", wide, [0], True)
    launches = check(g, [total, g.op("add", g.op("mul", wide, y), total)], 2)
    assert all(wide.id not in i.outs and Ref(x.id) in i.inputs for i in launches)


@pytest.mark.parametrize("between", [False, True])
def test_a_window_does_not_compute_the_windows_behind_it(between: bool) -> None:
    """Four resized images inside of each other took 256 times the work, and a minute to compile."""
    g = Sketch()
    x = g.input(torch.randn(2, 3, 16, 16))
    y, images = g.op("relu", x), 3
    for _ in range(images):
        y = g.op("avg_pool2d", y, [3, 3], [1, 1], [1, 1])
        y = g.op("mul", y, 1.5) if between else y
    launches = check(g, [y], images)
    assert launches[0].inputs == (Ref(x.id),), "what is not a window is computed where it is read"


@pytest.mark.parametrize(("levels", "kernels"), [(2, 1), (4, 2)])
def test_a_recursion_over_neighbours_is_not_computed_once_for_each_path(levels: int, kernels: int) -> None:
    """B-splines of order three were: each level reads two elements of the one before."""
    g = Sketch()
    y = g.op("mul", g.input(torch.randn(64, 1)), g.input(torch.randn(40)))
    for _ in range(levels):
        n = y.spec.shape[1]  # type: ignore[union-attr]
        left, right = (g.op("slice", y, 1, k, n - 1 + k, 1) for k in (0, 1))
        y = g.op("add", g.op("div", left, g.input(torch.rand(n - 1) + 1)), g.op("div", right, g.input(torch.rand(n - 1) + 1)))
    check(g, [y], kernels)


@pytest.mark.parametrize("pieces", [2, 3])
def test_a_window_joins_few_tensors(pieces: int) -> None:
    """Each of its elements would be asked of every one: the means of eight spiking steps took 1066 us."""
    g = Sketch()
    given = [g.input(torch.randn(1, 2, 8, 8)) for _ in range(pieces)]
    pooled = g.op("avg_pool2d", g.op("cat", given, 1), [2, 2], [2, 2])
    fragment, _ = run_sketch(g, [pooled])
    assert kernel_count(fragment) == 1 + (pieces > 2)


def test_column_reduction_does_not_swallow_a_tensor_that_others_read() -> None:
    g = Sketch()
    x, y = g.input(torch.randn(16, 8)), g.input(torch.randn(16, 8))
    s = g.op("mul", x, y)
    check(g, [s, g.op("sum", s, [0])], 2)
    g = Sketch()
    x, y = g.input(torch.randn(16, 8)), g.input(torch.randn(16, 8))
    check(g, [g.op("sum", g.op("mul", x, y), [0])], 1)


def channels_last() -> torch.Tensor:
    """Images whose 8192 pixels are rows of 32 columns: each pass over them is a kernel."""
    return torch.randn(2, 32, 64, 64).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("stored", [False, True])
def test_a_tensor_that_others_read_is_stored_before_the_passes_over_channels_last_images(stored: bool) -> None:
    """The gradient of a batch norm of a residual's summed gradients: each pass would read what the sum reads."""
    g = Sketch()
    x, y, image = (g.input(channels_last()) for _ in range(3))
    total = g.op("add", x, y)
    found = g.op("sub", image, g.op("mean", total, [0, 2, 3], True))
    spread = g.op("mean", g.op("mul", found, total), [0, 2, 3], True)
    outputs = [g.op("mul", total, spread), *([total] if stored else [])]
    fragment, got = run_sketch(g, outputs, by_llvm)
    for ours, eager in zip(got, g.expected(outputs), strict=True):
        torch.testing.assert_close(ours, eager)
    launches = [i for i in fragment.instructions if isinstance(i, Launch)]
    summing = [i for i in launches if {Ref(x.id), Ref(y.id)} <= set(i.inputs)]
    assert (summing[0].outs == (total.id,)) is stored
    assert len(summing) == (1 if stored else 3)


@pytest.mark.parametrize(("again", "names"), [(16, ["add_sum_mul"]), (32, ["add", "sum_mul"])])
def test_a_device_that_holds_no_columns_stores_first_what_its_passes_read(again: int, names: list[str]) -> None:
    g = Sketch()
    x, y = g.input(channels_last()), g.input(channels_last())
    total = g.op("add", x, y)
    outputs = [g.op("mul", total, g.op("sum", total, [0, 2, 3], True)), total]
    policy = DevicePolicy(splits=Splits(few_columns=16, passes_again=again))
    fragment, got = run_sketch(g, outputs, by_llvm, policy)
    torch.testing.assert_close(got, list(g.expected(outputs)), rtol=1e-4, atol=1e-3)
    assert [fragment.kernels[i.kernel].name for i in fragment.instructions if isinstance(i, Launch)] == names


def test_an_operand_that_passes_may_compute_again_brings_no_other_along() -> None:
    g = Sketch()
    x, y, image = (g.input(channels_last()) for _ in range(3))
    weight, mean, scale = (g.input(torch.rand(32)) for _ in range(3))
    total, doubled = g.op("add", x, y), g.op("mul", image, 2.0)
    g.op("batch_norm_backward", total, doubled, weight, None, None, mean, scale, True, 1e-5, [True, True, True])
    launches = [i for i in run_sketch(g, [g.ops[-1].outs[0], total], by_llvm)[0].instructions if isinstance(i, Launch)]
    assert [i.outs for i in launches if Ref(x.id) in i.inputs] == [(total.id,)]
    assert sum(Ref(image.id) in i.inputs for i in launches) == 2


def test_what_costs_more_than_memory_is_computed_once_before_passes() -> None:
    g = Sketch()
    x = g.input(torch.randn(2, 32, 64, 64).to(memory_format=torch.channels_last))
    pooled, at = torch.nn.functional.max_pool2d(g.tensors[x.id], 3, 2, 1, return_indices=True)
    grad, places = g.input(torch.randn_like(pooled)), g.input(at)
    weight, mean, scale = (g.input(torch.rand(32)) for _ in range(3))
    inner = g.op("max_pool2d_backward", grad, x, [3, 3], [2, 2], [1, 1], [1, 1], False, places)
    g.op("batch_norm_backward", inner, x, weight, None, None, mean, scale, True, 1e-5, [True, True, True])
    fragment, _ = run_sketch(g, list(g.ops[-1].outs), by_llvm, DevicePolicy())
    assert [i.outs for i in fragment.instructions if isinstance(i, Launch) and Ref(grad.id) in i.inputs] == [(inner.id,)]


def test_scatter_reads_its_messages_where_they_are_made() -> None:
    g = Sketch()
    h, source, target = g.input(torch.randn(5, 4)), torch.tensor([0, 4, 4, 2]), torch.tensor([1, 1, 3, 0])
    messages = g.op("mul", g.op("index_select", h, 0, g.input(source)), 2.0)
    out = g.op("index_add", g.op("full", [5, 4], 0.0), 0, g.input(target), messages)
    launches = check(g, [out], 2)
    assert launches[1].updates == ((0, launches[1].inputs.index(Ref(launches[0].outs[0]))),)


def test_a_large_copy_alone_is_eagers() -> None:
    for size, kernels in ((8, 1), (256, 0)):
        g = Sketch("forward")
        x = g.input(torch.randn(size, 2, 64))
        check(g, [g.op("clone", g.op("transpose", x, 0, 1), memory_format=torch.contiguous_format)], kernels)


ANY = DevicePolicy()


@pytest.mark.parametrize(("policy", "kernels"), [(CPU, 0), (ANY, 1)])
def test_a_large_copy_alone_is_a_kernel_where_nobody_found_eager_faster(policy: DevicePolicy, kernels: int) -> None:
    g = Sketch()
    x = g.input(torch.randn(256, 2, 64))
    y = g.op("clone", g.op("transpose", x, 0, 1), memory_format=torch.contiguous_format)
    fragment = fuse(g.region([y]), Context({}, Device("cpu", "test")), policy=policy)
    assert len(fragment.kernels) == kernels
    assert ("eager: faster for copies" in fragment.notes.values()) == (kernels == 0)


@pytest.mark.parametrize(("n", "dim", "kernels"), [(2, -1, 1), (6, 2, 1), (7, -1, 0), (2, 1, 0)])
def test_few_tensors_are_stacked_along_the_last_dimension_by_a_kernel(n: int, dim: int, kernels: int) -> None:
    g = Sketch()
    y = g.op("stack", [g.input(torch.randn(128, 256)) for _ in range(n)], dim)
    assert len(fuse(g.region([y]), Context({}, Device("cpu", "test")), policy=CPU).kernels) == kernels


@pytest.mark.parametrize(("rotated", "kernels"), [(True, 1), (False, 3)])
def test_parts_of_rotated_pairs_are_computed_where_they_are_zipped(rotated: bool, kernels: int) -> None:
    """Both read the same pairs; parts of other tensors would be read beside each other's."""
    g = Sketch()
    x, y, z = (g.input(torch.randn(128, 64, 2)) for _ in range(3))
    a, b = (g.op("select", x, -1, k) for k in (0, 1))
    c, d = (a, b) if rotated else (g.op("select", y, -1, 0), g.op("select", z, -1, 0))
    made = g.op("stack", [g.op("sub", g.op("exp", a), b), g.op("add", c, g.op("exp", d))], -1)
    assert len(fuse(g.region([made]), Context({}, Device("cpu", "test")), policy=CPU).kernels) == kernels


def test_where_eager_is_faster_a_kernel_is_possible() -> None:
    """A condition on any other op would have no effect."""
    assert all(name in RULES and row.source for row in CONDITIONS for name in row.ops)
    assert len({row.name for row in CONDITIONS}) == len(CONDITIONS)


@pytest.mark.parametrize(("policy", "layout", "kernels"), [
    (CPU, torch.contiguous_format, 0), (CPU, torch.channels_last, 1), (ANY, torch.contiguous_format, 1),
])  # fmt: skip
def test_planes_alone_are_resized_by_eager_on_a_cpu(policy: DevicePolicy, layout: torch.memory_format, kernels: int) -> None:
    """Along rows a kernel gathers element by element; along channels it uses vectors."""
    g = Sketch()
    x = g.input(torch.randn(2, 8, 32, 32).to(memory_format=layout))
    y = g.op("upsample_bilinear2d", x, [64, 72], False)
    assert len(fuse(g.region([y]), Context({}, Device("cpu", "test")), policy=policy).kernels) == kernels


@pytest.mark.parametrize(("policy", "dtype", "then", "kernels"), [
    (CPU, torch.float32, False, 0), (CPU, torch.float32, True, 1), (CPU, torch.bfloat16, False, 1), (ANY, torch.float32, False, 1),
])  # fmt: skip
def test_places_of_fp32_images_alone_are_eagers_on_a_cpu(
    policy: DevicePolicy, dtype: torch.dtype, then: bool, kernels: int
) -> None:
    g = Sketch()
    x, grid = g.input(torch.randn(2, 8, 32, 32, dtype=dtype)), g.input(torch.rand(2, 64, 64, 2, dtype=dtype))
    y = g.op("grid_sampler_2d", x, grid, 0, 0, False)
    made = g.op("exp", y) if then else y
    assert len(fuse(g.region([made]), Context({}, Device("cpu", "test")), policy=policy).kernels) == kernels


@pytest.mark.parametrize(("policy", "layout", "kernels"), [
    (CPU, torch.contiguous_format, 1), (CPU, torch.channels_last, 0), (ANY, torch.channels_last, 1),
])  # fmt: skip
def test_groups_of_channels_that_lie_apart_are_eagers_on_a_cpu(
    policy: DevicePolicy, layout: torch.memory_format, kernels: int
) -> None:
    g = Sketch()
    x, w, b = (g.input(t) for t in (torch.randn(2, 8, 6, 6).to(memory_format=layout), torch.randn(8), torch.randn(8)))
    y = g.op("group_norm", x, w, b, 2, 8, 36, 4, 1e-5)
    region = g.region([y[0] if isinstance(y, tuple) else y])
    launches = fuse(region, Context({}, Device("cpu", "test")), policy=policy).kernels
    assert min(len(launches), 1) == kernels


def test_layer_norm_backward_is_a_row_kernel_and_a_column_kernel() -> None:
    g = Sketch()
    x, w, b, grad = (g.input(torch.randn(*s)) for s in ((6, 8), (8,), (8,), (6, 8)))
    _, mean, rstd = (g.input(t) for t in torch.native_layer_norm(g.tensors[x.id], [8], None, None, 1e-5))
    g.op("layer_norm_backward", grad, x, [8], mean, rstd, w, b, [True, True, True])
    rows, columns = check(g, list(g.ops[-1].outs), 2)
    assert (len(rows.outs), len(columns.outs)) == (1, 2)


def test_equal_layers_build_one_kernel() -> None:
    g = Sketch()
    x, w = g.input(torch.randn(4, 8)), g.input(torch.randn(8, 8))
    for _ in range(12):
        x = g.op("mm", g.op("gelu", g.op("add", x, 1.0)), w)
    memo = KernelMemo()
    fragment, _ = fused(g.region([x]), memo)
    assert kernel_count(fragment) == 12
    assert len(fragment.kernels) == 1 and len(memo) == 1


def test_minus_zero_and_zero_are_two_kernels() -> None:
    memo = KernelMemo()
    for value in (0.0, -0.0, 1, True):
        g = Sketch()
        fused(g.region([g.op("mul", g.input(torch.randn(3)), value)]), memo)
    assert len(memo) == 4


@pytest.mark.parametrize("loader", list(LOADERS))
def test_an_index_out_of_bounds_raises(loader: str) -> None:
    g = Sketch()
    table, index = g.input(torch.randn(4, 3)), g.input(torch.tensor([0, 1]))
    out = g.op("embedding", table, index)
    g.tensors[index.id] = torch.tensor([0, 9])
    with pytest.raises(IndexError):
        run_sketch(g, [out], LOADERS[loader])


def test_a_long_sum_runs_in_parts_and_then_over_the_parts() -> None:
    g = Sketch()
    x = g.input(torch.randn(1 << 16))
    first, second = check(g, [g.op("mean", g.op("mul", x, x), [0])], 2)
    assert second.inputs == (Ref(first.outs[0]),)


def test_what_lies_between_the_parts_is_on_their_device() -> None:
    g = Sketch()
    x = g.input(torch.empty(1 << 20, device="meta"))
    fragment, specs = fused(g.region([g.op("mean", x, [0])]))
    first, _ = fragment.instructions
    assert {specs[o].device for o in first.outs} == {"meta"}


def test_long_reductions_of_one_tensor_share_their_kernels() -> None:
    g = Sketch()
    x = g.input(torch.randint(-8, 8, (3, 1 << 15)).float())  # sums are exact in any order
    check(g, [g.op("amax", x, [1]), g.op("sum", x, [1])], 2)


def test_a_stored_tensor_and_its_long_sum_share_a_kernel() -> None:
    """What a loss saves for its gradient is stored by the kernel that adds the loss up."""
    g = Sketch()
    x, target = g.input(torch.randn(1 << 16)), g.input(torch.randn(1 << 16))
    margin = g.op("rsub", g.op("mul", x, target), 1)
    loss = g.op("mean", g.op("clamp", margin, 0), [0])
    first, _ = check(g, [loss, g.op("ge_scalar", margin, 0)], 2)
    assert len(first.outs) == 2, "the flags and the sums of parts, not the margins"


def test_a_long_norm_stores_what_it_adds_up() -> None:
    g = Sketch()
    x = g.input(torch.randn(2, 1 << 16))
    y = g.op("exp", g.op("mul", x, 0.1))
    check(g, [y, g.op("sum", g.op("mul", y, y), [1])], 2)


def test_what_needs_a_long_sum_is_a_kernel_of_its_own() -> None:
    g = Sketch()
    x = g.input(torch.rand(1 << 16))
    y = g.op("exp", x)
    check(g, [y, g.op("div", y, g.op("sum", y, [0]))], 3)


def test_a_stored_tensor_and_the_position_of_its_maximum_are_separate_kernels() -> None:
    g = Sketch()
    x = g.input(torch.randn(1 << 16))
    y = g.op("exp", x)
    check(g, [y, g.op("argmax", y, 0)], 3)


def test_a_copy_into_another_order_is_a_kernel_and_a_plain_one_is_not() -> None:
    g = Sketch()
    x = g.input(torch.randn(256, 256))
    check(g, [g.op("clone", g.op("permute", x, [1, 0]), memory_format=torch.contiguous_format)], 1)
    g = Sketch()
    x = g.input(torch.randn(256, 256))
    check(g, [g.op("clone", x)], 0)


def test_any_number_of_groups_may_turn_out_to_be_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, rounds = fuser._Planner._kernel, 0

    def refusing(self: fuser._Planner, group: Group, stored: set[int]) -> Built:
        if len(group.units) > 1:
            raise NotAligned("by hand")
        return plain(self, group, stored)

    def counted(self: fuser._Planner) -> fuser.Fused:
        nonlocal rounds
        rounds += 1
        return run(self)

    run = fuser._Planner.run
    monkeypatch.setattr(fuser._Planner, "_kernel", refusing)
    monkeypatch.setattr(fuser._Planner, "run", counted)
    g = Sketch()
    negated = [g.op("neg", g.input(torch.randn(4, k))) for k in range(1, 71)]
    outs = [*negated, *(g.op("exp", x) for x in negated)]
    fragment, got = run_sketch(g, outs, LOADERS["interpreter"])
    assert kernel_count(fragment) == 140 and rounds == 2
    torch.testing.assert_close(got, g.expected(outs))


def test_an_op_of_several_results_that_is_no_kernel_is_eagers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(self: fuser._Planner, group: Group, stored: set[int]) -> Built:
        raise NotAligned("by hand")

    monkeypatch.setattr(fuser._Planner, "_kernel", refusing)
    g = Sketch()
    g.op("var_mean", g.input(torch.randn(6, 16)), [1], correction=0, keepdim=True)
    fragment, got = run_sketch(g, [*g.ops[-1].outs], LOADERS["interpreter"])
    assert kernel_count(fragment) == 0
    torch.testing.assert_close(got, g.expected([*g.ops[-1].outs]))


@pytest.mark.usefixtures("fresh_dynamo")
def test_an_op_that_joins_a_group_of_symbolic_sizes_does_not_look_at_all_of_its_sizes() -> None:
    """Groups grow op by op, and a loop over time steps makes groups of hundreds."""

    def work_of(steps: int) -> int:
        def chain(x: torch.Tensor) -> torch.Tensor:
            for k in range(steps):
                x = torch.sin(x) * k
            return x

        torch.compiler.reset()
        events = 0

        def counted(values: Sequence[Value]) -> dict[Atom, int]:
            nonlocal events
            events += len(values)
            return size_hints(values)

        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(group, "size_hints", counted)
            torch.compile(chain, backend="x86_onednn", dynamic=True, options={"cache": False})(torch.randn(5, 6))
        return events

    assert work_of(32) <= 2 * work_of(16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_padded_is_computed_where_its_zeros_are_written(dtype: torch.dtype) -> None:
    """Also if it reads more than it makes, in a chain behind a view, or costs much: nobody else reads it."""
    g = Sketch()
    x, y = g.input(torch.randn(4, 3, 7)), g.input(torch.randn(4, 3, 7))
    made = g.op("cast", g.op("gelu", g.op("add", x, y)), dtype)
    rows = g.op("view", made, [12, 7])
    check(g, [g.op("constant_pad_nd", rows, [0, 1], 0)], 1)


@pytest.mark.parametrize("why", ["a norm makes it", "two read it", "it leaves"])
def test_what_is_padded_and_has_another_place_stays_there(why: str) -> None:
    """A result of a row op is rounded in that op's kernel, not stored wide for the one that pads."""
    g = Sketch()
    x = g.input(torch.randn(12, 7))
    made = g.op("add", x, g.input(torch.randn(12, 7)))
    made = g.op("softmax", made, -1, False) if why == "a norm makes it" else made
    narrow = g.op("cast", made, torch.bfloat16)
    padded = g.op("constant_pad_nd", narrow, [0, 1], 0)
    others = {"two read it": [g.op("cumsum", narrow, 0)], "it leaves": [narrow]}.get(why, [])
    launches = check(g, [padded, *others], 3 if why == "two read it" else 2)
    assert launches[0].outs == (narrow.id,)

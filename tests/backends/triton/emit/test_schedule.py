"""How kernels are cut into programs: a formula, checked without a GPU."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch

from fusewright.toolkit.ir import Builder, Kernel
from fusewright_triton import target
from fusewright_triton.emit.emitter import emit
from fusewright_triton.emit.schedule import Config, Tile, choose
from fusewright_triton.runtime import SimulatedLauncher
from tests.backends.triton.kernels import simulate

H100 = target.NVIDIA["sm_90"]


def centered(batch: int, rows: int, length: int, dtype: str = "bf16", *, transposed: bool) -> Kernel:
    """Rows of x + y less their sums; y's rows are contiguous or its columns."""
    b = Builder("centered", p=[batch, rows], r=[length])
    x, y, out = b.input("x", dtype), b.input("y", dtype), b.output("out", dtype)
    p, i, r = b.axes
    matrix = p * (rows * length)
    other = matrix + (i + r * rows if transposed else i * length + r)
    terms = b.load(x, matrix + i * length + r).to("f32") + b.load(y, other).to("f32")
    b.store(out, matrix + i * length + r, (terms - b.reduce("sum", terms)).to(dtype))
    return b.build()


@pytest.mark.parametrize(("dtype", "length", "rows"), [("bf16", 512, 16), ("f32", 512, 8), ("bf16", 2048, 4)])
def test_rows_beside_each_other_share_the_sectors_of_a_transposed_operand(dtype: str, length: int, rows: int) -> None:
    """One row at a time took 170 us on an H200 where 16 take 58: 8x12x512x512 in bf16."""
    config = choose(centered(96, 512, length, dtype, transposed=True), H100)
    assert config.tiles == (Tile((1,), rows),) and config.persistent and config.row == length


def mixed(rows: int, length: int) -> Kernel:
    """Long rows of x with neighbours of rows of y, summed and stored as x lies: a bias' gradient of images in two layouts."""
    b = Builder("mixed", p=[rows], r=[length])
    x, y, out, total = b.input("x", "f32"), b.input("y", "bool"), b.output("out", "f32"), b.output("total", "f32")
    i, r = b.axes
    kept = b.where(b.load(y, r * rows + i), b.load(x, i * length + r), b.const(0, "f32"))
    b.store(out, i * length + r, kept)
    b.store(total, i, b.reduce("sum", kept))
    return b.build()


def test_long_rows_beside_each_other_share_the_sectors_of_a_transposed_operand() -> None:
    """Row by row the gradient took 6.9 ms on an H200, so 0.7: 128 channels of 128x126x126, whose flags are channels-last."""
    config = choose(mixed(128, 1 << 21), H100)
    assert config.tiles == (Tile((0,), 32),) and config.row == 64 and config.split == 128
    assert choose(mixed(2, 1 << 21), H100).tiles == (Tile((0,), 2),)


def test_a_row_of_blocks_of_columns_is_split_for_all_multiprocessors() -> None:
    b = Builder("columns", p=[64], r=[1 << 23])
    x, out = b.input("x", "bf16"), b.output("out", "f32")
    i, r = b.axes
    b.store(out, i, b.reduce("sum", b.load(x, r * 64 + i).to("f32")))
    assert choose(b.build(), H100).split == 512


@pytest.mark.parametrize(("rows", "length"), [(48, 40007), (2, 200000)])
def test_long_rows_beside_each_other_are_right(rows: int, length: int) -> None:
    kernel = mixed(rows, length)
    assert choose(kernel, H100).tiles[0].block > 1
    x, y, out, total = torch.randn(rows, length), torch.rand(length, rows) > 0.5, torch.empty(rows, length), torch.empty(rows)
    simulate(kernel, [x, y, out, total], target=H100)
    assert torch.equal(out, x * y.mT)
    torch.testing.assert_close(total, out.double().sum(-1).float(), rtol=1e-5, atol=1e-2)


def test_a_wide_operand_does_not_narrow_the_sectors_of_a_transposed_one() -> None:
    """DeBERTa's scores: one tensor is read at positions of eight bytes, the other, of two bytes, across rows."""
    b = Builder("scores", p=[96, 512], r=[512])
    x, y, at, out = b.input("x", "bf16"), b.input("y", "bf16"), b.input("at", "i64"), b.output("out", "bf16")
    p, i, r = b.axes
    found = b.indirect(b.bound(b.load(at, i * 512 + r), 512))
    terms = b.load(x, p * (512 * 512) + i * 512 + found).to("f32") + b.load(y, p * (512 * 512) + r * 512 + i).to("f32")
    b.store(out, p * (512 * 512) + i * 512 + r, (terms - b.reduce("max", terms)).to("bf16"))
    kernel = b.build()
    assert choose(kernel, H100).tiles == (Tile((1,), 16),)
    assert choose(kernel, target.AMD["gfx942"]).tiles == (Tile((1,), 8),), "64 KiB of shared memory, half of it for positions"


def gathered(batch: int, rows: int) -> Kernel:
    """Softmax of DeBERTa's scores: x, y at positions along a row and z at positions across rows, behind a mask."""
    b = Builder("gathered", p=[batch, rows], r=[rows])
    x, y, z, mask = b.input("x", "bf16"), b.input("y", "bf16"), b.input("z", "bf16"), b.input("mask", "f32")
    down, across, out = b.input("down", "i64"), b.input("across", "i64"), b.output("out", "bf16")
    p, i, r = b.axes
    matrix = p * (rows * rows)
    along = b.indirect(b.bound(b.load(down, i * rows + r), rows))
    over = b.indirect(b.bound(b.load(across, r * rows + i), rows))
    terms = b.load(x, matrix + i * rows + r).to("f32") + b.load(y, matrix + i * rows + along).to("f32")
    terms = terms + b.load(z, matrix + r * rows + over).to("f32")
    terms = b.where(b.load(mask, p * rows + r) > 0.0, terms, -1e9)
    e = b.op("exp", terms - b.reduce("max", terms))
    b.store(out, matrix + i * rows + r, (e / b.reduce("sum", e)).to("bf16"))
    return b.build()


def test_rows_that_gather_across_each_other_are_as_many_as_registers_hold() -> None:
    config = choose(gathered(96, 512), H100)
    assert config.tiles == (Tile((1,), 8),) and config.warps == 4, "10 words of each element, 32 elements a lane"
    assert choose(gathered(96, 64), H100).tiles == (Tile((0, 1), 8),), "the first cache holds what is read across rows"


def test_rows_that_gather_across_each_other_are_right() -> None:
    kernel = gathered(4, 256)
    assert choose(kernel, H100).tiles[0] == Tile((1,), 2)
    x, y, z = (torch.randn(4, 256, 256).bfloat16() for _ in range(3))
    i = torch.arange(256)
    down = (i[:, None] - i + 128).clamp(0, 255)
    across, mask = down.mT.contiguous(), (torch.rand(4, 256) > 0.1).float()
    out = torch.empty_like(x)
    simulate(kernel, [x, y, z, mask, down, across, out], target=H100)
    terms = x.float() + y.float().gather(2, down.expand(4, -1, -1)) + z.float().gather(2, across.expand(4, -1, -1)).mT
    wanted = terms.masked_fill(mask[:, None] == 0, -1e9).softmax(-1)
    torch.testing.assert_close(out.float(), wanted, rtol=1e-2, atol=1e-4)


def test_rows_stay_apart_where_nothing_is_transposed_or_few_programs_would_be_left() -> None:
    for kernel in (
        centered(96, 512, 512, transposed=False),
        centered(1, 256, 512, transposed=True),
        centered(96, 512, 16384, transposed=True),
    ):
        assert [t.block for t in choose(kernel, H100).tiles] == [1]


def test_rows_beside_each_other_are_right() -> None:
    kernel = centered(24, 40, 300, "f32", transposed=True)
    assert choose(kernel, H100).tiles[0].block > 1
    x, y, out = torch.randn(24, 40, 300), torch.randn(24, 300, 40), torch.empty(24, 40, 300)
    simulate(kernel, [x, y, out], target=H100)
    terms = x + y.mT
    torch.testing.assert_close(out, terms - terms.sum(-1, keepdim=True))


def dots(points: int, length: int, gather: bool) -> Kernel:
    """Products of many rows with one row that all share, or with rows at positions."""
    b = Builder("dots", p=[points], r=[length])
    x, y, at, out = b.input("x", "bf16"), b.input("y", "bf16"), b.input("at", "i64"), b.output("out", "f32")
    i, r = b.axes
    other = b.indirect(b.bound(b.load(at, i), 40_000)) * length + r if gather else r
    terms = b.load(x, i * length + r).to("f32") * b.load(y, other).to("f32")
    b.store(out, i, b.reduce("sum", terms))
    return b.build()


def repeated(batch: int, points: int, near: int, channels: int) -> Kernel:
    """Points, whose channels lie apart, over their neighbours."""
    b = Builder("repeated", p=[batch, points, near, channels])
    x, y, out = b.input("x", "bf16"), b.input("y", "bf16"), b.output("out", "bf16")
    n, p, k, c = b.axes
    flat = ((n * points + p) * near + k) * channels + c
    own = b.load(x, n * (channels * points) + c * points + p).to("f32")
    b.store(out, flat, (b.load(y, flat).to("f32") - own).to("bf16"))
    return b.build()


def test_an_operand_that_lies_across_and_is_repeated_is_read_in_tiles() -> None:
    """It is a twentieth of what the kernel moves, and one sector for each element in a block of neighbours along the channels."""
    assert [t.axes for t in choose(repeated(16, 1024, 20, 256), H100).tiles] == [(1,), (3,)]
    assert [t.axes for t in choose(repeated(16, 1024, 20, 16), H100).tiles] == [(0, 1, 2, 3)], "a block repeats its sectors"
    assert [t.axes for t in choose(repeated(2, 64, 20, 256), H100).tiles] == [(0, 1, 2, 3)], "in the first cache"
    kernel = repeated(2, 515, 3, 260)
    assert len(choose(kernel, H100).tiles) == 2
    x, y = torch.randn(2, 260, 515).bfloat16(), torch.randn(2, 515, 3, 260).bfloat16()
    out = torch.empty_like(y)
    simulate(kernel, [x, y, out], target=H100)
    torch.testing.assert_close(out, y - x.mT[:, :, None])


@pytest.mark.parametrize("columns", [256, 320, 100])
def test_a_block_of_gathered_rows_has_one_position_for_each_of_its_lines(columns: int) -> None:
    """Positions are eight bytes wide, and narrow no lane: 16 elements of bf16 each."""
    rows = 999
    b = Builder("gather", p=[rows, columns])
    table, at, out = b.input("table", "bf16"), b.input("at", "i64"), b.output("out", "bf16")
    i, j = b.axes
    found = b.indirect(b.bound(b.load(at, i), 50))
    b.store(out, i * columns + j, (b.load(table, found * columns + j).to("f32") * 2.0).to("bf16"))
    kernel = b.build()
    config = choose(kernel, H100)
    assert [t.axes for t in config.tiles] == [(0,), (1,)] and config.tiles[1].block == {256: 256, 320: 128, 100: 128}[columns]
    assert config.tiles[0].block * config.tiles[1].block == config.warps * 32 * 16 or config.warps == 1
    given, index = torch.randn(50, columns).bfloat16(), torch.randint(0, 50, (rows,))
    made = torch.empty(rows, columns, dtype=torch.bfloat16)
    simulate(kernel, [given, index, made], target=H100)
    torch.testing.assert_close(made, given[index] * 2)


@pytest.mark.parametrize(("length", "gather", "rows"), [(64, False, 16), (64, True, 16), (4096, True, 1)])
def test_products_of_short_rows_and_of_gathered_ones_are_no_products_with_a_matrix(
    length: int, gather: bool, rows: int
) -> None:
    """A million rows of 64, one to a program, took 675 us on an H200: scores of edges in graph attention."""
    config = choose(dots(1_120_000, length, gather), H100)
    assert [t.block for t in config.tiles] == [rows] and config.persistent
    assert choose(dots(32_000, 4096, False), H100).tiles == (), "a row of the matrix is a program's"


def experts(slots: int, n: int, k: int) -> Kernel:
    """Each vector times the matrix that its number chooses."""
    b = Builder("experts", p=[slots, n], r=[k])
    x, w, at, out = b.input("x", "bf16"), b.input("w", "bf16"), b.input("at", "i64"), b.output("out", "f32")
    s, i, r = b.axes
    matrix = b.indirect(b.bound(b.load(at, s), 8), n * k)
    product = b.load(w, matrix + i * k + r).to("f32") * b.load(x, s * k + r).to("f32")
    b.store(out, s * n + i, b.reduce("sum", product))
    return b.build()


def test_a_row_of_a_chosen_matrix_is_a_programs() -> None:
    """The experts of a decoded token, each of which another vector is multiplied with."""
    config = choose(experts(2, 11264, 2048), H100)
    assert config == choose(dots(22528, 2048, False), H100) and config.tiles == ()
    x, w, at = torch.randn(2, 768).bfloat16(), torch.randn(8, 5, 768).bfloat16(), torch.tensor([6, 1])
    out = torch.empty(2, 5)
    simulate(experts(2, 5, 768), [x, w, at, out], target=H100)
    torch.testing.assert_close(out, torch.einsum("sk,snk->sn", x.float(), w[at].float()), rtol=1e-4, atol=1e-3)


def running_sum(tokens: int, experts: int) -> Kernel:
    """Each expert's tokens, counted: a scan across contiguous memory."""
    b = Builder("running_sum", p=[experts], r=[tokens])
    x, out = b.input("x", "i64"), b.output("out", "i64")
    i, r = b.axes
    b.store(out, r * experts + i, b.scan("sum", b.load(x, r * experts + i)))
    return b.build()


def test_few_columns_that_cannot_be_shared_have_a_program_each() -> None:
    """Counting the tokens of eight experts in one program took 37 us on an H200."""
    config = choose(running_sum(4096, 8), H100)
    assert [t.block for t in config.tiles] == [1] and config.persistent
    x, out = torch.randint(0, 2, (300, 8)), torch.empty(300, 8, dtype=torch.int64)
    simulate(running_sum(300, 8), [x, out], target=H100)
    assert torch.equal(out, x.cumsum(0))
    assert choose(running_sum(64, 65_536), H100).tiles[0].block > 1


def column_sums(outer: int, row: int, inner: int, dtype: str = "bf16") -> Kernel:
    b = Builder("column_sums", p=[outer, inner], r=[row])
    x, out = b.input("x", dtype), b.output("out", dtype)
    o, i, r = b.axes
    b.store(out, o * inner + i, b.reduce("sum", b.load(x, o * (row * inner) + r * inner + i).to("f32")).to(dtype))
    return b.build()


def test_lanes_hold_much_of_short_columns_where_programs_are_enough() -> None:
    """Sums of 16 in 67 million took 319 us on an H200 where 45 are enough: eight warps shared each sum."""
    for outer, row, inner in ((4096, 16, 1024), (8192, 32, 512), (64, 49, 2048)):
        config = choose(column_sums(outer, row, inner), H100)
        (tile,) = config.tiles
        assert config.persistent and tile.block * config.row == 32 * 32 * config.warps
    assert choose(column_sums(1, 32, 2048), H100).warps == 8, "few programs: more lanes for each column"


def shifted(rows: int, columns: int, tables: int) -> Kernel:
    """Each row times some vectors that all rows share, and its neighbours."""
    b = Builder("shifted", p=[rows, columns])
    x, out = b.input("x", "f32"), b.output("out", "f32")
    i, k = b.axes
    value = b.load(x, i * (columns + 1) + k + 1)
    for t in range(tables):
        value = value * b.load(b.input(f"t{t}", "f32"), k)
    b.store(out, i * columns + k, value)
    return b.build()


@pytest.mark.parametrize(("columns", "tables", "tiles"), [(11, 4, 2), (11, 3, 1), (300, 4, 1)])
def test_short_rows_that_share_vectors_have_lines_of_their_own(columns: int, tables: int, tiles: int) -> None:
    """B-splines of twelve columns and eleven vectors took 218 us on an H200, and 111 so: each lane reads a vector once."""
    rows = 2000
    kernel = shifted(rows, columns, tables)
    assert len(choose(kernel, H100).tiles) == tiles
    x, vectors = torch.randn(rows, columns + 1), [torch.randn(columns) for _ in range(tables)]
    out = torch.empty(rows, columns)
    simulate(kernel, [x, out, *vectors], target=H100)
    torch.testing.assert_close(out, math.prod(vectors, start=x[:, 1:]))


def test_an_address_that_runs_through_a_block_is_the_position_in_it() -> None:
    """Triton does not see that neighbours lie together if the position was divided by 11 and put together again."""
    kernel = shifted(8192, 11, 1)
    assert "tl.store(out_ptr + x," in emit(kernel, choose(kernel, H100)).text


@pytest.mark.parametrize("operands", [1, 2, 3, 5])
def test_warps_are_a_power_of_two_however_many_matrices_a_kernel_passes(operands: int) -> None:
    """Gradients of layer norms of tokens that are the same for a whole batch pass three: Triton refused six warps."""
    b = Builder("passed", p=[27], r=[768 * 16])
    given = [b.input(f"x{k}", "bf16") for k in range(operands)]
    vector, out = b.input("v", "bf16"), b.output("out", "f32")
    i, r = b.axes
    terms = b.load(vector, r).to("f32")
    for x in given:
        terms = terms * b.load(x, i * (768 * 16) + r).to("f32")
    b.store(out, i, b.reduce("sum", terms))
    assert choose(b.build(), H100).warps.bit_count() == 1


def test_few_long_rows_of_products_are_shared() -> None:
    """A hinge loss of 8192 rows of 32768 took 1.6 ms on an H200 with a program for each of its 32 parts, a copy 0.24."""
    b = Builder("hinge", p=[32], r=[256, 32768])
    x, y, out = b.input("x", "f32"), b.input("y", "f32"), b.output("out", "f32")
    p, r0, r1 = b.axes
    b.store(out, p, b.reduce("sum", b.load(x, p * (256 * 32768) + r0 * 32768 + r1) * b.load(y, r1)))
    config = choose(b.build(), H100)
    assert 32 * config.split >= 2 * H100.units


@pytest.mark.parametrize("tiles", [(), (Tile((0,), 4),), (Tile((1,), 8),), (Tile((0, 1), 4),)])
def test_programs_share_rows_whatever_axes_their_tiles_have(tiles: tuple[Tile, ...]) -> None:
    b = Builder("sums", p=[3, 8], r=[1000])
    x, out = b.input("x", "f32"), b.output("out", "f32")
    p, q, r = b.axes
    b.store(out, p * 8 + q, b.reduce("sum", b.load(x, p * 9000 + q * 1000 + r)))
    k, given, got = b.build(), torch.randn(3, 9, 1000), torch.zeros(3, 8)
    SimulatedLauncher(k, emit(k, Config(tiles, 64, False, 4, 4)))([given, got])
    torch.testing.assert_close(got, given[:, :8].sum(2))


def strided(columns: int, step: int, dtype: str = "f32", how: str = "sum", rows: int = 64) -> Kernel:
    """Reduce across memory; every `step`-th column."""
    b = Builder("strided", p=[64, columns], r=[rows])
    x, out = b.input("x", dtype), b.output("out", "i64" if how.startswith("arg") else dtype)
    p, q, r = b.axes
    value = b.load(x, p * (columns * step * rows) + q * step + r * (columns * step)).to("f32")
    found = b.reduce(how, value)
    b.store(out, p * columns + q, found if how.startswith("arg") else found.to(dtype))
    return b.build()


def test_wide_results_do_not_narrow_the_lines_of_a_column() -> None:
    """The positions of a maximum have eight bytes, but one of them leaves for each column."""
    for how in ("argmax", "max"):
        assert choose(strided(4096, 1, how=how), H100).tiles[0].block == 64


@pytest.mark.parametrize(
    ("how", "dtype", "lane"), [("sum", "bf16", 8), ("sum", "f32", 8), ("argmax", "bf16", 4), ("max", "bf16", 8)]
)
def test_lanes_hold_little_of_columns_passed_over_in_steps(how: str, dtype: str, lane: int) -> None:
    config = choose(strided(4095, 1, dtype, how, rows=4096), H100)
    assert config.tiles[0].block * config.row == lane * 32 * config.warps and not config.persistent


def transposed(channels: tuple[int, ...], height: int, width: int, taps: int = 1, dtype: str = "bf16") -> Kernel:
    """Channels-last images to planes, sums of `taps` neighbours times a number of each group of channels."""
    groups, each = channels if len(channels) == 2 else (1, *channels)
    b = Builder("planes", p=[64, groups, each, height, width])
    x, of_group, y = b.input("x", dtype), b.input("of_group", "f32"), b.output("y", dtype)
    n, g, c, h, w = b.axes
    count = groups * each
    at = ((n * height + h) * (width + taps) + w) * count + g * each + c
    value = b.load(x, at).to("f32")
    for k in range(1, taps):
        value = value + b.load(x, at + k * count).to("f32")
    b.store(y, ((n * count + g * each + c) * height + h) * width + w, (value * b.load(of_group, n * groups + g)).to(dtype))
    return b.build()


@pytest.mark.parametrize(
    ("channels", "height", "width", "taps", "axes", "sides"),
    [
        ((64,), 126, 126, 1, [(1,), (3,)], (32, 128)),
        ((64,), 126, 126, 4, [(1,), (3,)], (16, 128)),
        ((8, 4), 126, 126, 1, [(1, 2), (4,)], (32, 128)),
        ((512,), 14, 14, 1, [(1,), (2, 3)], (128, 32)),
        ((16,), 256, 256, 1, [(1,), (3,)], (16, 256)),
    ],
)  # fmt: skip
def test_tiles_are_long_where_axes_are_and_join_axes_that_continue_one_another(
    channels: tuple[int, ...], height: int, width: int, taps: int, axes: list[tuple[int, ...]], sides: tuple[int, int]
) -> None:
    """Four channels of a group are a piece of a sector: a group norm in channels-last images to planes took 1.7 ms on an H200, and
    0.4 in tiles over all channels."""
    config = choose(transposed(channels, height, width, taps), H100)
    assert [t.axes for t in config.tiles] == axes and tuple(t.block for t in config.tiles) == sides
    assert sides[0] * sides[1] == (8 if taps >= 4 else 16) * 32 * config.warps


@pytest.mark.parametrize("channels", [(24,), (6, 4), (3, 5)])
def test_tiles_over_joined_axes_are_right(channels: tuple[int, ...]) -> None:
    kernel = transposed(channels, 6, 9, dtype="f32")
    count = math.prod(channels)
    of_group = torch.randn(64, channels[0] if len(channels) == 2 else 1)
    x, y = torch.randn(64, 6, 10, count), torch.empty(64, count, 6, 9)
    simulate(kernel, [x, of_group, y], target=H100)
    each = of_group.repeat_interleave(count // of_group.shape[1], 1)
    torch.testing.assert_close(y, x[:, :, :9].permute(0, 3, 1, 2) * each[:, :, None, None])


@pytest.mark.parametrize("stride", [1, 2])
def test_lanes_hold_two_points_of_a_window_between_vectors(stride: int) -> None:
    """A maximum over windows of 4x4 of 8x64x512x512 in bf16 took 1.26 ms on an H200 and 0.82 so, with a stride of two (3x3 of
    128x64x112x112) 0.27 and 0.11."""
    b = Builder("window", p=[512, 509 // stride], r=[])
    x, y = b.input("x", "bf16"), b.output("y", "bf16")
    h, w = b.axes
    value = b.load(x, h * 512 + w * stride).to("f32")
    for k in range(1, 4):
        value = value + b.load(x, h * 512 + w * stride + k).to("f32")
    b.store(y, h * (509 // stride) + w, value.to("bf16"))
    config = choose(b.build(), H100)
    assert config.tiles[0].block == 2 * 32 * config.warps


def test_rows_of_windows_that_cover_their_stride_are_rows() -> None:
    """The maximum of means of 16: neighbours are 16 elements apart, and all between them are read."""
    b = Builder("pooled", p=[1024], r=[512])
    x, y = b.input("x", "bf16"), b.output("y", "bf16")
    i, r = b.axes
    value = b.load(x, i * 8192 + r * 16).to("f32")
    for k in range(1, 16):
        value = value + b.load(x, i * 8192 + r * 16 + k).to("f32")
    b.store(y, i, b.reduce("max", value).to("bf16"))
    config = choose(b.build(), H100)
    assert config.persistent and config.row == 512


@pytest.mark.parametrize(("length", "apart"), [(4097, True), (4096, False)])
def test_lanes_of_windows_take_points_apart(length: int, apart: bool) -> None:
    """Rows that are no multiple of a vector, read at four neighbours; without them, the flattened position is aligned."""
    b = Builder("window", p=[64, length], r=[])
    x, y, out = b.input("x", "f32"), b.input("y", "f32"), b.output("out", "f32")
    p, q = b.axes
    total = b.load(y, p * length + q)
    for k in range(4 if apart else 1):
        total = total + b.load(x, p * 8192 + q + k)
    b.store(out, p * length + q, total)
    kernel = b.build()
    assert ("max_contiguous" in emit(kernel, choose(kernel, H100)).text) == apart


def test_flattened_rows_of_odd_length_keep_vectors() -> None:
    b = Builder("bias", p=[64, 4097], r=[])
    x, y, out = b.input("x", "f32"), b.input("y", "f32"), b.output("out", "f32")
    p, q = b.axes
    b.store(out, p * 4097 + q, b.load(x, p * 4097 + q) + b.load(y, q))
    kernel = b.build()
    assert "max_contiguous" not in emit(kernel, choose(kernel, H100)).text


def test_rows_of_windows_with_a_stride_are_rows() -> None:
    """The mean of a pooled image: no operand is contiguous, and neighbours along the row are two elements apart."""
    b = Builder("pooled", p=[128, 16], r=[31, 31])
    x, y, out = b.input("x", "f32"), b.input("y", "f32"), b.output("out", "f32")
    p, c, h, w = b.axes
    at = p * (16 * 3844) + c * 3844 + h * 124 + w * 2
    pooled = b.op("maximum", b.load(x, at), b.load(x, at + 1)) + b.load(y, c)
    b.store(out, p * 16 + c, b.reduce("mean", pooled))
    config = choose(b.build(), H100)
    assert config.persistent and config.row == 1024 and config.tiles[0].block == 1


@pytest.mark.parametrize(("channels", "apart"), [(3, False), (1, True)])
def test_rows_of_several_axes_keep_vectors(channels: int, apart: bool) -> None:
    """Group norms: weights of a channel are the same for neighbours, and rows of an odd number of pixels follow each other."""
    b = Builder("normed", p=[128, 8], r=[3 if apart else 4, 1001])
    x, w, out = b.input("x", "f32"), b.input("w", "f32"), b.output("out", "f32")
    p, g, c, r = b.axes
    row = 3003 if apart else 4004
    at = p * (8 * row) + g * row + c * 1001 + r
    value = b.load(x, at)
    b.store(out, at, (value - b.reduce("mean", value)) * b.load(w, g * channels + c))
    kernel = b.build()
    assert ("max_contiguous" in emit(kernel, choose(kernel, H100)).text) == apart


def test_one_row_of_gathered_elements_is_shared() -> None:
    """The loss at 32768 targets: a sector for each."""
    b = Builder("loss", p=[], r=[32768])
    x, at, out = b.input("x", "f32"), b.input("at", "i64"), b.output("out", "f32")
    (r,) = b.axes
    b.store(out, 0, b.reduce("sum", b.load(x, r * 4096 + b.indirect(b.bound(b.load(at, r), 4096)))))
    config = choose(b.build(), H100)
    assert config.split >= 16 and not config.persistent

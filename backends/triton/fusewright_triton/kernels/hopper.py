"""Products with what follows in the same kernel, for Hopper's matrix units: two groups of warps in turns.

A producer warp loads tiles by the tensor memory accelerator into a ring of shared memory. Two groups of warps have output
tiles of their own and take turns at the matrix units: while one multiplies, the other applies the activation to its sums, stores
them and prepares its next tile. The sums begin with the bias; a residual is fetched meanwhile into the room that results leave
from. This is the order of work that NVIDIA's CUTLASS calls "ping-pong"; Triton's own pipelining leaves the matrix units idle
during an epilogue, a third of the time where K is 768.

Written in Gluon, Triton's language for one architecture; it is not interpreted. `product.py` computes the same in simulation.
"""

# mypy: disable-error-code="no-untyped-def"
# Parameters are Triton tensors, which have no static type.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.language import PropagateNan

# Triton 3.8 renamed both, and 3.9 dropped the old names.
load = getattr(hopper.tma, "async_load", None) or hopper.tma.async_copy_global_to_shared
store = getattr(hopper.tma, "async_store", None) or hopper.tma.async_copy_shared_to_global


ALL = gl.constexpr(PropagateNan.ALL)


@gluon.jit
def reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def gelu(x, BF16: gl.constexpr):
    """x * Phi(x), by max(x, 0) - z Phi(-z) of z = |x|, where log2 Phi(-z), almost a parabola, is a polynomial fitted to the
    relative error of Phi: 4.2e-4 for bf16 (whose rounding is 3.9e-3) up to z = 3.8, 6e-6 for fp16 up to z = 4.5.

    Results beyond, below 3e-4 and 2e-5, decay too fast, by 3e-7 and 4e-10 at most. NaN stays NaN; of -infinity it is about 0.
    `product.gelu` is exact further down, by a division more: instructions here take time from the other group's products.
    """
    z = gl.minimum(gl.abs(x), 16.0)  # Phi is 0 from there on
    if BF16:
        p = 0.0027965168 * z - 0.038218188
        p = p * z - 0.47761067
        p = p * z - 1.1428434
        p = p * z - 1.0005935
    else:
        p = 3.268465e-05 * z - 0.00075134041
        p = p * z + 0.0079555882
        p = p * z - 0.053079814
        p = p * z - 0.45914382
        p = p * z - 1.1510459
        p = p * z - 1.0000071
    return gl.maximum(x, 0.0, propagate_nan=ALL) - z * exp2(p)


@gluon.jit
def activated(x, ACT: gl.constexpr, BF16: gl.constexpr):
    """An activation by its name, of fp32, as in `product.activated`."""
    if ACT == "gelu":
        x = gelu(x, BF16)
    elif ACT == "gelu_tanh":
        x = x * reciprocal(1.0 + exp2(x * (x * x * -0.1029432395800235 - 2.302208198144325)))
    elif ACT == "silu":
        x = x * reciprocal(1.0 + exp2(x * -1.4426950408889634))
    elif ACT == "sigmoid":
        x = reciprocal(1.0 + exp2(x * -1.4426950408889634))
    elif ACT == "relu":
        x = gl.maximum(x, 0.0, propagate_nan=ALL)
    return x


@gluon.jit
def place(tile, M, N, BM: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr):
    """First row and column of a tile, as in `product.place`."""
    across = (N + BN - 1) // BN
    down = (M + BM - 1) // BM
    group = tile // (GROUP * across)
    height = gl.minimum(down - group * GROUP, GROUP)
    inside = tile % (GROUP * across)
    return (group * GROUP + inside % height) * BM, inside // height * BN


@gluon.jit
def halves(x):
    """The left and the right half of the columns."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute(0, 2, 1).split()


@gluon.jit
def first(bias_ptr, column, N, BIAS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):
    """What the sums of a tile begin with."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BN, 16])
    if BIAS:
        columns = column + gl.arange(0, BN, gl.SliceLayout(0, layout))
        bias = gl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(gl.float32)
        return gl.expand_dims(bias, 0).broadcast_to([BM, BN])
    return gl.full([BM, BN], 0.0, gl.float32, layout)


@gluon.jit
def fetch(residual, rooms, there, row, column, WHICH: gl.constexpr, PART: gl.constexpr, PARTS: gl.constexpr):
    """Has a quarter of the residual's tile brought into the room that its results will leave from."""
    W: gl.constexpr = rooms.shape[2]
    room = WHICH * PARTS + PART % PARTS
    hopper.mbarrier.expect(there.index(room), rooms.shape[1] * W * 2)
    load(residual, [row, column + PART * W], there.index(room), rooms.index(room))


@gluon.jit
def write(
    sums, rooms, there, out, row, column, phase,
    WHICH: gl.constexpr, PART: gl.constexpr, PARTS: gl.constexpr, RESIDUAL: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """A quarter of a tile's columns, by one of the rooms of shared memory that each group of warps has."""
    W: gl.constexpr = sums.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, W, 16])
    sums = gl.convert_layout(sums, layout, assert_trivial=True)
    room = rooms.index(WHICH * PARTS + PART % PARTS)
    if RESIDUAL:
        hopper.mbarrier.wait(there.index(WHICH * PARTS + PART), phase)
        sums += room.load(layout).to(gl.float32)
    values = activated(sums, ACT, out.dtype == gl.bfloat16).to(out.dtype)
    if not RESIDUAL:
        hopper.tma.store_wait(PARTS - 1)
    room.store(values)
    hopper.fence_async_shared()
    store(out, [row, column + PART * W], room)


@gluon.jit
def consume(
    x_ring, w_ring, full, empty, turn, rooms, there, out, residual, bias_ptr, M, N, K,
    WHICH: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, ACT: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """One of the two groups: every other tile of this program. `at` counts the ring's steps of both groups."""
    tiles = ((M + BM - 1) // BM) * ((N + BN - 1) // BN)
    steps = (K + BK - 1) // BK
    at = WHICH * steps
    turns = gl.to_tensor(1 - WHICH)
    for tile in range(gl.program_id(0) + WHICH * gl.num_programs(0), tiles, 2 * gl.num_programs(0)):
        row, column = place(tile, M, N, BM, BN, GROUP)
        if RESIDUAL:
            hopper.tma.store_wait(0)  # the rooms are free
            for i in gl.static_range(PARTS):
                fetch(residual, rooms, there, row, column, WHICH, i, PARTS)
        sums = hopper.warpgroup_mma_init(first(bias_ptr, column, N, BIAS, BM, BN))
        # before its turn a barrier of the ring may be two rounds behind, which a parity does not show
        hopper.mbarrier.wait(turn.index(WHICH), turns & 1)
        slot, before, phase = at % STAGES, at % STAGES, (at // STAGES) & 1
        for step in range(steps):
            hopper.mbarrier.wait(full.index(slot), phase)
            w = w_ring.index(slot).permute((1, 0))
            sums = hopper.warpgroup_mma(x_ring.index(slot), w, sums, is_async=True)
            sums = hopper.warpgroup_mma_init(hopper.warpgroup_mma_wait(1, deps=[sums]))
            hopper.mbarrier.arrive(empty.index(before), pred=step > 0)
            before = slot
            phase = gl.where(slot == STAGES - 1, phase ^ 1, phase)  # a remainder would take more instructions
            slot = gl.where(slot == STAGES - 1, 0, slot + 1)
        hopper.mbarrier.arrive(turn.index(1 - WHICH))
        done = hopper.warpgroup_mma_wait(0, deps=[sums])
        hopper.mbarrier.arrive(empty.index(before))
        left, right = halves(done)
        a, b = halves(left)
        c, d = halves(right)
        fetched = (turns + WHICH + 1) & 1
        write(a, rooms, there, out, row, column, fetched, WHICH, 0, PARTS, RESIDUAL, ACT)
        write(b, rooms, there, out, row, column, fetched, WHICH, 1, PARTS, RESIDUAL, ACT)
        write(c, rooms, there, out, row, column, fetched, WHICH, 2, PARTS, RESIDUAL, ACT)
        write(d, rooms, there, out, row, column, fetched, WHICH, 3, PARTS, RESIDUAL, ACT)
        at += 2 * steps
        turns += 1
    hopper.tma.store_wait(0)


@gluon.jit
def produce(
    x, weight, x_ring, w_ring, full, empty, M, N, K,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """One warp: fills the ring in the order in which the groups read it."""
    tiles = ((M + BM - 1) // BM) * ((N + BN - 1) // BN)
    steps = (K + BK - 1) // BK
    at = gl.to_tensor(0)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, column = place(tile, M, N, BM, BN, GROUP)
        for step in range(at, at + steps):
            slot, k = step % STAGES, (step - at) * BK
            hopper.mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
            hopper.mbarrier.expect(full.index(slot), (BM + BN) * BK * 2)
            load(x, [row, k], full.index(slot), x_ring.index(slot))
            load(weight, [column, k], full.index(slot), w_ring.index(slot))
        at += steps


@gluon.jit
def product(
    x, weight, out, residual, bias_ptr, M, N, K,
    BIAS: gl.constexpr, RESIDUAL: gl.constexpr, ACT: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, GROUP: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """activation(x @ weight.T + bias + residual) of x [M, K], weight [N, K], bias [N] and dense residual into dense out [M, N],
    all of one half type; rows of multiples of 16 bytes."""
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, BM, BK], x.layout)
    w_ring = gl.allocate_shared_memory(x.dtype, [STAGES, BN, BK], weight.layout)
    rooms = gl.allocate_shared_memory(x.dtype, [2 * PARTS, BM, BN // 4], out.layout)
    there = gl.allocate_shared_memory(gl.int64, [2 * PARTS, 1], hopper.mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(i), count=1)
        hopper.mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2 * PARTS):
        hopper.mbarrier.init(there.index(i), count=1)
    for i in gl.static_range(2):
        hopper.mbarrier.init(turn.index(i), count=1)
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (x_ring, w_ring, full, empty, turn, rooms, there, out, residual, bias_ptr, M, N, K,
                       0, BIAS, RESIDUAL, ACT, BM, BN, BK, STAGES, PARTS, GROUP)),
            (consume, (x_ring, w_ring, full, empty, turn, rooms, there, out, residual, bias_ptr, M, N, K,
                       1, BIAS, RESIDUAL, ACT, BM, BN, BK, STAGES, PARTS, GROUP)),
            (produce, (x, weight, x_ring, w_ring, full, empty, M, N, K, BM, BN, BK, STAGES, GROUP)),
        ],
        [gl.num_warps(), 1],
        [REGISTERS, 40],
    )  # fmt: skip

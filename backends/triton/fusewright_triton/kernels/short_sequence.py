"""Attention over so few keys that all scores of a query fit into registers: one pass, no running softmax, for Hopper.

A producer warp loads heads of keys and values, and blocks of queries, by the tensor memory accelerator while earlier ones are
computed; two groups of four warps take the blocks in turns, so that one is at the matrix units while the other is at its
exponentials. An image of 14 x 14 patches has 197 keys, which a library's kernel pads to its blocks.

Written in Gluon, Triton's language for one architecture; it is not interpreted. `attention.py` computes the same in simulation.
"""

# mypy: disable-error-code="no-untyped-def"
# Parameters are Triton tensors, which have no static type.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from fusewright_triton.kernels.hopper import exp2, halves, load, store


@gluon.constexpr_function
def layout(N):
    """Of 64 rows of N results of the matrix units, 16 to a warp."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])


@gluon.jit
def scores(q, keys, FIRST: gl.constexpr, N: gl.constexpr):
    """Queries [64, D] by keys FIRST to FIRST + N: started, not awaited."""
    zeros = gl.full([q.shape[0], N], 0.0, gl.float32, layout(N))
    return hopper.warpgroup_mma(q, keys.slice(FIRST, N).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def seen(s, FIRST: gl.constexpr, N: gl.constexpr, KEYS: gl.constexpr):
    """Scores, minus infinity beyond the last key."""
    if FIRST + N > KEYS:
        columns = FIRST + gl.arange(0, N, gl.SliceLayout(0, layout(N)))
        s = gl.where(gl.expand_dims(columns < KEYS, 0), s, float("-inf"))
    return s


@gluon.jit
def narrowed(x, SUM: gl.constexpr):
    """Columns combined in pairs until 16 are left: a chain of additions would wait for each of them."""
    if x.shape[1] > 16:
        left, right = halves(x)
        x = narrowed(left + right if SUM else gl.maximum(left, right), SUM)
    return x


@gluon.jit
def reduced(x, SUM: gl.constexpr):
    """Sums or maxima of rows."""
    x = narrowed(x, SUM)
    x = gl.sum(x, 1) if SUM else gl.max(x, 1)
    return gl.convert_layout(x, gl.SliceLayout(1, layout(16)), assert_trivial=True)


@gluon.jit
def column(x, N: gl.constexpr):
    """A number for every row, for a block of N columns."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, layout(N)), assert_trivial=True), 1)


@gluon.jit
def weighted(s, top, values, acc, factor, FIRST: gl.constexpr, N: gl.constexpr):
    """exp2(s factor - top) by values FIRST to FIRST + N onto acc, started, and the sum of every row's weights."""
    p = exp2(s * factor - column(top, N))
    total = reduced(p, True)
    left = gl.convert_layout(p.to(values.dtype), gl.DotOperandLayout(0, layout(N), 2))
    return hopper.warpgroup_mma(left, values.slice(FIRST, N), acc, use_acc=FIRST > 0, is_async=True), total


@gluon.jit
def head_of(step, count):
    """The last heads first: what wrote them wrote them last, so that they are still in the cache."""
    return count - 1 - (gl.program_id(0) + step * gl.num_programs(0))


@gluon.jit
def steps_of(count):
    """How many heads this program computes."""
    return (count - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def consume(
    q_ring, k_ring, v_ring, rooms, q_full, q_empty, k_full, v_full, empty, out, factor, heads, count,
    WHICH: gl.constexpr, KEYS: gl.constexpr, BLOCKS: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr, N3: gl.constexpr,
    STAGES: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """One of the two groups of warps: every other block of queries of this program's heads."""
    BM: gl.constexpr = q_ring.shape[3]
    BN: gl.constexpr = k_ring.shape[3]
    D: gl.constexpr = q_ring.shape[4]
    turn = gl.to_tensor(0)
    for tile in range(WHICH, steps_of(count) * BLOCKS, 2):
        step, block = tile // BLOCKS, tile % BLOCKS
        stage, phase = step % STAGES, (step // STAGES) & 1
        slot = WHICH * AHEAD + turn % AHEAD
        hopper.mbarrier.wait(k_full.index(stage), phase)
        hopper.mbarrier.wait(q_full.index(slot), (turn // AHEAD) & 1)
        q = q_ring.index(slot).reshape([BM, D])
        k = k_ring.index(stage).reshape([BN, D])
        v = v_ring.index(stage).reshape([BN, D])
        s1 = scores(q, k, 0, N1)
        if N3 > 0:
            s2 = scores(q, k, N1, N2)
            s3 = scores(q, k, N1 + N2, N3)
            s1, s2, s3 = hopper.warpgroup_mma_wait(0, deps=[s1, s2, s3])
        elif N2 > 0:
            s2 = scores(q, k, N1, N2)
            s1, s2 = hopper.warpgroup_mma_wait(0, deps=[s1, s2])
        else:
            s1 = hopper.warpgroup_mma_wait(0, deps=[s1])
        hopper.mbarrier.arrive(q_empty.index(slot))
        # a NaN is left to exp2: it reaches the row's sum whatever the maximum is
        s1 = seen(s1, 0, N1, KEYS)
        top = reduced(s1, False)
        if N2 > 0:
            s2 = seen(s2, N1, N2, KEYS)
            top = gl.maximum(top, reduced(s2, False))
        if N3 > 0:
            s3 = seen(s3, N1 + N2, N3, KEYS)
            top = gl.maximum(top, reduced(s3, False))
        top = top * factor
        hopper.mbarrier.wait(v_full.index(stage), phase)
        acc = gl.full([BM, D], 0.0, gl.float32, layout(D))
        acc, total = weighted(s1, top, v, acc, factor, 0, N1)
        if N2 > 0:
            acc, more = weighted(s2, top, v, acc, factor, N1, N2)
            total += more
        if N3 > 0:
            acc, more = weighted(s3, top, v, acc, factor, N1 + N2, N3)
            total += more
        done = hopper.warpgroup_mma_wait(0, deps=[acc])
        hopper.mbarrier.arrive(empty.index(stage))
        n = head_of(step, count)
        room = rooms.index(WHICH)
        hopper.tma.store_wait(0)  # the room is free
        room.reshape([BM, D]).store((done * column(1.0 / total, D)).to(v.dtype))
        hopper.fence_async_shared()
        store(out, [n // heads, n % heads, block * BM, 0], room)
        turn += 1
    hopper.tma.store_wait(0)


@gluon.jit
def produce(
    q, k, v, q_ring, k_ring, v_ring, q_full, q_empty, k_full, v_full, empty, heads, group, count,
    BLOCKS: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """One warp: heads, and blocks of their queries, in the order in which the groups read them."""
    BM: gl.constexpr = q_ring.shape[3]
    BN: gl.constexpr = k_ring.shape[3]
    D: gl.constexpr = q_ring.shape[4]
    tile = gl.to_tensor(0)
    for step in range(steps_of(count)):
        n = head_of(step, count)
        b, h = n // heads, n % heads
        stage = step % STAGES
        hopper.mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        hopper.mbarrier.expect(k_full.index(stage), BN * D * 2)
        load(k, [b, h // group, 0, 0], k_full.index(stage), k_ring.index(stage))
        for block in range(BLOCKS):
            turn = tile // 2
            slot = tile % 2 * AHEAD + turn % AHEAD
            hopper.mbarrier.wait(q_empty.index(slot), ((turn // AHEAD) & 1) ^ 1)
            hopper.mbarrier.expect(q_full.index(slot), BM * D * 2)
            load(q, [b, h, block * BM, 0], q_full.index(slot), q_ring.index(slot))
            if block == 0:
                hopper.mbarrier.expect(v_full.index(stage), BN * D * 2)
                load(v, [b, h // group, 0, 0], v_full.index(stage), v_ring.index(stage))
            tile += 1


@gluon.jit
def attention(
    q, k, v, out, factor, heads, group, count,
    KEYS: gl.constexpr, BLOCKS: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr, N3: gl.constexpr,
    STAGES: gl.constexpr, AHEAD: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """softmax(q k^T scale) v of q [B, H, Q, D], k and v [B, H / group, KEYS, D] into out [B, H, Q, D], all of one half type.

    BLOCKS of 64 make Q; N1 + N2 + N3 are KEYS or more, each a power of two from 16 on or 0; `factor` is scale log2(e),
    positive; `count` is B H. Descriptors give zeros beyond D and KEYS. At least two STAGES: a group sees every other head, and
    must not miss a phase of a barrier.
    """
    q_ring = gl.allocate_shared_memory(q.dtype, [2 * AHEAD, 1, 1, q.block_shape[2], q.block_shape[3]], q.layout)
    k_ring = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, k.block_shape[2], k.block_shape[3]], k.layout)
    v_ring = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, v.block_shape[2], v.block_shape[3]], v.layout)
    rooms = gl.allocate_shared_memory(q.dtype, [2, 1, 1, out.block_shape[2], out.block_shape[3]], out.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2 * AHEAD, 1], hopper.mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2 * AHEAD, 1], hopper.mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * AHEAD):
        hopper.mbarrier.init(q_full.index(i), count=1)
        hopper.mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(k_full.index(i), count=1)
        hopper.mbarrier.init(v_full.index(i), count=1)
        hopper.mbarrier.init(empty.index(i), count=BLOCKS)
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (q_ring, k_ring, v_ring, rooms, q_full, q_empty, k_full, v_full, empty, out, factor, heads, count,
                       0, KEYS, BLOCKS, N1, N2, N3, STAGES, AHEAD)),
            (consume, (q_ring, k_ring, v_ring, rooms, q_full, q_empty, k_full, v_full, empty, out, factor, heads, count,
                       1, KEYS, BLOCKS, N1, N2, N3, STAGES, AHEAD)),
            (produce, (q, k, v, q_ring, k_ring, v_ring, q_full, q_empty, k_full, v_full, empty, heads, group, count,
                       BLOCKS, STAGES, AHEAD)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip

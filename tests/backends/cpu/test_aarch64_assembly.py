"""Features of the assembly of kernels for 64-bit Arm, checked for each core on any machine."""

from __future__ import annotations

import re

import pytest

from fusewright.toolkit.ir import Builder, Kernel
from fusewright_cpu.kernels.by_hand import Attention, Gemv
from fusewright_cpu.run.codegen import kernels_to_text, to_object
from fusewright_cpu.run.sources import hash_of
from fusewright_cpu.target import ARM_CORES, CpuTarget, aarch64_target, target_machine
from tests.backends.cpu.assembly import VECTOR, has, instructions, loops
from tests.backends.cpu.test_targets import transposed
from tests.kernels import add_gelu, column_sum, cumsum, layer_norm, softmax

CORES = ["neoverse-n1", "neoverse-v1", "neoverse-v2", "apple-m2"]


def elf(core: str) -> CpuTarget:
    """A core under Linux, since Apple's assembler syntax differs."""
    return aarch64_target(core, "aarch64-unknown-linux-gnu")


def row_sum(rows: int, cols: int, dtype: str = "f32") -> Kernel:
    b = Builder("row_sum", p=[rows], r=[cols])
    x, out = b.input("x", dtype), b.output("out", "f32")
    i, j = b.axes
    b.store(out, i, b.reduce("sum", b.load(x, i * cols + j).to("f32")))
    return b.build()


def sigmoid_tanh(n: int, dtype: str = "f32") -> Kernel:
    b = Builder("sigmoid_tanh", p=[n])
    x, out = b.input("x", dtype), b.output("out", dtype)
    (i,) = b.axes
    v = b.load(x, i).to("f32")
    b.store(out, i, (b.op("sigmoid", v) * b.op("tanh", v) + b.op("log", v)).to(dtype))
    return b.build()


KERNELS = {
    "gelu": lambda dtype: add_gelu(1003, dtype),
    "norm": lambda dtype: layer_norm(5, 1003, dtype),
    "softmax": lambda dtype: softmax(5, 1003, dtype),
    "column sum": lambda dtype: column_sum(70, 1003, dtype),
    "row sum": lambda dtype: row_sum(70, 1003, dtype),
    "functions": lambda dtype: sigmoid_tanh(1003, dtype),
}


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("name", KERNELS)
def test_every_inner_loop_works_on_vectors(name: str, dtype: str, core: str) -> None:
    """This includes the masked last elements of a row; there are no calls and no integer divisions."""
    found = loops(instructions(KERNELS[name](dtype), elf(core)))
    assert found
    for loop in found:
        assert has(loop, VECTOR), loop
        assert not has(loop, r"(bl|blr|[us]div)\s+[^z]"), loop
        assert not has(loop, r"f(add|mul|madd|sub|div|max|min)\s+s\d"), loop


@pytest.mark.parametrize("core", CORES)
def test_stores_of_bf16_round_by_the_instruction_where_the_core_has_it(core: str) -> None:
    target = elf(core)
    converts = any(has(loop, r"bfcvtn?\b") for loop in loops(instructions(add_gelu(1003, "bf16"), target)))
    assert converts == target.has("bf16")


@pytest.mark.parametrize(
    ("core", "unit"), [("neoverse-v1", r"z\d+\.s"), ("neoverse-v2", r"v\d+\.4s"), ("neoverse-n1", r"v\d+\.4s")]
)
def test_arithmetic_has_the_width_of_the_core(core: str, unit: str) -> None:
    main = loops(instructions(add_gelu(1003), elf(core)))[0]
    assert sum(bool(re.match(rf"fml?ad?\s.*{unit}", line)) for line in main) > 8, main


@pytest.mark.parametrize("core", ["neoverse-n1", "neoverse-v2"])
@pytest.mark.parametrize("name", ["gelu", "softmax"])
def test_constants_of_polynomials_cost_no_moves(name: str, core: str) -> None:
    """NEON's multiply-add overwrites its addend, so constants could need moves."""
    main = max(loops(instructions(KERNELS[name]("f32"), elf(core))), key=len)
    products = sum(line.startswith("fmla") for line in main)
    assert sum(bool(re.match(r"mov\s+v\d+\.16b", line)) for line in main) <= products / 8, main


@pytest.mark.parametrize("core", CORES)
def test_a_pointwise_step_takes_several_vectors(core: str) -> None:
    main = loops(instructions(add_gelu(1003), elf(core)))[0]
    assert sum(bool(re.match("fmaxn?m?", line)) for line in main) == 2 and len(main) <= 2 * 42, main


@pytest.mark.parametrize("core", ["neoverse-v1", "neoverse-v2"])
def test_the_last_elements_are_read_under_a_predicate(core: str) -> None:
    tail = loops(instructions(add_gelu(1003), elf(core)))[-1]
    assert has(tail, r"ld1w\s+\{ z\d+\.s \}, p\d/z") and has(tail, r"st1w\s+\{ z\d+\.s \}, p\d")


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_attention_multiplies_pairs_where_the_core_does(dtype: str, core: str) -> None:
    target = elf(core)
    inner = loops(instructions(Attention(dtype, 64, causal=True), target))
    product = max(inner, key=lambda loop: sum(bool(re.match(r"bfdot|fmla|fmad", x)) for x in loop))
    pairs = dtype == "bf16" and target.has("bf16")
    assert sum(bool(re.match("bfdot" if pairs else "fmla|fmad", x)) for x in product) == 6 * 4 * 2
    assert not has(product, r"(bl|str|st1)\b"), "accumulators stay in registers"


def test_apples_cores_get_object_files_of_their_system() -> None:
    kernel, target = softmax(5, 1003, "bf16"), aarch64_target("apple-m2")
    text, _ = kernels_to_text({hash_of(kernel): kernel}, target, parallel=True)
    assert to_object(text, target_machine(target))[:4] == b"\xcf\xfa\xed\xfe"


def test_a_core_that_is_not_known_is_named() -> None:
    with pytest.raises(ValueError, match="known are generic, neoverse-n1"):
        aarch64_target("cortex-m0")


@pytest.mark.parametrize("core", ARM_CORES)
def test_cores_differ_in_their_fingerprint(core: str) -> None:
    target = aarch64_target(core)
    assert target.sve_bits == ARM_CORES[core].sve_bits and target.vector_bytes == max(target.sve_bits, 128) // 8
    others: list[CpuTarget] = [aarch64_target(c) for c in ARM_CORES if c != core]
    assert target.fingerprint not in [o.fingerprint for o in others]


WEIGHTS = {"bf16": r"ld[pr]\s+[qz]\d+", "i8": r"ld[pr]\s+q\d+|ld1sb", "f32": r"ld[pr]\s+[qz]\d+"}


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_decoding_streams_its_weights_once_in_vectors(dtype: str, weight: str, core: str) -> None:
    """With one row, the loop loads each weight with a vector load, multiplies vectors, and does little else."""
    g, target = Gemv(1, dtype, weight), elf(core)
    loop = max(loops(instructions(g, target)), key=lambda x: sum(bool(re.match(r"bfdot|fmla|fmad", i)) for i in x))
    pairs = dtype == weight == "bf16" and target.has("bf16")
    products = sum(bool(re.match("bfdot" if pairs else "fmla|fmad", i)) for i in loop)
    width = target.vector_bytes // 4 * (2 if pairs else 1)
    loaded = sum(_bytes(i, target.vector_bytes) for i in loop if re.match(WEIGHTS[weight], i))
    element = {"bf16": 2, "i8": 1, "f32": 4}[weight]
    assert products * width * element <= loaded <= products * width * (element + {"f32": 4, "bf16": 2}[dtype] / 4)
    assert (
        not has(loop, r"(bl|b\.|str|st1|ldrs?b|ldrs?h|ldr\s+[bhsd]\d)\b.*\[") and len(loop) <= 1.1 * products * width
    ), loop


@pytest.mark.parametrize("core", [c for c in CORES if c.startswith("neoverse")])  # LLVM spills some on Apple's cores
def test_zero_points_of_weights_cost_a_subtraction_each(core: str) -> None:
    plain, shifted = (
        max(loops(instructions(Gemv(1, "f32", "i8", zeros=zeros), elf(core))), key=len) for zeros in (False, True)
    )
    products = sum(bool(re.match(r"fmla|fmad", i)) for i in plain)
    assert sum(i.startswith("fsub") for i in shifted) == products
    assert len(shifted) <= len(plain) + 1.2 * products and not has(shifted, r".*\[sp"), shifted


def _bytes(line: str, vector: int) -> int:
    """The bytes that a vector load reads."""
    if line.startswith("ld1sb"):
        return vector // 4
    return (2 if line.startswith("ldp") else 1) * (vector if re.search(r"\bz\d", line) else 16)


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("name", ["transposed f32", "transposed bf16", "running sum", "pairs", "triples"])
def test_lanes_are_moved_without_memory(name: str, core: str) -> None:
    kernel = {
        "transposed f32": transposed(128, "f32"),
        "transposed bf16": transposed(128, "bf16"),
        "running sum": cumsum(4, 1024),
        "pairs": reversed_places(1024, 2),
        "triples": reversed_places(1024, 3),
    }[name]
    for loop in loops(instructions(kernel, elf(core))):
        assert not has(loop, r".*\[sp"), loop


def reversed_places(n: int, places: int) -> Kernel:
    """Reverse each group of elements."""
    b = Builder("reversed", p=[n])
    x, y = b.input("x", "f32"), b.output("y", "f32")
    (i,) = b.axes
    for k in range(places):
        b.store(y, i * places + k, b.load(x, i * places + (places - 1 - k)) * 2)
    return b.build()

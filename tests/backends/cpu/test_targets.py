"""Object code: stored and loaded again, and compiled for other machines."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch

from fusewright.toolkit.ir import Builder, Kernel, structural_hash
from fusewright.toolkit.ir.types import to_torch
from fusewright_cpu.emit.entry import UnsupportedKernel
from fusewright_cpu.run import jit
from fusewright_cpu.run.codegen import kernels_to_text, to_object
from fusewright_cpu.run.jit import compile_kernels, load_module
from fusewright_cpu.run.launch import Launcher
from fusewright_cpu.run.sources import symbol_name
from fusewright_cpu.target import CpuTarget, aarch64_target, target_machine, x86_target


def layer_norm(cols: int, dtype: str) -> Kernel:
    b = Builder("layer_norm", p=[6], r=[cols])
    x, w, y = b.input("x", dtype), b.input("w", dtype), b.output("y", dtype)
    i, j = b.axes
    v = b.load(x, i * cols + j).to("f32")
    d = v - b.reduce("mean", v)
    scale = b.op("rsqrt", b.reduce("m2", v) * (1 / cols) + 1e-5)
    b.store(y, i * cols + j, (d * scale * b.load(w, j).to("f32")).to(dtype))
    return b.build()


def transposed(cols: int, dtype: str) -> Kernel:
    b = Builder("transposed", p=[cols, 40])
    x, y = b.input("x", dtype), b.output("y", dtype)
    j, i = b.axes
    b.store(y, j * 40 + i, b.load(x, i * cols + j))
    return b.build()


def weighted_pairs(rows: int, dtype: str) -> Kernel:
    b = Builder("weighted_pairs", p=[rows])
    x, y = b.input("x", dtype), b.output("y", "f32")
    (i,) = b.axes
    b.store(y, i, b.load(x, i * 2).to("f32") + b.load(x, i * 2 + 1).to("f32") * 2)
    return b.build()


def test_a_machine_without_half_conversion_declines() -> None:
    old = replace(x86_target("avx"), features="+avx")
    kernel = layer_norm(8, "f16")
    with pytest.raises(UnsupportedKernel, match="F16C"):
        kernels_to_text({structural_hash(kernel): kernel}, old, parallel=False)


def test_equal_kernels_are_compiled_once() -> None:
    first = compile_kernels([layer_norm(71, "f32"), layer_norm(71, "f32")])
    again = compile_kernels([layer_norm(71, "f32")])
    assert len(first.addresses) == 1
    assert again.addresses == first.addresses
    assert again.object_bytes == b""


def test_object_code_loads_in_a_process_that_did_not_compile_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = layer_norm(72, "f32")
    made = compile_kernels([kernel])
    assert made.object_bytes
    fresh = jit._Process()
    monkeypatch.setattr(jit, "_process", lambda: fresh)
    loaded = load_module(made.object_bytes, [structural_hash(kernel)], made.symbols)
    x, w, y = torch.randn(6, 72), torch.randn(72), torch.empty(6, 72)
    loaded.launcher(kernel).checked([x, w, y])
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (72,), w))


@pytest.mark.parametrize(
    "target",
    [aarch64_target("neoverse-n1"), aarch64_target(), x86_target("avx2"), x86_target("avx512"), x86_target("avx")],
    ids=["neoverse-n1", "neoverse-v1", "avx2", "avx512", "avx"],
)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("make", [layer_norm, transposed, weighted_pairs])
def test_other_machines_get_object_code(target: CpuTarget, dtype: str, make: Callable[[int, str], Kernel]) -> None:
    kernel = make(73, dtype)
    text, symbols = kernels_to_text({structural_hash(kernel): kernel}, target, parallel=True)
    code = to_object(text, target_machine(target))
    assert code[:4] == b"\x7fELF"
    assert symbol_name(structural_hash(kernel)).encode() in code
    assert "GOMP_parallel" in symbols


@cache
def process_of(isa: str) -> jit._Process:
    """A linker for code of one ISA level."""
    return jit._Process()


def narrow(kernel: Kernel, isa: str) -> Launcher:
    """Compile the kernel for ISA level `isa`. Skips if this machine cannot run it."""
    here = torch.backends.cpu.get_cpu_capability()
    if not here.startswith("AVX") or (isa == "avx512" and here != "AVX512"):
        pytest.skip(f"this machine has no {isa}")
    process, h = process_of(isa), structural_hash(kernel)
    text, symbols = kernels_to_text({h: kernel}, x86_target(isa), parallel=False)
    linked = process.link(to_object(text, target_machine(x86_target(isa))), [h], symbols)
    return Launcher(kernel, linked.addresses[h], linked)


@pytest.mark.parametrize("isa", ["avx512", "avx2", "avx"])
def test_narrow_vectors_give_the_same_results(isa: str) -> None:
    x, w, out = torch.randn(6, 73), torch.randn(73), torch.empty(6, 73)
    narrow(layer_norm(73, "f32"), isa).checked([x, w, out])
    torch.testing.assert_close(out, torch.nn.functional.layer_norm(x, (73,), w))


@pytest.mark.parametrize("isa", ["avx512", "avx2", "avx"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_narrow_tiles_and_pairs(isa: str, dtype: str) -> None:
    x = torch.randint(-9, 9, (40, 73)).to(to_torch(dtype))
    out = torch.empty(73, 40, dtype=x.dtype)
    narrow(transposed(73, dtype), isa).checked([x, out])
    assert torch.equal(out, x.t())
    pairs, out = x.view(-1)[: 2 * 73], torch.empty(73)
    narrow(weighted_pairs(73, dtype), isa).checked([pairs, out])
    assert torch.equal(out, pairs[::2].float() + 2 * pairs[1::2].float())


@pytest.mark.parametrize("isa", ["avx512", "avx2", "avx"])
@pytest.mark.parametrize("dtype", ["i8", "i32", "i64"])
def test_floats_that_no_integer_has_are_cast_as_in_eager(isa: str, dtype: str) -> None:
    """LLVM replaced a cast and the one back to floats by a rounding where the sign of zero does not matter."""
    b = Builder("whole", p=[7])
    x, out = b.input("x", "f32"), b.output("out", "f32")
    (i,) = b.axes
    b.store(out, i, b.load(x, i).to(dtype).to("f32") + 1)
    xs, got = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30, -1e30, 3.7, -0.5]), torch.empty(7)
    narrow(b.build(), isa).checked([xs, got])
    assert torch.equal(got, xs.to(to_torch(dtype)).float() + 1)


def test_an_instruction_set_that_is_not_there_is_an_error_that_names_the_others() -> None:
    with pytest.raises(ValueError, match=r"no level .sse9. of x86-64 .*known are avx512, avx2, avx"):
        x86_target("sse9")
    with pytest.raises(ValueError, match="no Arm core 'sse9'; known are"):
        aarch64_target("sse9")

"""Object code: stored and loaded again, and made for machines that this one is not."""

from dataclasses import replace

import pytest
import torch

from fusewright.toolkit.kernel import Builder, Kernel, structural_hash
from fusewright.toolkit.llvm import UnsupportedKernel, compile_kernels, load_module
from fusewright.toolkit.llvm.jit import kernels_to_text, symbol_name, to_object
from fusewright.toolkit.llvm.target import CpuTarget, aarch64_target, target_machine, x86_target


def layer_norm(cols: int, dtype: str) -> Kernel:
    b = Builder("layer_norm", p=[6], r=[cols])
    x, w, y = b.input("x", dtype), b.input("w", dtype), b.output("y", dtype)
    i, j = b.axes
    v = b.load(x, i * cols + j).to("f32")
    d = v - b.reduce("mean", v)
    scale = b.op("rsqrt", b.reduce("m2", v) * (1 / cols) + 1e-5)
    b.store(y, i * cols + j, (d * scale * b.load(w, j).to("f32")).to(dtype))
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
    from fusewright.toolkit.llvm import jit

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
    [aarch64_target(), x86_target("avx2"), x86_target("avx512"), x86_target("avx")],
    ids=["aarch64", "avx2", "avx512", "avx"],
)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_other_machines_get_object_code(target: CpuTarget, dtype: str) -> None:
    kernel = layer_norm(73, dtype)
    text, symbols = kernels_to_text({structural_hash(kernel): kernel}, target, parallel=True)
    code = to_object(text, target_machine(target))
    assert code[:4] == b"\x7fELF"
    assert symbol_name(structural_hash(kernel)).encode() in code
    assert "GOMP_parallel" in symbols


def test_narrow_vectors_give_the_same_results() -> None:
    from fusewright.toolkit.llvm import jit

    kernel = layer_norm(73, "f32")
    x, w, outs = torch.randn(6, 73), torch.randn(73), []
    for isa in ("avx512", "avx2", "avx"):
        if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
            pytest.skip("not an x86 machine with AVX")
        if isa == "avx512" and torch.backends.cpu.get_cpu_capability() != "AVX512":
            continue
        process, h = jit._Process(), structural_hash(kernel)
        text, symbols = kernels_to_text({h: kernel}, x86_target(isa), parallel=False)
        process.link(to_object(text, target_machine(x86_target(isa))), [h], symbols)
        outs.append(torch.empty(6, 73))
        jit.Launcher(kernel, process.addresses[h]).checked([x, w, outs[-1]])
    want = torch.nn.functional.layer_norm(x, (73,), w)
    for out in outs:
        torch.testing.assert_close(out, want)

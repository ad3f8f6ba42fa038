"""Machine code in memory: loaded wherever the address space has room, kept as long as it is needed, and without crashing the
process."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import llvmlite.binding as llvm
import pytest
import torch

from fusewright.toolkit.ir import Kernel, structural_hash
from fusewright_cpu import llvm_loader
from fusewright_cpu.run import jit
from fusewright_cpu.run.jit import compile_kernels, load_module
from fusewright_cpu.run.launch import Launcher
from fusewright_cpu.run.linker import GENERATION, Linker, LinkError
from fusewright_cpu.target import host_target
from tests.backends.cpu.test_targets import layer_norm

ROOT = Path(__file__).parents[3]


def check(launch: Launcher, cols: int) -> None:
    x, w, y = torch.randn(6, cols), torch.randn(cols), torch.empty(6, cols)
    launch([x, w, y])
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (cols,), w))


def child(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)


FAR = """
from tests.backends.cpu.scattered import scatter
from tests.backends.cpu.test_linker import check, compile_kernels, layer_norm, llvm, load_module, structural_hash
{before}
made = [compile_kernels([layer_norm(70, "f32")])]
scatter(64)
made += [compile_kernels([layer_norm(cols, "f32")]) for cols in (71, 72)]
for cols, module in zip((70, 71, 72), made):
    check(module.launcher(layer_norm(cols, "f32")), cols)
code, names, symbols = made[0].object_bytes, list(made[0].addresses), made[0].symbols
del made, module  # what the disk holds is linked in the same way
check(load_module(code, names, symbols).launcher(layer_norm(70, "f32")), 70)
print("all right")
"""

OLD_LINKER = """
real = llvm.create_lljit_compiler
llvm.create_lljit_compiler = lambda machine, use_jit_link: real(machine)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="fills the address space with Linux's mmap")
def test_code_is_linked_where_the_address_space_has_no_two_pages_together() -> None:
    done = child(FAR.format(before=""))
    assert done.returncode == 0 and "all right" in done.stdout, done.stderr


@pytest.mark.skipif(host_target().triple.split("-")[0] != "x86_64", reason="RuntimeDyld's assertion for x86-64")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="fills the address space with Linux's mmap")
def test_the_linker_that_maps_section_by_section_aborts_there() -> None:
    """Verifies what the test above assumes: that the address space is bad enough."""
    done = child(FAR.format(before=OLD_LINKER))
    assert done.returncode == -6 and "isInt<32>" in done.stderr, done.stdout + done.stderr


@pytest.mark.parametrize("damage", [lambda code: code[:500], lambda code: b"no object file", lambda code: b""])
def test_damaged_object_code_is_an_error_and_no_abort(damage: object) -> None:
    kernel = layer_norm(81, "f32")
    made = compile_kernels([kernel])
    with pytest.raises(LinkError, match="cannot be linked"):
        jit._Process().link(damage(made.object_bytes), [structural_hash(kernel)], made.symbols)  # type: ignore[operator]


def test_a_kernel_that_the_object_code_lacks_is_an_error() -> None:
    made = compile_kernels([layer_norm(82, "f32")])
    with pytest.raises(LinkError, match="Symbols not found"):
        load_module(made.object_bytes, ["0" * 64], made.symbols)


@pytest.mark.faulty
def test_what_cannot_be_linked_is_eagers(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*args: object) -> None:
        raise LinkError("machine code cannot be linked: no room")

    monkeypatch.setattr(Linker, "link", refuse)
    x = torch.randn(33, 57)
    compiled = torch.compile(lambda x: torch.tanh(x) * 3 - x, backend="x86_onednn", options={"cache": False})
    torch.testing.assert_close(compiled(x), torch.tanh(x) * 3 - x)
    assert "no room" in caplog.text


def loaded(kernel: Kernel) -> bool:
    gc.collect()
    return structural_hash(kernel) in jit._process().loaded


def test_code_is_unloaded_when_its_last_launcher_goes() -> None:
    kernel, sibling = layer_norm(83, "f32"), layer_norm(84, "f32")
    module = compile_kernels([kernel, sibling])
    first, second = module.launcher(kernel), compile_kernels([kernel]).launcher(kernel)
    gone = weakref.ref(module.linked[structural_hash(kernel)].tracker)
    del module
    assert loaded(kernel) and loaded(sibling)  # they share a module, which two launchers need
    del first
    check(second, 83)
    del second
    assert not loaded(kernel) and not loaded(sibling) and gone() is None
    check(compile_kernels([kernel]).launcher(kernel), 83)  # and can be compiled again


def test_the_entry_point_that_a_plan_calls_keeps_its_code() -> None:
    kernel = layer_norm(85, "f32")
    code = llvm_loader({structural_hash(kernel): kernel})[structural_hash(kernel)]
    assert loaded(kernel)
    del code
    assert not loaded(kernel)


def mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_linking_and_dropping_takes_no_address_space() -> None:
    kernel = layer_norm(86, "f32")
    made = compile_kernels([kernel])
    code, symbols = made.object_bytes, made.symbols
    process, before = jit._Process(), mappings()
    for _ in range(3 * GENERATION):
        linked = process.link(code, [structural_hash(kernel)], symbols)
    check(Launcher(kernel, linked.addresses[structural_hash(kernel)], linked), 86)
    assert mappings() < before + GENERATION


def test_threads_that_compile_call_and_drop_the_same_kernels_agree() -> None:
    """Code in use by one thread is not unloaded by another."""
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for k in range(12):
                cols = 87 + k % 2
                check(compile_kernels([layer_norm(cols, "f32")]).launcher(layer_norm(cols, "f32")), cols)
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def test_code_outlives_the_linker_that_loaded_it() -> None:
    kernel = layer_norm(89, "f32")
    made = compile_kernels([kernel])
    process = jit._Process()
    linked = process.link(made.object_bytes, [structural_hash(kernel)], made.symbols)
    del process
    gc.collect()
    check(Launcher(kernel, linked.addresses[structural_hash(kernel)], linked), 89)
    assert isinstance(linked.tracker, llvm.orcjit.ResourceTracker)

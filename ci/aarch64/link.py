"""Link and run kernels for AArch64: `make` writes their object code, on any machine; `run`, on AArch64 or an emulator,
links them far apart and checks their results. `run` imports only llvmlite.

    python -m ci.aarch64.link make FOLDER
    ci/aarch64.sh python -m ci.aarch64.link run FOLDER
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import math
import platform
import sys
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parents[2]
LINKER = HERE / "backends" / "cpu" / "fusewright_cpu" / "run" / "linker.py"
ROWS = 6
COLUMNS = (7, 64, 71, 130, 512, 1001)
CALLED = ("memcpy", "memset", "memmove", "malloc", "free")


def make(folder: Path) -> None:
    """Write the object code of one layer norm per width."""
    from fusewright.toolkit.ir import Builder, structural_hash
    from fusewright_cpu.run.codegen import kernels_to_text, to_object
    from fusewright_cpu.run.sources import symbol_name
    from fusewright_cpu.target import aarch64_target, target_machine

    target = aarch64_target("neoverse-n1")  # its vectors exist on every emulated machine
    machine, index = target_machine(target), {}
    for columns in COLUMNS:
        b = Builder("layer_norm", p=[ROWS], r=[columns])
        x, y = b.input("x", "f32"), b.output("y", "f32")
        i, j = b.axes
        v = b.load(x, i * columns + j)
        d = v - b.reduce("mean", v)
        scale = b.op("rsqrt", b.reduce("m2", v) * (1 / columns) + 1e-5)
        b.store(y, i * columns + j, b.op("exp", d * scale))
        kernel = b.build()
        h = structural_hash(kernel)
        text, symbols = kernels_to_text({h: kernel}, target, parallel=False)
        (folder / f"{columns}.o").write_bytes(to_object(text, machine))
        index[str(columns)] = {"symbol": symbol_name(h), "imports": symbols}
    (folder / "index.json").write_text(json.dumps(index))


def run(folder: Path) -> None:
    """Link and call every kernel, reserving 5 GiB of address space before each."""
    assert platform.machine() == "aarch64", f"this is {platform.machine()}"
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(reloc="pic", codemodel="small", jit=True)
    scattered = module(HERE / "tests" / "backends" / "cpu" / "scattered.py")
    linker = module(LINKER).Linker(machine)
    libc, held = ctypes.CDLL(None), []
    for columns, entry in json.loads((folder / "index.json").read_text()).items():
        assert scattered.reserve(scattered.STEP) is not None, "no address space"
        imports = {s: address(libc, s) for s in {*entry["imports"], *CALLED}}
        code = (folder / f"{columns}.o").read_bytes()
        held.append(linker.link(code, {columns: entry["symbol"]}, imports))
    at = [module.addresses[c] for module, c in zip(held, map(str, COLUMNS), strict=True)]
    near = min(abs(a - b) for a in at for b in at if a != b)
    assert near > 4 << 30, f"only {near} bytes between two modules"
    for columns, place in zip(COLUMNS, at, strict=True):
        _check(place, columns)
    print(f"{len(at)} kernels, {near / 2**30:.1f} GiB apart or more, linked and right on {platform.machine()}")


def _check(address: int, columns: int) -> None:
    n = ROWS * columns
    x = (ctypes.c_float * n)(*(math.sin(k * 0.37) * 3 for k in range(n)))
    y = (ctypes.c_float * n)()
    block = (ctypes.c_int64 * 2)(ctypes.addressof(x), ctypes.addressof(y))
    assert ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64)(address)(ctypes.addressof(block), 1) == 0
    for i in range(ROWS):
        row = x[i * columns : (i + 1) * columns]
        mean = sum(row) / columns
        scale = 1 / math.sqrt(sum((v - mean) ** 2 for v in row) / columns + 1e-5)
        for v, got in zip(row, y[i * columns : (i + 1) * columns], strict=True):
            want = math.exp((v - mean) * scale)
            assert abs(got - want) <= 1e-4 * want + 1e-6, (columns, got, want)


def address(library: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


def module(path: Path) -> ModuleType:
    """Load a file as a module, without its package, which would import torch."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = found  # dataclasses look it up there
    spec.loader.exec_module(found)
    return found


if __name__ == "__main__":
    {"make": make, "run": run}[sys.argv[1]](Path(sys.argv[2]))

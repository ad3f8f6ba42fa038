"""An emulated AArch64 machine for kernels: an arm64 Python under QEMU links and runs object code made here.

`ci/aarch64.sh fetch` unpacks emulator, Python and wheels. Counting instructions needs a QEMU build with plugin support and a C
compiler: `fetch_counter` unpacks and builds what is missing in the same folder. Nothing is installed.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import struct
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import llvmlite.binding as llvm
import platformdirs
import torch

from fusewright.toolkit.ir.types import is_float
from fusewright_cpu.run.codegen import kernels_to_text, to_object
from fusewright_cpu.run.launch import float_bits
from fusewright_cpu.run.sources import Source, hash_of, symbol_name
from fusewright_cpu.target import CpuTarget, target_machine

HERE = Path(__file__).resolve().parent
GUEST = HERE / "guest.py"
STATIC = "qemu-aarch64-static"
COUNTER = ("qemu-user", "libcapstone4", "liburing2")
"""Debian 12's packages of the emulator with plugin support, and of libraries that few machines have."""
MARKED = """target triple = "{triple}"
declare i64 @syscall(i64, ...)
define i64 @marked(ptr %kernel, ptr %block, i64 %threads) {{
  %before = call i64 (i64, ...) @syscall(i64 1000)
  %result = call i64 %kernel(ptr %block, i64 %threads)
  %after = call i64 (i64, ...) @syscall(i64 1000)
  ret i64 %result
}}
"""
"""Calls a kernel between two system calls that do not exist in Linux: the marks for `count.c`."""


def root() -> Path:
    """Return the folder that `ci/aarch64.sh fetch` unpacks into."""
    given = os.environ.get("AARCH64_ROOT")
    return Path(given) if given else platformdirs.user_cache_path("fusewright") / "aarch64"


def _emulator() -> Path:
    found = shutil.which(STATIC)
    return Path(found) if found else root() / "host/usr/bin" / STATIC


def missing() -> str:
    """Return what the emulated machine lacks, or ""."""
    there = [_emulator(), *(root() / name for name in ("system.stamp", "site.stamp"))]
    return "" if all(p.exists() for p in there) else f"no emulated AArch64 Python in {root()}: ci/aarch64.sh fetch"


def python(target: CpuTarget, script: Path, *arguments: str) -> list[str]:
    """Return the command of an emulated Python on a CPU with the target's vectors, with the wheels and this checkout."""
    return [str(_emulator()), *_guest(target), str(script), *arguments]


def _guest(target: CpuTarget, *options: str) -> tuple[str, ...]:
    """Return the emulator's arguments: the CPU, the guest's environment and its Python."""
    path = f"PYTHONPATH={HERE.parents[1]}:{root() / 'site'}"
    clean = [x for name in ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHOME") for x in ("-U", name)]
    system = str(root() / "system")
    return ("-cpu", processor(target), *options, *clean, "-E", path, "-L", system, f"{system}/usr/bin/python3.11")


def processor(target: CpuTarget) -> str:
    """Return QEMU's name for a CPU with all features and the target's vectors."""
    bits = target.sve_bits
    return f"max,sve{bits}=on,sve-default-vector-length={bits // 8},sme=off" if bits else "max,sve=off,sme=off"


# -- counting


def counter() -> Path:
    """Return the folder of the instruction-counting emulator."""
    return root() / "counter"


def fetch_counter() -> None:
    """Download and unpack an emulator with plugin support, and build the counting plugin. Raise CalledProcessError on
    failure."""
    if (counter() / "count.so").exists():
        return
    debs = counter() / "debs"
    debs.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", *COUNTER], cwd=debs, check=True)
    for deb in debs.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", str(deb), str(counter())], check=True)
    shutil.rmtree(debs)
    plugin = str(counter() / "count.so")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", str(HERE / "count.c"), "-o", plugin], check=True)


def counted(target: CpuTarget, marks: Path, script: Path, *arguments: str, given: str = "") -> tuple[str, list[int]]:
    """Return what an emulated Python prints for the input `given`, and its instruction counts between the first and second mark,
    the third and fourth, and so on."""
    marks.unlink(missing_ok=True)
    # ACL uses as many threads as OpenMP starts with, whatever torch is told later, and their busy waiting would be counted.
    plugin = "-plugin", f"{counter() / 'count.so'},out={marks}", "-E", "OMP_NUM_THREADS=1"
    command = [str(counter() / "usr/bin/qemu-aarch64"), *_guest(target, *plugin), str(script), *arguments]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(counter() / "usr/lib/x86_64-linux-gnu")}
    done = subprocess.run(command, input=given, env=environment, capture_output=True, text=True, check=True)
    at = [int(x) for x in marks.read_text().split()]
    return done.stdout, [b - a for a, b in zip(at[::2], at[1::2], strict=True)]


@dataclass
class Emulator:
    """Processes on one emulated CPU; a context manager. Files are in `folder`."""

    target: CpuTarget
    folder: Path
    _names: itertools.count[int] = field(default_factory=itertools.count)
    _process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Emulator:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.communicate()

    def build(self, sources: Sequence[Source], parallel: bool = True) -> Mapping[str, Path]:
        """Build one library with the code of all sources; return it by their hashes."""
        by_hash = {hash_of(s): s for s in sources}
        text, imports = kernels_to_text(by_hash, self.target, parallel)
        at = self.folder / f"kernels{next(self._names)}"
        self._write(at, to_object(text, target_machine(self.target)), list(map(symbol_name, by_hash)), imports)
        return dict.fromkeys(by_hash, at)

    def _write(self, at: Path, code: bytes, symbols: Sequence[str], imports: Sequence[str]) -> None:
        """Write object code and its index, as the guest reads them."""
        at.with_suffix(".o").write_bytes(code)
        at.with_suffix(".json").write_text(json.dumps({"symbols": list(symbols), "imports": list(imports)}))

    def _marked(self) -> str:
        """Return the library that calls kernels between marks."""
        at = self.folder / "marked"
        machine = target_machine(self.target)
        code = machine.emit_object(llvm.parse_assembly(MARKED.format(triple=self.target.triple)))
        self._write(at, code, ["marked"], ["syscall"])
        return str(at)

    def run(
        self, source: Source, library: Path, tensors: Sequence[torch.Tensor], sizes: Sequence[int] = (),
        scalars: Sequence[int | float | bool] = (), threads: int = 1,
    ) -> int:  # fmt: skip
        """Run the kernel on the tensors, changing them in place. Return its result, an error word."""
        file = self._request(source, tensors, sizes, scalars)
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{library} {symbol_name(hash_of(source))} {file} {threads}\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            self._process = None
            raise RuntimeError(f"the emulated process ended with {process.wait()} in {source.name}")
        self._read_back(file, tensors)
        return int(answer)

    def count(
        self, source: Source, library: Path, tensors: Sequence[torch.Tensor], sizes: Sequence[int] = (),
        scalars: Sequence[int | float | bool] = (),
    ) -> int:  # fmt: skip
        """Return the instructions of one call on one thread, after an uncounted one."""
        line = f"{library} {symbol_name(hash_of(source))} {self._request(source, tensors, sizes, scalars)} 1\n"
        _, found = counted(self.target, self.folder / "instructions", GUEST, self._marked(), given=2 * line)
        return found[1]

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            pipe, command = subprocess.PIPE, python(self.target, GUEST, self._marked())
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        return self._process

    def _request(
        self, source: Source, tensors: Sequence[torch.Tensor], sizes: Sequence[int], scalars: Sequence[float]
    ) -> Path:
        """Write the file of a request (see `guest.py`). Tensors are dense in memory, in any order of dimensions."""
        buffers = [_storage(t) for t in tensors]
        words = [
            *sizes,
            *(float_bits(x) if is_float(s.dtype) else int(x) for x, s in zip(scalars, source.scalars, strict=True)),
        ]
        at, heads = 8 + 16 * (len(buffers) + len(words)), [len(buffers) + len(words)]
        for b in buffers:
            heads += [max(len(b), 1), at]
            at += len(b)
        for word in words:
            heads += [0, word]
        file = self.folder / "request"
        file.write_bytes(struct.pack(f"<{len(heads)}q", *heads) + b"".join(buffers) + b"\0")
        return file

    def _read_back(self, file: Path, tensors: Sequence[torch.Tensor]) -> None:
        data = file.read_bytes()
        for k, t in enumerate(tensors):
            at = struct.unpack_from("<q", data, 16 + 16 * k)[0]
            flat = _flat(t)
            if flat.numel():
                flat.copy_(torch.frombuffer(bytearray(data), dtype=t.dtype, count=flat.numel(), offset=at))


def _flat(t: torch.Tensor) -> torch.Tensor:
    """Return the memory from a tensor's first element to its last as one dimension."""
    length = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    return t.as_strided([length], [1])


def _storage(t: torch.Tensor) -> bytes:
    return _flat(t).contiguous().view(torch.uint8).numpy().tobytes() if t.numel() else b""

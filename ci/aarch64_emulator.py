"""An emulated AArch64 machine for kernels: object code made here is linked and run under QEMU's user mode emulator.

The emulator and the cross linker and compiler are Debian's; `fetch` unpacks them into a folder (AARCH64_TOOLS, else one in
the user's cache) and installs nothing.
"""

from __future__ import annotations

import itertools
import os
import shutil
import struct
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs
import torch

from fusewright.toolkit.ir.types import is_float
from fusewright_cpu.run.jit import kernels_to_text, symbol_name, to_object
from fusewright_cpu.run.launch import float_bits
from fusewright_cpu.run.sources import Source, hash_of
from fusewright_cpu.target import CpuTarget, target_machine

HERE = Path(__file__).resolve().parent
PACKAGES = (
    "qemu-user", "libcapstone4", "liburing2", "gcc-12-aarch64-linux-gnu", "cpp-12-aarch64-linux-gnu",
    "binutils-aarch64-linux-gnu", "libc6-dev-arm64-cross", "libc6-arm64-cross", "libgcc-12-dev-arm64-cross",
    "libgcc-s1-arm64-cross", "linux-libc-dev-arm64-cross", "libisl23", "libmpc3", "libmpfr6", "libgmp10", "libjansson4",
)  # fmt: skip
"""Debian 12's, for a machine that is not an Arm one."""
PREFIX = "aarch64-linux-gnu"


def tools() -> Path:
    """The folder that the tools are unpacked into."""
    given = os.environ.get("AARCH64_TOOLS")
    return Path(given) if given else platformdirs.user_cache_path("fusewright-ci") / "aarch64"


def missing() -> str:
    """What the emulated machine lacks, or ""."""
    if not (tools() / "runner").exists():
        return f"no AArch64 emulator in {tools()}: python -m ci.aarch64_kernels fetch"
    return ""


def fetch() -> None:
    """Downloads and unpacks the tools, and builds the runner and the counting plugin. CalledProcessError where that fails."""
    root, debs = tools() / "root", tools() / "debs"
    debs.mkdir(parents=True, exist_ok=True)
    command = ["apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", *PACKAGES]
    subprocess.run(command, cwd=debs, check=True)
    for deb in debs.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", str(deb), str(root)], check=True)
    shutil.rmtree(debs)
    headers, system = root / "usr" / PREFIX / "include", root / "usr" / PREFIX / "lib"
    objects = [str(system / name) for name in ("crt1.o", "crti.o")]
    _run(root, f"{PREFIX}-gcc-12", "-O2", "-Wall", "-c", "-isystem", str(headers), str(HERE / "aarch64_runner.c"), "-o",
         str(tools() / "runner.o"))  # fmt: skip
    _run(root, f"{PREFIX}-ld", "--export-dynamic", "-no-as-needed", "-dynamic-linker", "/lib/ld-linux-aarch64.so.1",
         *objects, str(tools() / "runner.o"), *(str(system / n) for n in ("libc.so.6", "libm.so.6", "libgcc_s.so.1")),
         str(system / "libc_nonshared.a"), str(system / "ld-linux-aarch64.so.1"), str(system / "crtn.o"),
         "-o", str(tools() / "runner"))  # fmt: skip
    count = ["cc", "-O2", "-shared", "-fPIC", str(HERE / "aarch64_count.c"), "-o", str(tools() / "count.so")]
    subprocess.run(count, check=True)


def libraries() -> dict[str, str]:
    """The environment in which the tools find theirs."""
    return {**os.environ, "LD_LIBRARY_PATH": str(tools() / "root" / "usr" / "lib" / "x86_64-linux-gnu")}


def _run(root: Path, program: str, *arguments: str) -> None:
    command = [str(root / "usr" / "bin" / program), *arguments]
    done = subprocess.run(command, env=libraries(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{program} failed: {done.stderr.strip()}")


def counting(marks: Path) -> tuple[str, str]:
    """Options of the emulator that count instructions."""
    return "-plugin", f"{tools() / 'count.so'},out={marks}"


def counts(marks: Path) -> list[int]:
    """Instructions between the first and second mark, the third and fourth, and so on."""
    at = [int(x) for x in marks.read_text().split()]
    return [b - a for a, b in zip(at[::2], at[1::2], strict=True)]


def processor(target: CpuTarget) -> str:
    """QEMU's name for a CPU with everything and the target's vectors."""
    bits = target.sve_bits
    return f"max,sve{bits}=on,sve-default-vector-length={bits // 8}" if bits else "max,sve=off"


@dataclass
class Emulator:
    """Processes of one emulated CPU. A context manager; files lie in `folder`."""

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
        """One library with the code of all sources, by their hashes."""
        by_hash = {hash_of(s): s for s in sources}
        text, _ = kernels_to_text(by_hash, self.target, parallel)
        at = self.folder / f"kernels{next(self._names)}"
        at.with_suffix(".o").write_bytes(to_object(text, target_machine(self.target)))
        _run(tools() / "root", f"{PREFIX}-ld", "-shared", str(at.with_suffix(".o")), "-o", str(at.with_suffix(".so")))
        return dict.fromkeys(by_hash, at.with_suffix(".so"))

    def run(
        self, source: Source, library: Path, tensors: Sequence[torch.Tensor], sizes: Sequence[int] = (),
        scalars: Sequence[int | float | bool] = (), threads: int = 1,
    ) -> int:  # fmt: skip
        """Runs the kernel on the tensors, which are changed in place. Its result, an error word."""
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
        """Instructions of one call on one thread, after one that is not counted."""
        line = f"{library} {symbol_name(hash_of(source))} {self._request(source, tensors, sizes, scalars)} 1\n"
        environment = libraries()
        marks = self.folder / "instructions"
        marks.unlink(missing_ok=True)
        command = self._command(*counting(marks))
        subprocess.run(command, input=2 * line, text=True, check=True, capture_output=True, env=environment)
        return counts(marks)[1]

    def _command(self, *options: str) -> list[str]:
        root = tools() / "root"
        system = str(root / "usr" / PREFIX)
        return [
            str(root / "usr/bin/qemu-aarch64"),
            "-cpu",
            processor(self.target),
            *options,
            "-L",
            system,
            str(tools() / "runner"),
        ]

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            pipe = subprocess.PIPE
            environment = libraries()
            self._process = subprocess.Popen(self._command(), stdin=pipe, stdout=pipe, text=True, env=environment)
        return self._process

    def _request(
        self, source: Source, tensors: Sequence[torch.Tensor], sizes: Sequence[int], scalars: Sequence[float]
    ) -> Path:
        """The file of a request (see `aarch64_runner.c`). Tensors are dense in memory, in any order of dimensions."""
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
    """The memory from a tensor's first element to its last as one dimension."""
    length = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    return t.as_strided([length], [1])


def _storage(t: torch.Tensor) -> bytes:
    return _flat(t).contiguous().view(torch.uint8).numpy().tobytes() if t.numel() else b""

"""C++ of a shader library to code in this process: the system's compiler, and the user's cache of what it made before."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from fusewright import machine
from fusewright.cache import artifacts

NATIVE = Path(__file__).parent / "native"
SOURCES = ("runtime.h", "metal_shim.h", "metal_stdlib", "runtime.cpp")
FLAGS = (
    "-std=c++17", "-O1", "-fPIC", "-Wall", "-Wextra", "-Werror", "-fwrapv", "-fno-strict-aliasing", "-ffp-contract=off",
    "-fsigned-char", "-fno-math-errno",
)  # fmt: skip
"""Any warning is an error. Overflow wraps and products are not contracted, so that a run means the same everywhere."""
SECONDS = 600
NATIVE_CPU = {"x86_64": ("-march=native",)}
"""Conversions of half types are instructions then."""


class NoCompiler(RuntimeError):
    """There is no C++ compiler. The message names what helps."""


class NotCompiled(RuntimeError):
    """The compiler refused a source, or warned."""


@functools.cache
def compiler() -> str:
    """The compiler that `CXX` names, or the first that the system has."""
    named = os.environ.get("CXX")
    for name in (named,) if named else ("g++", "c++", "clang++"):
        if found := shutil.which(name):
            return found
    what = f"CXX names {named!r}, which is not there" if named else "there is none"
    raise NoCompiler(
        f"simulating Metal takes a C++ compiler, and {what}; install one (apt-get install g++, xcode-select --install) "
        "or name one in the environment variable CXX"
    )


@functools.cache
def _surroundings() -> str:
    """What code depends on beside its source."""
    version = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[
        0
    ]
    native = hashlib.sha256(b"\0".join((NATIVE / name).read_bytes() for name in SOURCES)).hexdigest()
    return "\n".join([version, machine.cpu_name(), " ".join(_flags()), native])


def _flags() -> tuple[str, ...]:
    return FLAGS + NATIVE_CPU.get(machine.arch(), ())


def build(cpp: str, checked: bool) -> ctypes.CDLL:
    """The loaded library of a translation unit. `checked`: with SHIM_CHECK."""
    made_of = f"{_surroundings()}\n{checked}\n{hashlib.sha256(cpp.encode()).hexdigest()}"
    code = artifacts.read(made_of)
    if code is None:
        code = _compiled(cpp, checked)
        artifacts.write(made_of, code)
    return _loaded(code)


def _compiled(cpp: str, checked: bool) -> bytes:
    with tempfile.TemporaryDirectory(prefix="fusewright-") as folder:
        source, runtime, out = (Path(folder, name) for name in ("shaders.cpp", "runtime.o", "shaders.so"))
        source.write_text(cpp)
        runtime.write_bytes(_runtime())
        define = ["-DSHIM_CHECK"] if checked else []
        _run("-shared", *define, f"-I{NATIVE}", str(source), str(runtime), "-o", str(out))
        return out.read_bytes()


@functools.cache
def _runtime() -> bytes:
    """The object code of what all libraries share."""
    made_of = f"{_surroundings()}\nruntime"
    code = artifacts.read(made_of)
    if code is None:
        with tempfile.TemporaryDirectory(prefix="fusewright-") as folder:
            out = Path(folder, "runtime.o")
            _run("-c", str(NATIVE / "runtime.cpp"), "-o", str(out))
            code = out.read_bytes()
        artifacts.write(made_of, code)
    return code


def _run(*arguments: str) -> None:
    done = subprocess.run(
        [compiler(), *_flags(), *arguments], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    if done.returncode:
        raise NotCompiled(f"the shim does not compile this Metal source:\n{done.stderr[:8000]}")


def _loaded(code: bytes) -> ctypes.CDLL:
    """A library from bytes. Its file has a name of its own, for loaders know libraries by their names, and goes at once."""
    fd, path = tempfile.mkstemp(prefix="fusewright-", suffix=".so")
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(code)
        return ctypes.CDLL(path)
    finally:
        os.unlink(path)

"""Compile the C++ of a shader library with the system's compiler, cache the result, and load it into this process."""

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
"""Warnings are errors. Overflow wraps and multiply-adds are not contracted, so that results are the same everywhere."""
SECONDS = 600
NATIVE_CPU = {"x86_64": ("-march=native",)}
"""Makes conversions of half types single instructions."""


class NoCompiler(RuntimeError):
    """There is no C++ compiler. The message names the remedy."""


class NotCompiled(RuntimeError):
    """The compiler rejected a source or warned."""


@functools.cache
def compiler() -> str:
    """Return the compiler that `CXX` names, or else the first one found on the system."""
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
    """Return the cache key of everything but the source that code depends on."""
    native = hashlib.sha256(b"\0".join((NATIVE / name).read_bytes() for name in SOURCES)).hexdigest()
    return "\n".join([_version(), machine.cpu_name(), " ".join(_flags()), native])


@functools.cache
def _version() -> str:
    done = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[0]


def _flags() -> tuple[str, ...]:
    return FLAGS + NATIVE_CPU.get(machine.arch(), ())


def build(cpp: str, checked: bool) -> ctypes.CDLL:
    """Compile and load a translation unit. `checked`: define SHIM_CHECK."""
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
        _run("-shared", *_headers(checked), str(source), str(runtime), "-o", str(out))
        return out.read_bytes()


@functools.cache
def _runtime() -> bytes:
    """Return the object code of the runtime that all libraries share."""
    return _kept("runtime", "-c", str(NATIVE / "runtime.cpp"))


def _headers(checked: bool) -> list[str]:
    """Return the arguments that find `metal_stdlib`: precompiled, which halves the time of a library, where that is GCC's."""
    folder = None if "clang" in _version() else _precompiled(checked)
    return [*_define(checked), *([f"-I{folder.name}"] if folder else []), f"-I{NATIVE}"]


def _define(checked: bool) -> list[str]:
    return ["-DSHIM_CHECK"] if checked else []


@functools.cache
def _precompiled(checked: bool) -> tempfile.TemporaryDirectory[str]:
    """Return a folder of this process with the precompiled header, which GCC ignores if it does not fit."""
    folder = tempfile.TemporaryDirectory(prefix="fusewright-")
    header = _kept(f"header\n{checked}", "-x", "c++-header", *_define(checked), f"-I{NATIVE}", str(NATIVE / "metal_stdlib"))
    Path(folder.name, "metal_stdlib.gch").write_bytes(header)
    return folder


def _kept(name: str, *arguments: str) -> bytes:
    """Return what the compiler makes of the arguments, from the cache if it is there."""
    made_of = f"{_surroundings()}\n{name}"
    code = artifacts.read(made_of)
    if code is None:
        with tempfile.TemporaryDirectory(prefix="fusewright-") as folder:
            out = Path(folder, "out")
            _run(*arguments, "-o", str(out))
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
    """Load a library from bytes. Its file has a unique name, because loaders identify libraries by name, and is deleted at once."""
    fd, path = tempfile.mkstemp(prefix="fusewright-", suffix=".so")
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(code)
        return ctypes.CDLL(path)
    finally:
        os.unlink(path)

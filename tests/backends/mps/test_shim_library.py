"""Compiling Metal source on a CPU: what is refused, what is cached, and the interface shared with torch's."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from fusewright.cache import artifacts, place
from fusewright_mps.simulate import compiler
from fusewright_mps.simulate.compiler import NoCompiler, NotCompiled
from fusewright_mps.simulate.library import compile_shader
from fusewright_mps.simulate.translate import NotMetal

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
ADD = (
    HEAD
    + """
kernel void add(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], constant float* by [[buffer(2)]],
                uint3 at [[thread_position_in_grid]]) {
    const float v = x[at.x];
    y[at.x] = v + by[0];
}
"""
)


def test_it_is_called_as_torchs_library_is() -> None:
    x, y = torch.arange(10.0), torch.zeros(10)
    compile_shader(ADD).add(x, y, [2.5], threads=(10, 1, 1), group_size=(4, 1, 1))
    assert torch.equal(y, x + 2.5)
    compile_shader(ADD).add(y, x, 1.0)  # torch derives the thread count from the first tensor
    assert torch.equal(x, y + 1.0)
    with pytest.raises(AttributeError, match="has no function 'sub'"):
        compile_shader(ADD).sub  # noqa: B018


@pytest.mark.parametrize(
    ("args", "how", "says"),
    [
        ((torch.zeros(4), torch.zeros(4)), {}, "takes 3 arguments, not 2"),
        (
            (torch.zeros(4), torch.zeros(4, dtype=torch.int32), [1.0]),
            {},
            "y is a buffer of float, the tensor is torch.int32",
        ),
        ((torch.zeros(4), torch.zeros(4), [1]), {}, r"by is constant float\*, and is given \[1\]"),
        ((torch.zeros(4), torch.zeros(4), [1.0]), {"group_size": 1025}, "Metal takes 1 to 1024 threads"),
        ((torch.zeros(4), torch.zeros(4), [1.0]), {"threads": 0}, "a dispatch of no threads"),
        ((torch.zeros(4), torch.zeros(4), [1.0] * 2000), {}, "Metal takes 4096 without a buffer"),
    ],
)
def test_what_metal_would_not_take_is_refused(args: tuple[object, ...], how: dict[str, int], says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        compile_shader(ADD).add(*args, **how)


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        (ADD.replace("v + by", "w + by"), NotCompiled, "metal:7:15: error: .*w"),
        (ADD.replace("y[at.x] = v", "const int unused = 1;\n    y[at.x] = v"), NotCompiled, "unused variable"),
        (ADD.replace("buffer(2)", "buffer(5)"), NotMetal, r"buffers are numbered \[0, 1, 5\]"),
        (ADD.replace("thread_position_in_grid", "vertex_id"), NotMetal, r"does not know \[\[vertex_id\]\]"),
        (
            ADD.replace("device const float* x", "device const half* x"),
            NotCompiled,
            "cannot convert|conversion",
        ),
        (HEAD + "inline long total(long x) { return simd_sum(x); }\n" + ADD.split("metal;\n")[1], None, ""),
    ],
)
def test_what_is_not_metal_does_not_compile(text: str, error: type[Exception] | None, says: str) -> None:
    if error is None:  # the function is never called, but would not compile for a 64-bit number
        text, error, says = text.replace("v + by[0]", "float(total(long(v)))"), NotCompiled, "at most 32 bits"
    with pytest.raises(error, match=says):
        compile_shader(text)


def test_a_threadgroup_is_not_larger_than_what_its_function_was_compiled_for() -> None:
    shaders = compile_shader(ADD.replace("kernel void", "[[max_total_threads_per_threadgroup(64)]]\nkernel void", 1))
    x, y = torch.ones(128), torch.zeros(128)
    shaders.add(x, y, [2.0], threads=128, group_size=64)
    assert torch.equal(y, x + 2)
    with pytest.raises(ValueError, match=r"a threadgroup of \(128, 1, 1\); it was compiled for 64 threads"):
        shaders.add(x, y, [2.0], threads=128, group_size=128)


def test_half_types_have_no_arithmetic() -> None:
    text = ADD.replace("device const float* x", "device const half* x").replace("const float v", "const half v")
    with pytest.raises(NotCompiled, match=r"no match for .operator"):
        compile_shader(text)


def test_a_machine_without_a_compiler_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    compiler.compiler.cache_clear()
    try:
        with pytest.raises(
            NoCompiler, match=r"install one .apt-get install g.., xcode-select --install. or name one in .* CXX"
        ):
            compiler.compiler()
        monkeypatch.setenv("CXX", "no-such-compiler")
        with pytest.raises(NoCompiler, match="CXX names 'no-such-compiler', which is not there"):
            compiler.compiler()
    finally:
        compiler.compiler.cache_clear()


def test_what_was_compiled_is_kept_for_the_next_process(monkeypatch: pytest.MonkeyPatch) -> None:
    text = ADD + "// kept\n"
    compile_shader(text)
    compile_shader.cache_clear()
    monkeypatch.setattr(compiler, "_run", lambda *a: pytest.fail("compiled again"))
    compile_shader(text)


def test_what_somebody_changed_in_the_cache_is_not_loaded(caplog: pytest.LogCaptureFixture) -> None:
    artifacts.write("somebody's", b"code")
    assert artifacts.read("somebody's") == b"code"
    folder = place.existing_cache()
    assert folder is not None
    for found in Path(folder.path).glob("*.made"):
        found.write_bytes(found.read_bytes()[:-1] + b"!")
    assert artifacts.read("somebody's") is None
    assert "cannot be used" in caplog.text


@pytest.mark.parametrize("checked", [False, True])
def test_the_precompiled_header_is_taken(checked: bool, tmp_path: Path) -> None:
    if "clang" in compiler._version():
        pytest.skip("clang looks for no precompiled header beside an #include; runs where: g++")
    source = tmp_path / "shaders.cpp"
    source.write_text(HEAD)
    shown = [compiler.compiler(), *compiler._flags(), *compiler._headers(checked), "-H", "-fsyntax-only", str(source)]
    done = subprocess.run(shown, capture_output=True, text=True, check=True)
    assert re.match(r"! .*metal_stdlib\.gch$", done.stderr.splitlines()[0]), done.stderr

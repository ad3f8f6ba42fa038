"""The shim runs threads in lockstep, so that races on a device also fail here and are found."""

from __future__ import annotations

import pytest
import torch

from fusewright.toolkit.ir import Extent, symbol
from fusewright_mps.emitter import emit, library
from fusewright_mps.simulate.library import SimulationError, compile_shader
from tests.backends.mps import representative

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
BARRIER = "    threadgroup_barrier(mem_flags::mem_threadgroup);\n"
SUM = """
kernel void row_sum(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], constant long* sizes [[buffer(2)]],
                    uint3 at [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]],
                    uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup float parts[4];
    const int n = int(sizes[0]);
    float a = 0.0f;
    for (int r = int(tid); r < n; r += 128) {
        const float v = x[int(at.x) * n + r];
        a = a + v;
    }
    a = simd_sum(a);
    if (lane == 0) { parts[simd] = a; }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    a = lane < 4 ? float(parts[lane]) : 0.0f;
    a = simd_sum(a);
    if (tid == 0) { y[int(at.x)] = a; }
}
"""


def row_sum(text: str, checked: bool, n: int = 1000, told: int = 1000) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result and the expected one."""
    torch.manual_seed(0)
    x, y = torch.randn(6, n), torch.zeros(6)
    shaders = compile_shader(HEAD + text, checked)
    shaders.row_sum(x, y, [told], threads=(6 * 128, 1, 1), group_size=(128, 1, 1))
    return y, x.sum(1)


@pytest.mark.parametrize("checked", [False, True])
def test_barriers_and_simd_reductions_are_honoured(checked: bool) -> None:
    got, want = row_sum(SUM, checked)
    torch.testing.assert_close(got, want)


def test_without_its_barrier_a_sum_is_wrong_and_the_race_is_named() -> None:
    got, want = row_sum(SUM.replace(BARRIER, ""), checked=False)
    assert not torch.allclose(got, want)
    with pytest.raises(SimulationError, match=r"row_sum, line \d+: parts\[1\] is read and written by threads"):
        row_sum(SUM.replace(BARRIER, ""), checked=True)


def test_without_its_simd_reduction_a_sum_is_wrong() -> None:
    got, want = row_sum(SUM.replace("    a = simd_sum(a);\n    if (lane", "    if (lane"), checked=False)
    assert not torch.allclose(got, want)


def test_a_load_past_the_end_names_kernel_line_and_element() -> None:
    with pytest.raises(
        SimulationError, match=r"row_sum, line 11: load of x\[\d+\], which has 6000 elements\n.*const float v"
    ):
        row_sum(SUM, checked=True, told=1001)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("y[int(tid) + 1] = 1.0f;", "line 5: store of y.64., which has 64 elements"),
        ("y[int(tid) - 1] = 1.0f;", "line 5: store of y.-1., which has 64 elements"),
        ("y[0] = float(tid);", "line 5: y.0. is written twice by threads 0 and 1 with no barrier between"),
        ("*(device float4*)(y + 1) = float4{};", "line 5: y is not aligned to 16 bytes"),
        (
            "if (tid < 40) { threadgroup_barrier(mem_flags::mem_device); }",
            "thread 40 has left the kernel, and thread 0 waits",
        ),
        ("y[tid] = lane < 3 ? simd_sum(1.0f) : 0.0f;", None),
        (
            "if (lane < 3) { y[tid] = simd_sum(1.0f); } else { threadgroup_barrier(mem_flags::mem_device); }",
            "meet at different places",
        ),
    ],
)
def test_what_threads_do_wrong_is_said_with_kernel_and_line(body: str, says: str | None) -> None:
    text = f"{HEAD}kernel void wrong(device float* y [[buffer(0)]], uint tid [[thread_index_in_threadgroup]],\n"
    text += f"                  uint lane [[thread_index_in_simdgroup]]) {{\n    {body}\n    if (lane == 99) y[tid] = 0.0f;\n}}\n"
    shaders = compile_shader(text, checked=True)
    if says is None:  # lanes that have returned do not count
        shaders.wrong(torch.zeros(64), threads=64, group_size=64)
        return
    with pytest.raises(SimulationError, match=says):
        shaders.wrong(torch.zeros(64), threads=64, group_size=64)


@pytest.mark.parametrize(("cols", "barriers"), [(5000, 2), (symbol("n"), 1)])
def test_each_emitted_barrier_is_needed(cols: Extent, barriers: int) -> None:
    """Removing any barrier of a long softmax is detected, whether the row is held or read twice."""
    source = emit(representative.softmax(3, cols))
    text = library([source])
    assert source.text.count("threadgroup_barrier") == barriers
    sizes = [] if isinstance(cols, int) else [[5000]]
    for k in range(barriers):
        at = [i for i in range(len(text)) if text.startswith(BARRIER, i)][k]
        shaders = compile_shader(text[:at] + text[at + len(BARRIER) :], checked=True)
        d = source.dispatches[0]
        with pytest.raises(SimulationError, match="with no barrier between"):
            run = getattr(shaders, d.entry)
            run(torch.randn(3, 5000), torch.empty(3, 5000), *sizes, threads=d.threads, group_size=d.group)


def test_threadgroup_memory_holds_nothing_when_a_group_begins() -> None:
    text = (
        HEAD
        + """
kernel void stale(device float* y [[buffer(0)]], uint3 at [[threadgroup_position_in_grid]],
                  uint tid [[thread_index_in_threadgroup]]) {
    threadgroup float t[32];
    if (at.x == 0) { t[tid] = 1.0f; }
    y[at.x * 32 + tid] = t[tid];
}
"""
    )
    y = torch.zeros(64)
    compile_shader(text, checked=False).stale(y, threads=64, group_size=32)
    assert torch.equal(y[:32], torch.ones(32))
    assert y[32:].isnan().all()

"""oneDNN's report of what it runs, and detection of reference kernels in it."""

from __future__ import annotations

import pytest
import torch

from fusewright_acl import verbose
from tests.hosts import FLOATS

LINES = """onednn_verbose,v1,info,oneDNN v3.7.1 (commit 8d263e69)
onednn_verbose,v1,primitive,info,template:operation,engine,primitive,implementation,prop_kind,memory_descriptors
onednn_verbose,v1,primitive,exec,cpu,reorder,jit:uni,undef,src:bf16::blocked:ba::f0 dst:bf16::blocked:ba::f0,,,8x8,3.5
onednn_verbose,v1,primitive,exec,cpu,inner_product,ref:any,forward_inference,src:bf16::blocked:ab::f0,,,mb64ic256oc512,2006.2
loss 0.3 onednn_verbose,v1,primitive,exec,cpu,convolution,gemm:ref,backward_data,src:f32::f0,,alg:convolution_direct,mb2_ic16,1.5
onednn_verbose,v1,primitive,exec,cpu,deconvolution,conv:any+ref:any,forward_training,src:bf16::f0,,alg:x,mb2_ic16,1.5
onednn_verbose,v1,primitive,exec,cpu,eltwise,ref:any,forward_inference,data:f32::f0,,alg:x,8,1.5
onednn_verbose,v1,primitive,exec,cpu,matmul,gemm:acl,undef,src:f32::blocked:ab::f0,,,64x256:256x512,143.3
nothing of oneDNN
"""


def test_lines_of_executions_are_read_and_others_skipped() -> None:
    found = verbose.parse(LINES)
    assert [e.primitive for e in found] == ["reorder", "inner_product", "convolution", "deconvolution", "eltwise", "matmul"]
    assert found[1] == verbose.Execution("inner_product", "ref:any", "forward_inference", "mb64ic256oc512")


def test_heavy_reference_kernels_are_named_and_light_ones_are_not() -> None:
    assert [e.implementation for e in verbose.references(verbose.parse(LINES))] == ["ref:any", "gemm:ref", "conv:any+ref:any"]


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_a_call_executes(dtype: torch.dtype, capfd: pytest.CaptureFixture[str]) -> None:
    x, w = torch.randn(8, 64, dtype=dtype), torch.randn(32, 64, dtype=dtype)
    packed = torch.ops.mkldnn._reorder_linear_weight(w, 8)

    def run() -> None:
        print("beside it")
        torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")

    found = [e for e in verbose.executed(run) if e.heavy]
    assert [e.primitive for e in found] == ["inner_product"]
    assert capfd.readouterr().out.strip() == "beside it"
    run()
    assert "onednn_verbose" not in capfd.readouterr().out


@pytest.mark.hardware("graviton_acl")
def test_the_guard_sees_what_it_guards_against() -> None:
    """A weight packed as on x86 runs in a reference kernel in bf16; when that changes, `products` may be simplified."""
    x, w = torch.randn(8, 64).bfloat16(), torch.randn(32, 64).bfloat16()
    packed = torch.ops.mkldnn._reorder_linear_weight(w, 8)
    found = verbose.executed(lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""))
    assert verbose.references(found)

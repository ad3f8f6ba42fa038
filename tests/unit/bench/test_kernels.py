"""Memory-bound kernels: what they compute and what they move."""

import pytest
import torch

from fusewright.bench.cases.kernels import KERNELS, SIZES, bandwidth, build_kernel, names
from fusewright.bench.suite import UnknownModel


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_kernel_runs(kernel, dtype):
    built = build_kernel(f"kernel:{kernel}:64x768", dtype)
    out = built.run()
    assert out.shape == (64, 768)
    assert out.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]


def test_bytes_are_inputs_read_once_and_the_output_written_once():
    assert build_kernel("kernel:softmax:64x768", "fp32").extra["bytes"] == 2 * 64 * 768 * 4
    assert build_kernel("kernel:layer_norm:64x768", "bf16").extra["bytes"] == (2 * 64 * 768 + 2 * 768) * 2
    assert len(names()) == len(KERNELS) * len(SIZES)


def test_bandwidth_of_a_row():
    row = {
        "extra": {"bytes": 4_000_000},
        "contenders": {"ours": {"status": "ok", "steady": {"median_ms": 2.0}}},
    }
    assert bandwidth(row, "ours") == pytest.approx(2.0)
    assert bandwidth(row, "inductor") is None


def test_an_unknown_kernel():
    with pytest.raises(UnknownModel, match="did you mean 'kernel:softmax:64x768'"):
        build_kernel("kernel:softmx:64x768", "fp32")
    with pytest.raises(UnknownModel, match="not amp"):
        build_kernel("kernel:softmax:64x768", "amp")

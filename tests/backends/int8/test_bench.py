"""`fusewright bench --int8`: who is measured, in what order, and what is never called."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torchao", reason="torchao is an optional dependency of fusewright-int8 (extra `quantize`)")

from click.testing import CliRunner

from fusewright.cli.app import app
from fusewright.quantization import bench, quantization_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_an_engine_that_ends_the_process_is_never_called() -> None:
    with pytest.raises(RuntimeError, match="crashes the process in linear_dynamic"):
        bench.guarded("onednn", "linear_dynamic")
    with pytest.raises(RuntimeError, match="has no engine 'none'"):
        bench.guarded("none", "linear")


@pytest.mark.parametrize("name", bench.ENGINES)
@pytest.mark.filterwarnings("ignore:torch.quantize_per:UserWarning")
def test_torchs_engines_give_what_the_arithmetic_says(name: str) -> None:
    before = torch.backends.quantized.engine
    y = bench.torch_linear(name, 4, 32, 8)()
    assert y.shape == (4, 8) and y.dtype == torch.quint8
    assert bench.torch_conv(name, (1, 4, 6, 6), (8, 4, 3, 3), 1, 1)().shape == (1, 8, 6, 6)
    assert torch.backends.quantized.engine == before


def test_contenders_that_fail_are_told_and_the_others_measured() -> None:
    def fails() -> None:
        raise ValueError("not here")

    row = bench.interleaved("x", {"good": lambda: None, "bad": fails}, 0.01)
    assert row.seconds.keys() == {"good"} and row.failed == {"bad": "ValueError: not here"}


def test_each_engine_of_ours_has_a_bare_call() -> None:
    by = quantization_of("x86_int8")
    for op, sizes, shape in (("linear", (4, 32, 8), (4, 8)), ("conv", ((1, 4, 6, 6), (8, 4, 3, 3), 1, 1), (1, 8, 6, 6))):
        found = by.kernels(op, sizes)
        assert "onednn" in found
        assert all(run().shape == shape for run in found.values())


@pytest.mark.slow
def test_the_command_prints_a_row_for_a_model() -> None:
    done = CliRunner().invoke(app, ["bench", "--int8", "distilbert", "--size", "small", "--seconds", "0.2", "--against", ""])
    assert done.exit_code == 0, done.output
    assert all(f"{who} " in done.output for who in ("fp32", "bf16", "int8 static", "int8 dynamic, bf16 around"))


def test_the_quantize_command_tells_each_layer(tmp_path: pytest.TempPathFactory) -> None:
    file = tmp_path / "m.py"  # type: ignore[operator]
    model = "torch.nn.Sequential(torch.nn.Linear(8, 4)).eval()"
    file.write_text(f"import torch\ndef build():\n    return {model}, (torch.randn(3, 8),)\n")
    saved = tmp_path / "m.pt2"  # type: ignore[operator]
    done = CliRunner().invoke(app, ["quantize", f"{file}:build", "--report", "--save", str(saved)])
    assert done.exit_code == 0, done.output
    assert "dB" in done.output and saved.exists()
    assert torch.export.load(saved).module()(torch.randn(3, 8)).shape == (3, 4)

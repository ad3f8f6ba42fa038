"""`fusewright bench --int8`: which contenders are measured, in what order, and what is never called."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchao", reason="torchao is an optional dependency of fusewright-int8 (extra `quantize`)")

from click.testing import CliRunner
from rich.console import Console

import fusewright
from fusewright.bench import report, tables
from fusewright.cli.app import app
from fusewright.errors import QuantizationError
from fusewright.quantization import bench, quantization_of
from tests.backends.int8.common import ENGINES

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


def test_a_row_is_one_of_a_document_of_bench() -> None:
    row = bench.Row("linear 1x2x3", {"fp32": [2e-3, 4e-3, 2e-3], "int8 static": [1e-3, 2e-3, 1e-3]}, {"inductor": "not here"})
    assert row.seconds == {"fp32": 2e-3, "int8 static": 1e-3}
    written = row.as_json("int8 shapes, 1 thread")
    ours = written["contenders"]["int8 static"]
    assert ours["speedup"] == pytest.approx(2) and ours["steady"]["median_ms"] == pytest.approx(1)
    assert written["contenders"]["inductor"] == {"status": "failed", "reason": "not here"}
    document = report.new_document(["fusewright"], "x86_int8", {"threads": 1})
    report.put(document, written)
    assert document["rows"] == [written] and list(tables.render(document))


def test_products_are_held_against_fbgemm_and_the_published_figure() -> None:
    document = report.new_document(["fusewright"], "x86_int8", {"threads": 1})
    for k in range(3):
        times = {"fbgemm": [2e-3] * 5, "x86": [1e-3] * 5, "ours core": [1.6e-3] * 5, "ours onednn": [1e-3] * 5}
        report.put(document, bench.Row(f"linear 1x2x{k}", times, {"inductor pt2e": "not here"}).as_json("int8 shapes, 1 thread"))
    console = Console(width=200, record=True, file=io.StringIO())
    for part in tables.render(document, 200):
        console.print(part)
    text = console.export_text()
    assert "1.000 (2.00x)" in text or "1 (2.00x)" in text, text
    assert "x86 over fbgemm: 2.00x (published 1.76x" in text and "the better of ours: 2.00x, worst 2.00x" in text
    assert "inductor pt2e failed: not here" in text


@pytest.mark.slow
def test_inductor_packs_the_weights_of_a_quantized_graph() -> None:
    x = torch.randn(4, 64)
    run = bench._by_inductor(fusewright.quantize(torch.nn.Linear(64, 32).eval(), [x], dynamic_batch=False), x)
    assert run().shape == run().shape == (4, 32)


def test_each_engine_of_ours_has_a_bare_call() -> None:
    by = quantization_of("x86_int8")
    for op, sizes, shape in (("linear", (4, 32, 8), (4, 8)), ("conv", ((1, 4, 6, 6), (8, 4, 3, 3), 1, 1), (1, 8, 6, 6))):
        found = by.kernels(op, sizes)
        assert tuple(found) == ENGINES
        assert all(run().shape == shape for run in found.values())


@pytest.mark.slow
def test_the_command_prints_and_writes_a_row_for_a_model(tmp_path: Path) -> None:
    file = tmp_path / "int8.json"
    model = ["distilbert", "--size", "small", "--batch", "3"]
    asked = ["bench", "--int8", *model, "--seconds", "0.2", "--against", "", "--json", str(file)]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert [row["model"] for row in report.load(file)["rows"]] == ["distilbert, batch 3"]
    assert all(f"{who} " in done.output for who in ("fp32", "bf16", "int8 static", "int8 dynamic, bf16 around"))


def test_only_quantized_models_take_a_batch() -> None:
    done = CliRunner().invoke(app, ["bench", "bert", "--batch", "8"])
    assert done.exit_code == 2 and "give --int8 too" in done.output


def test_the_quantize_command_tells_each_layer(tmp_path: pytest.TempPathFactory) -> None:
    file = tmp_path / "m.py"  # type: ignore[operator]
    model = "torch.nn.Sequential(torch.nn.Linear(8, 4)).eval()"
    file.write_text(f"import torch\ndef build():\n    return {model}, (torch.randn(3, 8),)\n")
    saved = tmp_path / "m.pt2"  # type: ignore[operator]
    done = CliRunner().invoke(app, ["quantize", f"{file}:build", "--report", "--save", str(saved)])
    assert done.exit_code == 0, done.output
    assert "dB" in done.output and saved.exists()
    shown = done.output.partition("`")[2].partition("`")[0]
    assert str(saved) in shown
    alone = f"import sys, torch; {shown}(torch.ones(3, 8)); assert 'torchao' not in sys.modules"
    fresh = subprocess.run([sys.executable, "-c", alone], capture_output=True, text=True, check=False)
    assert fresh.returncode == 0, f"a process that has not quantized cannot load it: {fresh.stderr}"


LOADING = """
import sys, torch
from fusewright.quantization import load
for recipe in sys.argv[1:]:
    x, y = torch.load(recipe)
    m = load(recipe + ".pt2")
    assert torch.equal(m(x), y), recipe
    torch.testing.assert_close(torch.compile(m, backend="x86_int8")(x), y)
"""


def test_a_saved_model_loads_where_nothing_was_quantized(tmp_path: Path) -> None:
    x, recipes = torch.randn(3, 8), ("static", "dynamic", "weight_only")
    for recipe in recipes:
        quantized = fusewright.quantize(torch.nn.Sequential(torch.nn.Linear(8, 4)).eval(), [x], recipe)
        torch.export.save(torch.export.export(quantized, (x,)), tmp_path / f"{recipe}.pt2")
        torch.save((x, quantized(x)), tmp_path / recipe)
    command = [sys.executable, "-c", LOADING, *recipes]
    fresh = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert fresh.returncode == 0, fresh.stderr


def test_the_quantize_command_refuses_a_model_that_is_quantized(tmp_path: Path) -> None:
    """Such a module refuses `eval`."""
    model = "torch.nn.Sequential(torch.nn.Linear(8, 4)).eval()"
    made = f"fusewright.quantize({model}, [torch.ones(3, 8)])"
    (tmp_path / "m.py").write_text(f"import fusewright, torch\ndef build():\n    return {made}, (torch.ones(3, 8),)\n")
    done = CliRunner().invoke(app, ["quantize", f"{tmp_path / 'm.py'}:build"])
    assert isinstance(done.exception, QuantizationError) and "quantized already" in str(done.exception)


def test_what_cannot_be_written_or_kept_is_said_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("def build():\n    raise AssertionError('never built')\n")
    done = CliRunner().invoke(app, ["quantize", f"{tmp_path / 'm.py'}:build", "--save", str(tmp_path / "no" / "m.pt2")])
    assert done.exit_code == 2 and "there is no folder" in done.output
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4)).eval()
    with pytest.raises(QuantizationError, match=r"keep='encoder\.\*' names no module of the model; valid names: 0, 2"):
        fusewright.quantize(model, [torch.randn(3, 8)], keep=["0", "encoder.*"])

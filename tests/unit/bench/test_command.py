"""`fusewright bench` from end to end on a tiny model."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from fusewright.bench.cases import large
from fusewright.bench.steady import ModelFailed
from fusewright.bench.turns import TURNS
from fusewright.cli.bench import bench
from fusewright.errors import FusewrightError

TOYS = Path(__file__).with_name("toy_models.py")


def call(*args):
    return CliRunner().invoke(bench, [str(arg) for arg in args])


def entry(*times, **more):
    times_ms = {"median_ms": times[0], "p10_ms": times[0], "p90_ms": times[0], "cv": 0.01, "rounds_ms": times}
    return {"status": "ok", "steady": times_ms, "speedup": 10 / times[0], **more}


def fake_row(model, dtype, mode):
    accuracy = {"passed": True, "ratio_max": 1.2, "ratio_rms": 1.0, "reason": ""}
    contenders = {
        "eager": entry(10.0), "inductor": {"status": "failed", "reason": "no compiler"},
        "dynamo-eager": entry(5.0, accuracy=accuracy),
    }  # fmt: skip
    if model.startswith("kernel:"):
        contenders |= {"inductor": entry(6.0), "copy": entry(4.0)}
    row = {"model": model, "dtype": dtype, "mode": mode, "noise": "low", "contenders": contenders}
    return {**row, "extra": {"bytes": 1_000_000}}


@pytest.fixture
def faked(monkeypatch):
    """Replace measuring by a fake that answers at once and records its arguments."""
    asked = []

    def measure(model, dtype, contenders, settings, progress):
        asked.append((model, dtype, [c.name for c in contenders], settings))
        if model == "vit":
            raise ModelFailed("eager: out of memory")
        return fake_row(model, dtype, "train" if settings.train else "inference")

    monkeypatch.setattr("fusewright.cli.bench.measure", measure)
    return asked


def test_a_real_run_prints_a_table_and_writes_the_document(tmp_path):
    file = tmp_path / "run.json"
    options = ("--backend", "eager", "--against", "zentorch", "--seconds", "0.1", "--no-first-call")
    done = call(f"{TOYS}:mlp", *options, "--threads", "1", "--json", file)
    assert done.exit_code == 0, done.output
    for text in ("median", "dynamo-eager", "1.00x", "zentorch"):
        assert text in done.output
    document = json.loads(file.read_text())
    assert document["backend"] == "dynamo-eager"
    assert document["rows"][0]["contenders"]["dynamo-eager"]["accuracy"]["passed"]
    again = call("--show", file)
    assert again.exit_code == 0
    assert "dynamo-eager" in again.output
    assert call("--show", file, "--dtype", "fp32").output == again.output
    none = call("--show", file, "--dtype", "bf16")
    assert none.exit_code == 2 and "the document has" in none.output and "fp32" in none.output


def test_the_suite_in_both_dtypes_goes_on_after_a_failure(faked, tmp_path):
    file = tmp_path / "run.json"
    done = call("--suite", "--backend", "eager", "--against", "inductor", "--json", file)
    assert done.exit_code == 0, done.output
    assert len(faked) == 22
    assert "vit fp32: eager: out of memory" in done.output
    assert "bert fp32: inductor failed: no compiler" in done.output
    assert "geomean" in done.output
    assert len(json.loads(file.read_text())["rows"]) == 20


def test_training_and_kernels_choose_their_own_cases(faked):
    assert call("--train", "--backend", "eager").exit_code == 0
    assert {(model, dtype) for model, dtype, _, _ in faked} >= {("resnet18", "amp"), ("bert_small", "fp32")}
    assert faked[0][2] == ["eager", "inductor", "dynamo-eager"]
    faked.clear()
    done = call("--kernels", "--backend", "eager", "--dtype", "bf16")
    assert done.exit_code == 0, done.output
    assert faked[0][2] == ["eager", "inductor", "dynamo-eager", "copy"]
    assert "geomean 1.20x, worst 1.20x over inductor" in done.output


def test_pieces_can_be_measured_into_one_file(faked, tmp_path):
    file = tmp_path / "run.json"
    for model in ("bert", "gpt2"):
        assert call(model, "--backend", "eager", "--json", file, "--append").exit_code == 0
    assert [row["model"] for row in json.loads(file.read_text())["rows"]] == ["bert", "gpt2"]


def test_a_regression_or_nothing_measured_is_exit_code_1(faked, tmp_path):
    file = tmp_path / "run.json"
    assert call("bert", "--backend", "eager", "--json", file).exit_code == 0
    assert call("bert", "--backend", "eager", "--baseline", file).exit_code == 0
    better = json.loads(file.read_text())
    better["rows"][0]["contenders"]["dynamo-eager"]["speedup"] = 4.0
    file.write_text(json.dumps(better))
    done = call("bert", "--backend", "eager", "--baseline", file)
    assert done.exit_code == 1
    assert "regressed: bert fp32: 2.00x over eager, 4.00x in the baseline" in done.output
    assert call("vit", "--backend", "eager").exit_code == 1


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("brt",), "no model 'brt'; did you mean 'bert'"),
        (("bert", "--backend", "inductr"), "no backend 'inductr'; did you mean 'inductor'"),
        (("bert", "--against", "inductr"), "no backend 'inductr'"),
        (("bert", "--dtype", "fp31"), "no dtype 'fp31'; did you mean 'fp32'"),
        (("--kernels", "--dtype", "amp"), "kernels are measured in fp32, bf16"),
        (("--kernels", "bert"), "takes no models"),
        ((), "name a MODEL"),
        (("bert", "--baseline", "missing.json"), "missing.json"),
    ],
)
def test_wrong_usage_is_refused_before_anything_runs(faked, args, says):
    done = call(*(args if "--backend" in args or not args else (*args, "--backend", "eager")))
    assert done.exit_code != 0
    assert faked == []
    text = str(done.exception) if isinstance(done.exception, FusewrightError) else done.output
    assert says in text


def test_a_file_that_cannot_be_written_is_refused_first(faked, tmp_path):
    done = call("bert", "--backend", "eager", "--json", tmp_path / "none" / "run.json")
    assert done.exit_code == 2 and "there is no folder" in done.output and faked == []
    assert call("bert", "--backend", "eager", "--json", tmp_path).exit_code == 2 and faked == []


def test_a_baseline_says_what_it_did_not_compare(faked, tmp_path):
    file = tmp_path / "run.json"
    assert call("bert", "--backend", "eager", "--json", file).exit_code == 0
    same = call("bert", "--backend", "eager", "--baseline", file)
    assert "no row is slower than in the baseline by more than 7%" in same.output
    other = call("gpt2", "--backend", "eager", "--baseline", file)
    assert "not compared: bert fp32 inference: only in the baseline" in other.output
    assert "not compared: gpt2 fp32 inference: not in the baseline" in other.output


def test_one_model_is_quick_and_the_suite_is_thorough(faked):
    call("bert", "--backend", "x86_onednn")
    assert faked[-1][2] == ["eager", "inductor", "x86_onednn"] and not faked[-1][3].thorough
    call("bert", "--backend", "x86_onednn", "--thorough")
    assert "inductor-freezing" in faked[-1][2] and faked[-1][3].thorough
    call("--suite", "--dtype", "fp32", "--backend", "x86_onednn")
    assert "inductor-freezing" in faked[-1][2] and faked[-1][3].thorough


def test_progress_is_said_in_a_pipe_too(monkeypatch):
    def measure(model, dtype, contenders, settings, progress):
        progress("compiling by inductor")
        return fake_row(model, dtype, "inference")

    monkeypatch.setattr("fusewright.cli.bench.measure", measure)
    assert "[1/1] bert fp32: compiling by inductor" in call("bert", "--backend", "eager").output


def test_ctrl_c_ends_with_130_and_keeps_what_was_measured(monkeypatch, tmp_path):
    def measure(model, dtype, contenders, settings, progress):
        if model == "gpt2":
            raise KeyboardInterrupt
        return fake_row(model, dtype, "inference")

    monkeypatch.setattr("fusewright.cli.bench.measure", measure)
    done = call("bert", "gpt2", "vit", "--backend", "eager", "--json", tmp_path / "run.json")
    assert done.exit_code == 130 and "interrupted at gpt2 fp32; 1 more was not measured" in done.output
    assert len(json.loads((tmp_path / "run.json").read_text())["rows"]) == 1
    with TURNS.worker({}, 1):  # the next run of this process is not stopped
        pass


def test_rows_are_prepared_ahead_only_where_first_calls_are_not_timed(faked):
    assert "first calls are not timed" in call("bert", "--backend", "eager", "--ahead", "2").output
    done = call("bert", "gpt2", "vit", "--backend", "eager", "--ahead", "2", "--no-first-call")
    assert done.exit_code == 0 and {model for model, *_ in faked} == {"bert", "gpt2", "vit"}
    assert {settings.ahead for *_, settings in faked} == {2}


def test_large_models_come_in_bf16_and_decoding_beside_a_copy(faked):
    done = call("--large", "decode:llama", "--dtype", "bf16", "--backend", "eager", "--against", "reduce-overhead")
    assert done.exit_code == 0, done.output
    assert [model for model, *_ in faked] == ["decode:llama", *large.names()]
    assert faked[0][2] == ["eager", "reduce-overhead", "dynamo-eager", "copy"] and faked[1][2][-1] == "dynamo-eager"
    faked.clear()
    call("--large", "--backend", "eager", "--against", "")
    assert {(dtype, settings.device) for _, dtype, _, settings in faked} == {("bf16", "cpu")}
    faked.clear()
    call("--large", "--train", "--backend", "eager", "--against", "")
    assert {dtype for _, dtype, *_ in faked} == {"amp"}


def test_models_are_where_our_backend_computes_unless_a_device_is_named(faked, monkeypatch):
    monkeypatch.setattr("fusewright.cli.bench.default_device", lambda backend, options: f"{backend} {dict(options)}")
    monkeypatch.setattr("fusewright.cli.bench.report.device_name", lambda device: "named")
    monkeypatch.setattr("fusewright.bench.report._accelerator", lambda device: {})
    call("bert", "--backend", "x86_onednn[simulate=true]", "--seconds", "0.1")
    call("bert", "--device", "cpu", "--seconds", "0.1")
    assert [settings.device for *_, settings in faked] == ["x86_onednn {'simulate': True}", "cpu"]


def test_a_device_that_is_not_here_is_refused_before_anything_runs(faked):
    done = call("bert", "--device", "nonsense")
    assert done.exit_code != 0 and "no device of torch" in str(done.exception) and not faked

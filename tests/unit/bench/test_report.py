"""The JSON document and the comparison with an earlier one."""

import json

import pytest

from fusewright.bench import report


def row(speedup, noise="low", status="ok", model="bert"):
    ours = {"status": status, "reason": "it broke"} if status != "ok" else {
        "status": "ok", "speedup": speedup, "steady": {"rounds_ms": [1.0], "median_ms": 1.0},
    }  # fmt: skip
    return {
        "model": model,
        "dtype": "fp32",
        "mode": "inference",
        "noise": noise,
        "contenders": {"ours": ours},
    }


def document(*rows):
    made = report.new_document(["fusewright", "bench", "bert"], "ours", {"threads": 2})
    for one in rows:
        report.put(made, one)
    return made


def test_a_document_says_what_was_measured_where(tmp_path):
    file = tmp_path / "run.json"
    report.save(document(row(2.0)), file)
    found = report.load(file)
    assert (found["schema"], found["schema_version"]) == ("fusewright.bench", 1)
    assert found["command"] == "fusewright bench bert"
    assert {"python", "torch", "fusewright"} <= found["versions"].keys()
    assert {"cpu", "cores", "features", "load_1min"} <= found["machine"].keys()
    assert found["date"].endswith("+00:00")
    assert "bars" not in found, "a user's run is not held against this project's goals"
    assert list(tmp_path.iterdir()) == [file]


def test_a_row_measured_again_replaces_the_old_one():
    made = document(row(2.0), row(1.0, model="vit"), row(3.0))
    assert [(r["model"], r["contenders"]["ours"]["speedup"]) for r in made["rows"]] == [
        ("vit", 1.0),
        ("bert", 3.0),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "Expecting"),
        ("[]", "is no fusewright.bench document"),
        (
            json.dumps({"schema": "fusewright.bench", "schema_version": 99}),
            "schema version 99, this is version 1",
        ),
    ],
)
def test_another_file_is_no_document(tmp_path, text, says):
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(report.BadDocument, match=says):
        report.load(file)
    with pytest.raises(report.BadDocument, match="No such file"):
        report.load(tmp_path / "missing.json")


def test_regressions():
    before = document(row(2.0))
    assert report.regressions(document(row(1.9)), before) == []
    assert report.regressions(document(row(1.5)), before) == ["bert fp32: 1.50x over eager, 2.00x in the baseline"]
    assert report.regressions(document(row(1.5, noise="high")), before) == []
    assert report.regressions(document(row(0, status="failed")), before) == [
        "bert fp32: it broke; it ran in the baseline"
    ]
    assert report.regressions(document(row(1.0, model="vit")), before) == []


def test_what_was_not_compared_is_said_with_the_reason():
    noisy = row(2.0, model="t5_small", noise="high")
    before = document(row(2.0), row(2.0, model="vit"), row(0, model="gpt2", status="failed"), noisy)
    now = document(row(1.9), row(2.0, model="gpt2"), row(2.0, model="t5_small"), row(2.0, model="resnet50"))
    assert set(report.not_compared(now, before)) == {
        "vit fp32 inference: only in the baseline",
        "resnet50 fp32 inference: not in the baseline",
        "gpt2 fp32 inference: ours did not run in the baseline",
        "t5_small fp32 inference: noisy in the baseline",
    }
    assert report.not_compared(document(row(1.9)), document(row(2.0))) == []
    others = {**document(row(1.9)), "backend": "others"}
    assert report.not_compared(others, document(row(2.0))) == [
        "the baseline is of ours, this run of others",
        "bert fp32 inference: others was not measured in this run",
    ]

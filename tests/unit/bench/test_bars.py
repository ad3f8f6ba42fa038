"""Bars: from rows to verdicts."""

import math

import pytest

from ci.bench.bars import BARS, DEVICE_BARS, judge, line
from fusewright.bench.stats import over


def entry(*times):
    return {"status": "ok", "steady": {"rounds_ms": times, "median_ms": times[0]}}


def row(model="bert", dtype="fp32", mode="inference", **times):
    contenders = {name.replace("_", "-"): entry(*value) for name, value in times.items()}
    return {"model": model, "dtype": dtype, "mode": mode, "contenders": contenders}


def verdicts(rows):
    return {bar["id"]: bar for bar in judge(rows, "ours")}


def test_nothing_measured_is_not_a_pass():
    assert {bar["verdict"] for bar in judge([], "ours")} == {"not measured"}
    assert len({bar.id for bar in BARS}) == len(BARS)


def test_geomeans_over_the_other_compilers():
    found = verdicts(
        [
            row(eager=(10, 10), inductor=(8, 8), inductor_freezing=(4, 4), zentorch=(1.9, 1.9), ours=(2, 2)),
            row("vit", eager=(10, 10), inductor=(2, 2), inductor_freezing=(4, 4), ours=(2, 2)),
        ]
    )
    assert (found["C1"]["value"], found["C1"]["verdict"], found["C1"]["models"]) == (2.0, "pass", 2)
    assert (found["C2"]["value"], found["C2"]["verdict"]) == (2.0, "pass")
    assert (found["C9"]["value"], found["C9"]["verdict"], found["C9"]["models"]) == (0.95, "pass", 1)
    assert found["C3"]["verdict"] == "not measured"


def test_models_slower_than_eager_are_named():
    found = verdicts([row(eager=(10,), ours=(11,)), row("vit", eager=(10,), ours=(10.2,))])
    assert found["C4"]["value"] == 1
    assert found["C4"]["detail"] == "bert fp32 0.91x"
    assert found["C4"]["verdict"] == "miss"
    assert verdicts([row(eager=(10,), ours=(10.2,))])["C4"]["verdict"] == "goal"


def test_a_noisy_row_gets_no_verdict():
    noisy = {**row("vit", eager=(10,), inductor=(10,), ours=(20,)), "noise": "high"}
    found = verdicts([row(eager=(10,), inductor=(10,), ours=(2,)), noisy])
    assert (found["C1"]["value"], found["C1"]["models"], found["C4"]["value"]) == (pytest.approx(5.0), 1, 0)
    assert "1 noisy rows left out" in line(found["C1"])
    assert verdicts([noisy])["C1"]["verdict"] == "not measured"


def test_training_counts_for_its_own_bar_only():
    found = verdicts([row("bert_small", "amp", "train", eager=(30,), inductor=(1,), ours=(10,))])
    assert (found["C8"]["value"], found["C8"]["verdict"]) == (pytest.approx(3.0), "goal")
    assert found["C1"]["verdict"] == found["C4"]["verdict"] == "not measured"


def first_calls(**seconds):
    calls = {name: {"cold_s": cold, "warm_s": warm} for name, (cold, warm) in seconds.items()}
    return {**row(), "first_call": calls}


def test_first_calls_and_the_backends_own_share():
    found = verdicts([first_calls(inductor=(20, 6), aot_eager=(4, 4), ours=(5, 3))])
    assert (found["C5"]["value"], found["C5"]["verdict"]) == (4.0, "pass")
    assert (found["C7"]["value"], found["C7"]["verdict"]) == (2.0, "pass")
    assert (found["C6"]["value"], found["C6"]["verdict"]) == (16.0, "pass")
    # Faster than aot_eager: our own share is zero, so the ratio would be infinite, which JSON lacks.
    found = verdicts([first_calls(inductor=(20, 6), aot_eager=(4, 4), ours=(2, 1))])
    assert (found["C6"]["value"], found["C6"]["verdict"]) == (None, "goal")


def test_memory_is_judged_by_the_worst_model():
    rows = [row(), row("vit")]
    for one, peak in zip(rows, (90, 120), strict=True):
        one["memory"] = {"eager": {"call_peak": 100}, "ours": {"call_peak": peak}}
    found = verdicts(rows)
    assert (found["M1"]["value"], found["M1"]["verdict"], found["M1"]["detail"]) == (1.2, "miss", "vit fp32")


def test_a_contender_that_failed_is_not_compared_with():
    one = row(eager=(10,), ours=(5,))
    one["contenders"]["inductor"] = {"status": "failed", "reason": "no compiler"}
    assert over(one, "ours", "inductor") is None
    assert over(one, "ours", "eager") == 2.0
    assert not math.isnan(over(one, "ours", "eager"))


def test_a_verdict_in_words():
    found = verdicts([row(eager=(10,), ours=(11,))])
    assert "C4  miss" in line(found["C4"]) and "bert fp32 0.91x" in line(found["C4"])
    assert "not measured" in line(found["C1"])


def test_a_device_has_bars_of_its_own():
    rows = [
        row("large:bert", "bf16", eager=(10, 10), inductor=(5, 5), reduce_overhead=(4, 4), ours=(2, 2)),
        row("large:bert", "amp", "train", eager=(10, 10), inductor=(5, 5), ours=(5, 5)),
        row("decode:llama", "bf16", eager=(50, 50), inductor=(9, 9), reduce_overhead=(3, 3), ours=(2.5, 2.5), copy=(2, 2)),
    ]
    found = {bar["id"]: bar for bar in judge(rows, "ours", DEVICE_BARS)}
    assert (found["G1"]["value"], found["G1"]["models"], found["G1"]["verdict"]) == (2.5, 1, "goal"), "decoding is no part of it"
    assert (found["G2"]["value"], found["G3"]["value"]) == (2.0, 1.0)
    assert (found["share"]["value"], found["share"]["verdict"]) == (0.8, "goal")
    assert found["decode"]["value"] == pytest.approx(1.2) and found["G4"]["verdict"] == "not measured"

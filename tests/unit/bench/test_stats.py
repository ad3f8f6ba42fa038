"""Statistics of timings."""

import math

import pytest

from fusewright.bench.stats import geomean, noise_verdict, paired_ratio, quantile, summarize


def test_summary_of_rounds():
    found = summarize([[0.010, 0.012], [0.011, 0.011]])
    assert found.median_ms == pytest.approx(11.0)
    assert found.p10_ms == pytest.approx(10.3)
    assert found.p90_ms == pytest.approx(11.7)
    assert found.calls == 4
    assert found.rounds_ms == pytest.approx((11.0, 11.0))
    assert found.cv == pytest.approx(0.0)


def test_one_late_call_moves_neither_median_nor_cv():
    quiet, late = [0.01] * 5, [0.01] * 4 + [1.0]
    found = summarize([quiet, late, quiet])
    assert found.median_ms == pytest.approx(10.0)
    assert found.cv == pytest.approx(0.0)


def test_a_disturbed_round_is_in_the_cv_and_not_in_the_spread():
    found = summarize([[0.0100], [0.0101], [0.0100], [0.0099], [0.0100], [0.0101], [0.0500], [0.0100]])
    assert found.cv > 0.5
    assert 0 < found.spread < 0.01


def test_one_round_has_no_variation_to_speak_of():
    assert math.isnan(summarize([[0.01]]).cv)
    assert noise_verdict([math.nan]) == "unknown"


def test_quantile_interpolates():
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([0.0, 10.0], 0.9) == pytest.approx(9.0)
    assert quantile([5.0], 0.1) == 5.0
    with pytest.raises(ValueError, match="no values"):
        quantile([], 0.5)


def test_drift_of_the_machine_cancels_in_the_paired_ratio():
    # The machine becomes three times slower during the run; each round still shows 2x.
    eager, ours = [10.0, 20.0, 30.0], [5.0, 10.0, 15.0]
    assert paired_ratio(eager, ours) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="zip"):
        paired_ratio(eager, ours[:2])


def test_geomean():
    assert geomean([1.0, 4.0]) == pytest.approx(2.0)
    assert math.isnan(geomean([]))


@pytest.mark.parametrize(("spread", "verdict"), [(0.01, "low"), (0.05, "some"), (0.2, "high")])
def test_the_worst_contender_decides_the_noise(spread, verdict):
    assert noise_verdict([0.001, spread, math.nan]) == verdict

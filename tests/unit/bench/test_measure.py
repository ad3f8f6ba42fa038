"""Measuring in child processes: the order of rounds, failures of one contender, crashes."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fusewright.bench.contenders import EAGER, KNOWN, UnknownContender, from_backend
from fusewright.bench.measure import first_call, measure
from fusewright.bench.steady import PATIENCE, Lane, ModelFailed, Settings, run_rounds
from fusewright.bench.worker import Worker, WorkerError

TOYS = Path(__file__).with_name("toy_models.py")
QUICK = Settings(seconds=0.05, warm_seconds=0.05, min_rounds=2, max_rounds=3, timeout=300)
DYNAMO = KNOWN["dynamo-eager"]


def run(name, *contenders, settings=QUICK):
    return measure(f"{TOYS}:{name}", "fp32", contenders, settings, lambda text: None)


def test_a_row_has_times_accuracy_and_a_noise_verdict():
    row = run("mlp", EAGER, DYNAMO)
    assert list(row["contenders"]) == ["eager", "dynamo-eager"]
    for entry in row["contenders"].values():
        assert entry["status"] == "ok"
        assert 0 < entry["steady"]["p10_ms"] <= entry["steady"]["median_ms"] <= entry["steady"]["p90_ms"]
        assert 2 <= len(entry["steady"]["rounds_ms"]) <= 12
    assert row["contenders"]["dynamo-eager"]["accuracy"]["passed"]
    assert row["noise"] in ("low", "some", "high")


def test_a_crash_costs_only_the_contender_that_crashed():
    row = run("crashes_when_compiled", EAGER, DYNAMO)
    assert row["contenders"]["eager"]["status"] == "ok"
    assert row["contenders"]["dynamo-eager"] == {"status": "failed", "reason": "process ended with code 7"}


def test_a_wrong_answer_is_shown_as_one():
    found = run("wrong_when_compiled", EAGER, DYNAMO)["contenders"]["dynamo-eager"]["accuracy"]
    assert not found["passed"]
    assert "error 0.5" in found["reason"]


def test_a_model_that_eager_cannot_run_is_an_error():
    with pytest.raises(ModelFailed, match="eager: RuntimeError: shapes do not fit"):
        run("broken", EAGER)


def test_first_calls_and_memory_come_from_fresh_processes():
    settings = Settings(seconds=0.05, warm_seconds=0.05, min_rounds=2, max_rounds=2, timeout=300, memory=True)
    row = run("mlp", EAGER, settings=settings)
    assert row["memory"]["eager"]["total_peak"] > 50 * 2**20
    assert 0 <= row["memory"]["eager"]["call_peak"] < row["memory"]["eager"]["total_peak"]
    load = {"model": f"{TOYS}:mlp", "dtype": "fp32", "size": "full", "train": False, "threads": 1}
    first = first_call(load, EAGER, settings, lambda text: None)
    assert first["cold_s"] > 0
    assert "warm_s" not in first  # eager keeps nothing between processes


def test_a_contender_that_is_not_installed_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("fusewright.bench.contenders.importlib.util.find_spec", lambda name: None)
    row = run("mlp", EAGER, KNOWN["zentorch"])
    assert row["contenders"]["zentorch"]["status"] == "unavailable"
    assert "pip install --no-deps zentorch" in row["contenders"]["zentorch"]["reason"]


class Echo:
    """A fake process that answers at once: block number n took n seconds."""

    def __init__(self):
        self.order = []

    def ask(self, do, timeout, contender, calls, discard):
        self.order.append(contender)
        return {"times": [float(len(self.order))] * calls}


class Others:
    """A fake meter that returns the given readings, then 0."""

    def __init__(self, *readings):
        self.readings = [0.0, *readings]

    def read(self):
        return self.readings.pop(0) if self.readings else 0.0


def lanes_for(worker, settings, *names):
    return [Lane(KNOWN[name], worker, settings, calls=2) for name in names]


def test_every_round_starts_with_another_contender():
    settings = Settings(seconds=0.0, min_rounds=3)
    first, second, third = "eager", "aot_eager", "inductor"
    worker = Echo()
    lanes = lanes_for(worker, settings, first, second, third)
    assert run_rounds(lanes, settings, Others(), {}) == 0
    assert worker.order == [first, second, third, second, third, first, third, first, second]
    assert lanes[0].blocks == [[1.0, 1.0], [6.0, 6.0], [8.0, 8.0]]


def test_a_round_that_others_disturbed_is_run_again():
    settings = Settings(seconds=100.0, min_rounds=2, max_rounds=2)
    (lane,) = lanes_for(Echo(), settings, "eager")
    assert run_rounds([lane], settings, Others(0.0, 1.3, 0.0), {}) == 0
    assert lane.blocks == [[1.0, 1.0], [3.0, 3.0]]


def test_on_a_machine_that_is_never_quiet_disturbed_rounds_stay_and_are_counted():
    settings = Settings(seconds=1.0, min_rounds=3)
    (lane,) = lanes_for(Echo(), settings, "eager")
    assert run_rounds([lane], settings, Others(2.0, 2.0, 2.0, 2.0), {}) == 3
    assert lane.blocks == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]


def test_a_quiet_round_after_many_disturbed_ones_does_not_start_the_patience_anew():
    settings = Settings(seconds=1e9, min_rounds=2, max_rounds=2)
    (lane,) = lanes_for(Echo(), settings, "eager")
    busy = [2.0] * (PATIENCE * settings.max_rounds - 1)
    assert run_rounds([lane], settings, Others(*busy, 0.0, 2.0), {}) == len(busy)
    assert len(lane.blocks) == PATIENCE * settings.max_rounds


def test_a_contender_that_fails_on_the_way_leaves_the_rounds():
    class Tires(Echo):
        def ask(self, do, timeout, contender, **fields):
            if contender == "inductor" and len(self.order) > 2:
                raise WorkerError("out of memory", fatal=True)
            return super().ask(do, timeout, contender, **fields)

    settings = Settings(seconds=0.0, min_rounds=3)
    lanes, failed = lanes_for(Tires(), settings, "eager", "inductor"), {}
    run_rounds(lanes, settings, Others(), failed)
    assert failed == {"inductor": {"status": "failed", "reason": "out of memory"}}
    assert [lane.contender.name for lane in lanes] == ["eager"]
    assert len(lanes[0].blocks) == 3


def test_a_request_that_takes_too_long_stops_the_process():
    with Worker({}, 1) as worker:
        with pytest.raises(WorkerError, match=r"no answer within 0 s") as caught:
            worker.ask("first", 0.0, contender="eager")
        assert caught.value.fatal


def test_a_backend_that_nobody_registered():
    with pytest.raises(UnknownContender, match="did you mean 'inductor'"):
        from_backend("inductr")
    assert from_backend("eager").name == "dynamo-eager"
    assert from_backend("inductor-freezing").options == {"freezing": True}


FROZEN = """
import torch
from fusewright.bench.contenders import from_backend
model = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3), torch.nn.BatchNorm2d(8)).eval()
fast, x = from_backend("inductor-freezing").compile(model), torch.randn(1, 4, 8, 8)
with torch.no_grad():
    before = fast(x).clone()
    model[1].weight.zero_()
    assert torch.equal(fast(x), before)
"""


def test_inductor_freezes_weights_where_it_is_said_to():
    """If frozen, a folded batch norm does not notice a change of its weight."""
    env = {**os.environ, **KNOWN["inductor-freezing"].env}
    done = subprocess.run([sys.executable, "-c", FROZEN], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_training_step_is_measured_with_its_loss_and_gradients_checked():
    settings = dataclasses.replace(QUICK, size="small", train=True)
    row = measure("bert_small", "amp", [EAGER, DYNAMO, KNOWN["inductor-freezing"]], settings, lambda text: None)
    assert row["mode"] == "train"
    assert row["contenders"]["dynamo-eager"]["accuracy"]["passed"]
    assert row["contenders"]["inductor-freezing"] == {"status": "unavailable", "reason": "for inference only"}


def test_a_quick_row_takes_the_cold_first_call_from_the_process_that_is_timed():
    row = run("mlp", EAGER, DYNAMO, settings=dataclasses.replace(QUICK, first_call=True))
    first = row["first_call"]
    assert first["dynamo-eager"]["cold_s"] == row["contenders"]["dynamo-eager"]["compile_s"]
    assert first["dynamo-eager"]["warm_s"] > 0 and "warm_s" not in first["eager"]
    assert set(first) == {"eager", "dynamo-eager"}

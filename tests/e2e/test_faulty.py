"""A misbehaving backend never causes a wrong result: the result is eager's, or a clear error names the backend."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusewright import report
from fusewright.errors import BackendContractError
from fusewright.plan.execute import contract
from fusewright.reference import Faulty
from tests.fragments import Sketch

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.faulty]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        y = F.gelu(self.norm(self.a(x)))
        z = (y @ y.t()) * x[:, :1].exp()
        return self.b(y).softmax(-1), z.sin() + z.relu() * 2


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


X = torch.linspace(-1, 1, 24).view(4, 6)

# fault -> the text of the error that a call must raise; None if the result must be right
FAULTS: dict[str, str | None] = {
    "decline": None,
    "crash": None,
    "supports_raises": None,
    "supports_lies": None,
    "group_not_convex": None,
    "wrong_shape": "'fusewright_faulty'.*has shape",
    "wrong_dtype": "'fusewright_faulty'.*has dtype torch.float16",
    "mutates_input": "'fusewright_faulty'.*changed one of its inputs in place",
    "drops_result": "'fusewright_faulty'.*results where",
    "returns_input": "'fusewright_faulty'.*shares memory with an input",
    "raises_at_run_time": "failed on purpose",
}

# fault of a fragment -> the text of the report: detected before anything runs
FRAGMENTS: dict[str, str] = {
    "fragment_names_no_op": "names an operator that does not exist",
    "fragment_reads_what_nobody_makes": "reads %1000000 before it is made",
    "fragment_makes_a_value_twice": "a second time",
    "fragment_drops_a_result": "nobody makes the result",
    "fragment_leaves_out_an_argument": "does not give input, weight",
    "fragment_changes_an_input": "writes the constant",
    "fragment_returns_an_input": "is memory of the input",
}

# detected in the first run, where a comparison with eager finds the culprit
FIRST_RUN: dict[str, str] = {
    "fragment_has_another_dtype": r"add at test_faulty.py:\d+ has dtype torch.float16, expected torch.float32",
    "fragment_has_other_strides": r"add at test_faulty.py:\d+ has strides \(1, 4\), expected \(4, 1\)",
}

# detected with the option `check`
CHECKED: dict[str, str] = {
    "fragment_has_another_dtype": r"result 1, add at test_faulty.py:\d+, has dtype torch.float16",
    "fragment_has_other_strides": r"result 1, add at test_faulty.py:\d+, has strides",
    "fragment_has_other_values": r"result 1, add at test_faulty.py:\d+, is wrong: error .* against eager's",
}


def test_every_fault_has_a_verdict() -> None:
    assert {*FAULTS, *FRAGMENTS, *FIRST_RUN, *CHECKED} == set(Faulty.FAULTS)


@pytest.mark.parametrize("fault", [*FRAGMENTS, *FIRST_RUN])
def test_a_faulty_fragment_is_given_back_to_eager(net: Net, fault: str) -> None:
    with torch.no_grad():
        wanted = net(X)
    with report.recording() as reports:
        got = run(net, fault)
    for w, g in zip(wanted, got, strict=True):
        assert (g.dtype, g.stride()) == (w.dtype, w.stride())
        torch.testing.assert_close(g, w)
    bugs = [b for r in reports for b in r.bugs]
    assert any("fusewright_faulty" in b and re.search({**FRAGMENTS, **FIRST_RUN}[fault], b) for b in bugs), bugs


@pytest.mark.parametrize("fault", [*FRAGMENTS, *FIRST_RUN])
def test_a_faulty_fragment_is_an_error_in_strict_mode(net: Net, fault: str) -> None:
    with pytest.raises(RuntimeError, match=f"(?s)'fusewright_faulty'.*{ {**FRAGMENTS, **FIRST_RUN}[fault]}"):
        run(net, fault, strict=True)


@pytest.mark.parametrize("fault", CHECKED)
def test_a_checked_fragment_is_compared_with_eager(net: Net, fault: str) -> None:
    """Wrong values are detected only with `check`."""
    with pytest.raises(BackendContractError, match=f"'fusewright_faulty', region0.*{CHECKED[fault]}.*bug of the backend"):
        run(net, fault, check="contract")


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["x86_onednn", "fusewright_interp", "fusewright_null"])
def test_a_backend_that_keeps_its_contract_passes(net: Net, backend: str, dynamic: bool) -> None:
    compiled = torch.compile(net, backend=backend, dynamic=dynamic, options={"check": "contract", "fallback": "allow"})
    with torch.no_grad():
        for rows in (4, 4, 7) if dynamic else (4, 4):
            x = torch.linspace(-1, 1, 6 * rows).view(rows, 6)
            for w, g in zip(net(x), compiled(x), strict=True):
                torch.testing.assert_close(g, w)


def run(net: Net, fault: str, **options: Any) -> Any:
    compiled = torch.compile(net, backend="fusewright_faulty", options={"fault": fault, **options})
    with torch.no_grad():
        return compiled(X.clone())


@pytest.mark.parametrize("fault", [f for f, error in FAULTS.items() if error is None])
def test_the_result_is_right(net: Net, fault: str) -> None:
    with torch.no_grad():
        wanted = net(X)
    for w, g in zip(wanted, run(net, fault), strict=True):
        torch.testing.assert_close(g, w)


@pytest.mark.parametrize("fault", [f for f, error in FAULTS.items() if error is not None])
def test_the_error_names_the_backend(net: Net, fault: str) -> None:
    with pytest.raises((BackendContractError, RuntimeError), match=FAULTS[fault]):
        run(net, fault)


@pytest.mark.parametrize("fault", [f for f, error in FAULTS.items() if error is None])
def test_gradients_are_right(net: Net, fault: str) -> None:
    def grads(fn: Any) -> list[Tensor | None]:
        net.zero_grad()
        a, b = fn(X.clone())
        (a.square().sum() + b.sum()).backward()
        return [p.grad.clone() if p.grad is not None else None for p in net.parameters()]

    wanted = grads(net)
    ours = grads(torch.compile(net, backend="fusewright_faulty", options={"fault": fault}))
    torch.testing.assert_close(ours, wanted)


def test_a_crash_is_counted_and_raises_in_strict_mode(net: Net) -> None:
    with report.recording() as reports:
        run(net, "crash")
    assert any("compile crashed: RuntimeError: crashed on purpose" in b for r in reports for b in r.bugs)
    torch.compiler.reset()
    # Dynamo wraps exceptions that a backend raises while compiling.
    with pytest.raises(
        RuntimeError, match="BackendCrashError: backend 'fusewright_faulty' crashed on region"
    ):
        run(net, "crash", strict=True)


def test_a_decline_is_no_bug(net: Net) -> None:
    with report.recording() as reports:
        run(net, "decline", strict=True)
    assert [r.bugs for r in reports] == [[]]
    assert {str(f.verdict) for r in reports for f in r.fallbacks} == {"declined: declined on purpose"}


@pytest.mark.parametrize("fault", ["supports_raises", "supports_lies", "group_not_convex"])
def test_bugs_are_reported(net: Net, fault: str) -> None:
    with report.recording() as reports:
        run(net, fault)
    assert all("fusewright_faulty" in b for r in reports for b in r.bugs)
    assert any(r.bugs for r in reports)


def test_a_fault_that_does_not_exist_is_refused(net: Net) -> None:
    with pytest.raises(Exception, match="there is no fault 'wrong_shap'; did you mean 'wrong_shape'"):
        run(net, "wrong_shap")


def test_the_reference_of_a_fragment_is_on_the_devices_of_its_values() -> None:
    g = Sketch()
    positions = g.op("arange", 0, 4, device=torch.device("meta"))
    total = g.op("add", g.input(torch.ones(4, device="meta")), positions)
    region = g.region([total])
    exact = contract._in_fp64(region, [torch.ones(4, device="meta")])
    assert {str(exact[v.id].device) for v in (positions, total)} == {"meta"}, "arange's own reference names no device"

"""A backend that misbehaves never gives a wrong result: the answer is eager's, or a clear error names the backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusewright import report
from fusewright.errors import BackendContractError
from fusewright.reference import Faulty

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        y = F.gelu(self.norm(self.a(x)))
        z = (y @ y.t()) * x[:, :4].exp()
        return self.b(y).softmax(-1), z.sin() + z.relu() * 2


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


X = torch.linspace(-1, 1, 24).view(4, 6)

# fault -> the words of the error that a call must raise; None where the result must be right
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


def test_every_fault_has_a_verdict() -> None:
    assert set(FAULTS) == set(Faulty.FAULTS)


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
    # Dynamo wraps what a backend raises while compiling.
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

"""User errors are refused with helpful messages, and unusual inputs give eager's results."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusewright import registry
from fusewright.errors import FallbackError
from fusewright.interface import Backend, Unavailable
from tests.compare import against_eager

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

X = torch.linspace(-1, 1, 12).view(3, 4)


def compile_with(**how: Any) -> Tensor:
    return torch.compile(lambda x: x.relu() + 1, **{"backend": "fusewright_null", **how})(X.clone())


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"options": {"falback": "warn"}}, "there is no option 'falback'.*fallback"),
        ({"options": {"fallback": "never"}}, "'fallback' is 'never'; use one of"),
        ({"options": {"fuel": "much"}}, "'fuel'.*whole number"),
        ({"options": {"fuel": True}}, "'fuel'.*whole number"),
        ({"options": {"fault": "crash"}}, "there is no option 'fault'"),
        ({"mode": "max-autotun"}, "mode is .max-autotun.; use one of.*did you mean .max-autotune."),
        ({"options": {"disable_rules": ["linear.adm"]}}, "no rule .linear.adm.; did you mean .linear.addmm."),
    ],
)
def test_wrong_options_are_refused(how: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message) as e:
        compile_with(**how)
    assert "OptionError" in f"{type(e.value).__name__}: {e.value}"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("FUSEWRIGHT_FALLBACK", "nver", "FUSEWRIGHT_FALLBACK is 'nver'"),
        ("FUSEWRIGHT_FUEL", "x", "FUSEWRIGHT_FUEL='x' is not a whole number"),
        ("FUSEWRIGHT_STRICT", "maybe", "FUSEWRIGHT_STRICT='maybe' is not a truth value"),
    ],
)
def test_wrong_environment_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, text: str, message: str) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(Exception, match=message):
        compile_with()


def test_an_unknown_backend_name_is_torchs_error() -> None:
    with pytest.raises(Exception, match="x86_onednnn"):
        torch.compile(lambda x: x + 1, backend="x86_onednnn")(X)


def test_fallback_error_lists_every_op_with_its_line() -> None:
    with pytest.raises(Exception, match=r"relu float32\[3, 4\] at test_bad_input.py:\d+: no_lowering") as e:
        compile_with(options={"fallback": "error"})
    assert FallbackError.__name__ in f"{type(e.value).__name__}: {e.value}"


@pytest.mark.parametrize(("fallback", "lines"), [("warn", 1), ("allow", 0)])
def test_fallback_is_one_line_or_none(fallback: str, lines: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fusewright"):
        compile_with(options={"fallback": fallback, "cache": False})
    found = [r.getMessage() for r in caplog.records if r.name == "fusewright"]
    assert len(found) == lines
    assert all('see "fusewright explain"' in line for line in found)


def test_a_backend_that_cannot_work_here_is_eager_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a CPU without AVX2, for example: the probe's reason is logged once and the model runs in eager."""

    class NoDevice(Backend):
        name, device_type = "fusewright_null", "cpu"

        @classmethod
        def probe(cls) -> Unavailable:
            return Unavailable("the CPU has no AVX2", "use another CPU")

    info = registry.BackendInfo(registry.plugins()["fusewright_null"], NoDevice, NoDevice.probe())
    monkeypatch.setattr(registry, "info", lambda name: info)
    with caplog.at_level(logging.WARNING, "fusewright"):
        for n in (1, 2):  # two compiles, one line
            torch.compiler.reset()
            assert torch.equal(compile_with(), X.relu() + 1), n
    found = [r.getMessage() for r in caplog.records if r.name == "fusewright"]
    assert len(found) == 1
    assert "the CPU has no AVX2" in found[0] and "Eager runs this model" in found[0]


# ---------------------------------------------------------------- awkward models


class _Awkward(nn.Module):
    """Data-dependent control flow, a graph break, a view written in place, a counter buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        x[0] = 0
        y = self.layer(x)
        if y.sum() > 0:
            y = y * 2
        print("", end="")
        rows = y[1:]
        rows.mul_(self.calls)
        return y, rows, {"n": int(self.calls)}


@pytest.mark.parametrize("backend", ["fusewright_null", "fusewright_interp", "x86_onednn"])
def test_an_awkward_model_is_as_in_eager(backend: str) -> None:
    if not registry.info(backend).available:
        pytest.skip(f"{backend}: {registry.info(backend).device}")
    torch.manual_seed(0)
    eager, ours = _Awkward(), _Awkward()
    ours.load_state_dict(copy.deepcopy(eager.state_dict()))
    compiled = torch.compile(ours, backend=backend)
    with torch.no_grad():
        for scale in (1.0, -1.0, 3.0):
            a, b = X * scale, X * scale
            wanted, got = eager(a), compiled(b)
            torch.testing.assert_close(got, wanted)
            torch.testing.assert_close(b, a)
            torch.testing.assert_close(ours.calls, eager.calls)
            assert got[0].untyped_storage().data_ptr() == got[1].untyped_storage().data_ptr()


def raises(fn: Any, backend: str) -> bool:
    try:
        with torch.no_grad():
            torch.compile(fn, backend=backend)(X)
    except (RuntimeError, IndexError):
        return True
    return False


@pytest.mark.parametrize("backend", ["fusewright_null", "fusewright_interp", "x86_onednn"])
@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(lambda x: x[7], id="index out of bounds"),
        pytest.param(lambda x: x @ x, id="shapes that do not fit"),
        pytest.param(lambda x: torch.nn.functional.embedding(torch.tensor([5]), x), id="embedding out of bounds"),
        pytest.param(lambda x: x.gather(1, torch.full((3, 1), 9)), id="gather out of bounds"),
        pytest.param(lambda x: torch.linalg.cholesky(-x[:, :3] @ x[:, :3].t()), id="not positive definite"),
        pytest.param(lambda x: torch.ones(3, dtype=torch.int64).div_(2.5) + x.sum(), id="float into an integer"),
        pytest.param(lambda x: x.view(5, 5), id="a view of another size"),
    ],
)
def test_what_raises_in_eager_raises(fn: Any, backend: str) -> None:
    with pytest.raises((RuntimeError, IndexError)) as eager:
        fn(X)
    if not raises(fn, "aot_eager"):
        pytest.skip("aot_eager loses this error too in this version of torch; runs with one in which it does not (2.13)")
    with torch.no_grad(), pytest.raises((RuntimeError, IndexError)) as ours:
        torch.compile(fn, backend=backend)(X)
    wrapped = ours.type.__module__.startswith("torch._dynamo")
    assert wrapped or issubclass(ours.type, eager.type)


def test_a_model_without_tensors() -> None:
    assert against_eager(lambda: 3, list, "fusewright_null", exact=True) == []


def test_meta_tensors_give_meta_tensors() -> None:
    out = torch.compile(lambda x: x.relu() @ x.t(), backend="fusewright_null")(torch.empty(3, 4, device="meta"))
    assert out.device.type == "meta" and out.shape == (3, 3)


def test_sparse_inputs() -> None:
    def fn(a: Tensor, x: Tensor) -> Tensor:
        return torch.sparse.mm(a, x).relu()

    a = torch.eye(3).to_sparse()
    with torch.no_grad():
        assert torch.equal(torch.compile(fn, backend="fusewright_null")(a, X), fn(a, X))

"""`options={"simulate": True}`: whole models through `apple_mps` on CPU tensors, by the Metal shim, and refused cases.

Every model, in fp32 and bf16: `python -m ci.mps.models`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ci.mps import check as mps_check
from fusewright import report
from fusewright.bench import suite
from fusewright.bench.accuracy import compare
from fusewright.errors import OptionError
from fusewright.interface import Device
from fusewright_mps import backend, runtime
from fusewright_mps.device import Library
from fusewright_mps.recorded import Recorded, Waited
from tests.models.test_suite import gradient_verdict, outputs, wide

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

STRICT = {"simulate": True, "strict": True}


def simulated(fn: Any, **options: Any) -> Any:
    return torch.compile(fn, backend="apple_mps", options={**STRICT, "fallback": "error", **options})


def block(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(F.gelu(x @ w), (x.shape[-1],), scale).softmax(-1)


def tensors(rows: int = 6, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(rows)
    return [torch.randn(s, generator=g).to(dtype) for s in ((rows, 24), (24, 24), (24,))]


@pytest.mark.parametrize(("model", "dtype"), [("bert", "bf16"), ("llama", "fp32")])
def test_models_pass_the_fp64_rule(model: str, dtype: suite.DType) -> None:
    with report.recording() as reports:
        got = outputs(model, dtype, "apple_mps", STRICT)
    assert sum(r.count("lowered") for r in reports) > 20
    verdict = compare(wide(model, dtype), outputs(model, dtype, None), got, dtype)
    assert verdict.passed, verdict.reason


@pytest.mark.slow
@pytest.mark.parametrize("model", ["bert_small", "resnet18"])
def test_gradients_pass_the_fp64_rule(model: str) -> None:
    verdict = gradient_verdict(model, "amp", "apple_mps", STRICT)
    assert verdict.passed, verdict.reason


def test_gradients_of_a_block() -> None:
    def grads(fn: Any) -> list[Tensor]:
        args = [t.requires_grad_() for t in tensors()]
        fn(*args).square().sum().backward()
        return [t.grad for t in args if t.grad is not None]

    torch.testing.assert_close(grads(simulated(block, fallback="allow")), grads(block))


def test_symbolic_sizes() -> None:
    compiled = torch.compile(block, backend="apple_mps", options=STRICT, dynamic=True)
    with report.recording() as reports:
        for rows in (6, 9, 33):
            args = tensors(rows)
            torch.testing.assert_close(compiled(*args), block(*args))
    assert len(reports) == 1


def test_an_index_out_of_bounds_is_raised_as_in_eager() -> None:
    def lookup(table: Tensor, ids: Tensor) -> Tensor:
        return F.embedding(ids, table) * 2

    compiled, table = simulated(lookup), torch.randn(8, 4)
    assert torch.equal(compiled(table, torch.tensor([7, 0])), lookup(table, torch.tensor([7, 0])))
    for bad in (8, 9):
        with pytest.raises(IndexError):
            compiled(table, torch.tensor([bad, 0]))
    assert torch.equal(compiled(table, torch.tensor([1, 2])), lookup(table, torch.tensor([1, 2])))


@pytest.mark.parametrize("shape", [(0, 24), (1, 24), (24, 6)])
def test_empty_single_and_transposed(shape: tuple[int, int]) -> None:
    x = torch.randn(shape)
    x = x.t() if shape == (24, 6) else x
    scale = torch.randn(24)
    compiled = simulated(lambda x, s: F.layer_norm(F.gelu(x), (24,), s).softmax(-1), fallback="allow")
    torch.testing.assert_close(compiled(x, scale), F.layer_norm(F.gelu(x), (24,), scale).softmax(-1))


# ---------------------------------------------------------------- what a plan asks of the device


def test_a_plan_compiles_once_and_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder sits between the runtime and the shim: real kernels run, and every call is recorded."""
    metal = Recorded(runtime.HostMetal())
    monkeypatch.setattr(backend, "host_metal", lambda: metal)
    args = tensors()
    compiled = simulated(block, fallback="allow", cache=False)
    torch.testing.assert_close(compiled(*args), block(*args))
    assert len(metal.compiled) == 1 and not any(isinstance(e, Waited) for e in metal.events)
    first = len(metal.dispatches)
    compiled(*args)
    again = metal.dispatches[first:]
    assert len(again) == metal.encoded - first == 1, "one kernel behind the product"
    (dispatch,) = again
    assert dispatch.args[0].dtype == torch.float32  # type: ignore[union-attr]
    assert all(t % g == 0 for t, g in zip(dispatch.threads, dispatch.group_size, strict=True))
    assert len(metal.compiled) == 1


def test_a_stored_plan_is_not_lowered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    args = tensors(7)
    simulated(block, fallback="allow", cache=True)(*args)
    torch.compiler.reset()

    def lowered_again(*_: Any) -> None:
        raise AssertionError("the plan is on the disk")

    monkeypatch.setattr(backend.AppleMps, "compile", lowered_again)
    torch.testing.assert_close(simulated(block, fallback="allow", cache=True)(*args), block(*args))


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "M3 Prp"}, r"apple_mps has no target 'M3 Prp'; did you mean 'M3 Pro'\?"),
        ({"taget": "M4"}, "there is no option 'taget'; did you mean 'target'"),
    ],
)
def test_wrong_options(options: Mapping[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        simulated(block, **options)(*tensors())


def test_a_target_is_for_simulation() -> None:
    with pytest.raises(OptionError, match="give 'simulate': True with it"):
        backend.AppleMps(Device("mps", "M3 Pro"), {"target": "M4"})


def test_without_a_compiler_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusewright_mps.simulate import compiler

    monkeypatch.setenv("CXX", "no-such-compiler")
    compiler.compiler.cache_clear()
    try:
        with pytest.raises(Exception, match=r"takes a C.. compiler, and CXX names 'no-such-compiler'"):
            simulated(block)(*tensors())
    finally:
        compiler.compiler.cache_clear()


def test_what_metal_cannot_print_is_given_back() -> None:
    """A kernel with 64-bit floats is declined, and torch's own calls compute its ops."""
    x = torch.arange(6)
    compiled = simulated(lambda x: x.double().cumsum(0) + 1, fallback="allow")
    assert torch.equal(compiled(x), x.double().cumsum(0) + 1)


# ---------------------------------------------------------------- the validation script of a Mac


def test_places_of_floats_are_torchs_own_call_and_their_readers_are_lowered() -> None:
    """Kernels compute them in fp64, which Metal lacks. When they were claimed, their readers ended up in eager too."""

    def fn(x: Tensor) -> Tensor:
        return (
            x * 100 ** (torch.arange(x.shape[0]).float() / 9) + torch.arange(0.5, 9) - torch.linspace(0, 1, x.shape[0])
        )

    x = torch.randn(9)
    with report.recording() as reports:
        got = torch.compile(fn, backend="apple_mps", options=STRICT)(x.requires_grad_())
    torch.testing.assert_close(got, fn(x))
    found = {o.op: o.where for o in reports[0].ops}
    assert found.pop("arange") == found.pop("linspace") == "carried"
    assert set(found.values()) == {"lowered"}, found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_saturated_tanh_is_one_in_half_types(dtype: torch.dtype) -> None:
    """Metal's fast tanh returns NaN from 45 on, and gelu's argument grows cubically."""
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 50.0, -100.0, 1e4, 0.5]).to(dtype)
    torch.testing.assert_close(simulated(torch.tanh)(x), torch.tanh(x), rtol=0, atol=1e-2, equal_nan=True)
    got = simulated(lambda x: F.gelu(x, approximate="tanh"))(x[3:])
    torch.testing.assert_close(got, F.gelu(x[3:], approximate="tanh"), rtol=1e-2, atol=1e-2)


def test_the_validation_script_runs_dry(tmp_path: Path) -> None:
    out = tmp_path / "mps.json"
    code = mps_check.main(["--simulate", "--entries", "^(softmax|sort)$", "--models", "", "--json", str(out)])
    record = json.loads(out.read_text())
    assert code == 0 and record["schema"] == "fusewright.mps" and record["simulated"] is True
    assert {r["what"] for r in record["ops"]} == {"softmax", "sort"} and all(r["passed"] for r in record["ops"])
    assert all(ms is None for r in record["times"] for ms in r["ms"].values()), "a simulation has no speed"
    assert record["device"] == "simulated"


def test_the_validation_script_sees_a_wrong_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(runtime.HostMetal):
        def compile_shader(self, source: str) -> Library:
            return super().compile_shader(source.replace("/ ", "* "))

    wrong = Wrong()
    monkeypatch.setattr(backend, "host_metal", lambda: wrong)
    out = tmp_path / "mps.json"
    assert mps_check.main(["--simulate", "--entries", "^softmax$", "--models", "", "--json", str(out)]) == 1
    assert not any(r["passed"] for r in json.loads(out.read_text())["ops"])


def test_what_never_ran_on_a_mac_says_so() -> None:
    """The note stays until the results include a record of the validation script from a Mac."""
    root = Path(__file__).parents[3]
    records = [json.loads(p.read_text()) for p in (root / "docs/results").glob("*.json")]
    if any(r.get("schema") == mps_check.SCHEMA and not r["simulated"] for r in records):
        return
    for name in ("README.md", "docs/support.md", "docs/mps.md"):
        assert re.search(r"never\s+run\s+on\s+a\s+Mac", (root / name).read_text()), name


def test_without_a_mac_it_says_what_is_missing() -> None:
    with pytest.raises(SystemExit, match=r"no device to check: .*, or give --simulate"):
        mps_check.main([])

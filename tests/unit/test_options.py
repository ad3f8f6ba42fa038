"""Option values and modes of torch.compile, checked when a model is compiled."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fusewright import dynamo, registry, rewrite
from fusewright.config import ENV, MODES, Options, options_of_mode
from fusewright.errors import OptionError
from fusewright.stages import rounds

ROOT = Path(__file__).parents[2]


def refused(options: Any = None, mode: str | None = None, backend: str = "x86_onednn") -> str:
    """Return the error message for these options."""
    with pytest.raises(OptionError) as e:
        dynamo._parsed(registry.info(backend).cls, options, mode)
    return str(e.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"prepack": "nevr"},
            "option 'prepack' of x86_onednn is 'nevr'; use one of 'auto', 'never', 'always'; did you mean 'never'?",
        ),
        ({"disable_rules": ["linear.adm"]}, "there is no rule 'linear.adm'; did you mean 'linear.addmm'?"),
        ({"disable_rules": ["onednn.prodct"]}, "did you mean 'onednn.product'?"),
        ({"dump": ["simplfy"]}, "did you mean 'simplify'?"),
        (["a"], "options is ['a'] (list); give a dict"),
        ({"finite_math": 1}, "give True or False"),
    ],
)
def test_a_value_that_means_nothing_is_refused_with_the_nearest_that_does(options: Any, message: str) -> None:
    assert message in refused(options)


@pytest.mark.parametrize("rule", ["cse", "linear.addmm", "onednn.product", "onednn.group_norm", "onednn.batch_norm"])
def test_rules_of_the_host_and_of_the_backend_can_be_switched_off(rule: str) -> None:
    parsed = dynamo._parsed(registry.info("x86_onednn").cls, {"disable_rules": [rule]}, None)
    assert parsed.disable_rules == (rule,)


def test_every_rewrite_of_the_host_can_be_switched_off() -> None:
    modules = [importlib.import_module(m.name) for m in pkgutil.walk_packages(rewrite.__path__, f"{rewrite.__name__}.")]
    ids = {m.ID for m in modules if hasattr(m, "ID")}
    assert len(ids) > 5 and not ids - dynamo._rules(registry.info("x86_onednn").cls)


def test_a_rule_of_a_table_that_nothing_has_imported_yet_is_known() -> None:
    code = (
        "from fusewright import dynamo, registry; "
        "dynamo._parsed(registry.info('x86_onednn').cls, {'disable_rules': ['onednn.product']}, None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Our log lines only: torch's trace also logs in the first compilation of a process."""
    return [r.getMessage() for r in caplog.records if r.name == "fusewright"]


def test_a_rule_in_the_environment_may_be_of_another_backend(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FUSEWRIGHT_DISABLE_RULE", "elsewhere.rule")
    for _ in range(2):
        dynamo._parsed(registry.info("x86_onednn").cls, {}, None)
    (message,) = said(caplog)
    assert "there is no rule 'elsewhere.rule'" in message


def test_an_unknown_variable_is_reported_once_when_compiling(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FUSEWRIGHT_STRIKT", "1")
    monkeypatch.setenv("FUSEWRIGHT_CPU_ISA", "")  # a backend's own
    for _ in range(2):
        torch._dynamo.reset()
        torch.compile(lambda x: x + 1, backend="fusewright_null")(torch.ones(2))
    first, *rest = said(caplog)
    assert first == "fusewright: FUSEWRIGHT_STRIKT is not read by anything; did you mean 'FUSEWRIGHT_STRICT'?"
    assert all("run in eager" in m for m in rest) and len(rest) == 1  # equal graphs share one note


def test_stages_that_can_be_dumped_are_the_pipelines() -> None:
    names = ["canonicalize", *(name for name, _ in rounds.STAGES)]
    assert Options.parse({"dump": [*names, "all"]}).dump == (*names, "all")


def read_variables() -> Iterator[str]:
    """Yield the environment variables named in the packages' sources."""
    for path in [*ROOT.glob("common/**/*.py"), *ROOT.glob("backends/**/*.py")]:
        yield from re.findall(r'"(FUSEWRIGHT_[A-Z0-9_]+)"', path.read_text())


def test_every_variable_that_is_read_is_listed() -> None:
    listed = {*ENV, *registry.environment()}
    assert {*read_variables()} - {"FUSEWRIGHT_"} <= listed
    assert {"FUSEWRIGHT_CPU_ISA", "FUSEWRIGHT_TRITON_WORKERS", "FUSEWRIGHT_INT8_ISA", "FUSEWRIGHT_MPS_CHECK"} <= listed


def test_own_options_have_defaults_among_their_choices() -> None:
    for found in registry.backends():
        cls = found.cls
        if cls is not None:
            assert all(cls.options[name] in values for name, values in cls.choices.items())


# ---------------------------------------------------------------- modes


def parsed(mode: str, backend: str, options: Any = None) -> dict[str, Any]:
    return dict(dynamo._parsed(registry.info(backend).cls, options, mode).backend)


@pytest.mark.parametrize(
    ("mode", "graphs", "autotune"),
    [
        ("default", True, False), ("reduce-overhead", True, False),
        ("max-autotune", True, True), ("max-autotune-no-cudagraphs", False, True),
    ],
)  # fmt: skip
def test_modes_stand_for_options_of_backends_that_have_them(mode: str, graphs: bool, autotune: bool) -> None:
    found = parsed(mode, "nvidia_triton")
    assert (found["graphs"], found["autotune"]) == (graphs, autotune)
    assert parsed(mode, "x86_onednn") == dict(registry.info("x86_onednn").cls.options)  # type: ignore[union-attr]


def test_an_option_wins_over_a_mode_and_a_simulation_has_no_speed_to_tune_for() -> None:
    assert parsed("max-autotune", "nvidia_triton", {"autotune": False})["autotune"] is False
    assert parsed("max-autotune", "nvidia_triton", {"simulate": True})["autotune"] is False


def test_the_modes_are_torchs_and_others_are_refused() -> None:
    assert set(torch._inductor.list_mode_options()) <= set(MODES)
    assert "mode is 'reduce-overhed'; use one of 'default'" in refused(mode="reduce-overhed")
    assert options_of_mode("max-autotune", None) == {}


@pytest.mark.parametrize("mode", list(MODES))
def test_torch_compile_hands_a_mode_over(mode: str) -> None:
    torch._dynamo.reset()
    x = torch.randn(4, 4)
    assert torch.equal(torch.compile(lambda x: x.relu() + 1, backend="fusewright_null", mode=mode)(x), x.relu() + 1)

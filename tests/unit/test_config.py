"""Options and environment variables: accepted values, and the messages for rejected ones."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from fusewright.config import ENV, Options, env, options_of_text, unknown_env
from fusewright.errors import OptionError
from fusewright.interface import Backend, Device, Unavailable


class Toy(Backend):
    name = "toy"
    device_type = "cpu"
    options: ClassVar = {"tile": 16, "slack": 0.5, "order": ("a", "b")}

    @classmethod
    def probe(cls) -> Device | Unavailable:
        return Device("cpu", "toy")


def test_defaults_and_values() -> None:
    assert Options.parse(None) == Options()
    given = {"fallback": "error", "fuel": 3, "disable_rules": ["x"], "tile": 8, "slack": 1}
    parsed = Options.parse(given, Toy)
    assert (parsed.fallback, parsed.fuel, parsed.disable_rules) == ("error", 3, ("x",))
    assert parsed.backend == {"tile": 8, "slack": 1.0, "order": ("a", "b")}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fallbck": "warn"}, "there is no option 'fallbck'; did you mean 'fallback'?"),
        ({"tiel": 8}, "did you mean 'tile'?"),
        ({"zzzzzzz": 8}, "valid names: cache, check, disable_rules"),
        ({"fallback": "never"}, "use one of 'allow', 'warn', 'error'"),
        ({"verify": 1}, "option 'verify' is 1 (int); give True or False"),
        ({"check": "contrct"}, "option 'check' is 'contrct'; use one of 'contract'"),
        ({"check": 1}, "option 'check' is 1"),
        ({"fuel": True}, "give a whole number"),
        ({"fuel": 1.5}, "give a whole number"),
        ({"disable_rules": "x"}, "give a list of names"),
        ({"tile": "8"}, "option 'tile' of toy is '8' (str); give a whole number"),
    ],
)
def test_refusals_name_the_fix(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as e:
        Options.parse(given, Toy)
    assert message in str(e.value)


def test_the_options_of_one_backend_are_unknown_to_another() -> None:
    with pytest.raises(OptionError, match="there is no option 'tile'"):
        Options.parse({"tile": 8})


def test_an_explicit_option_wins_over_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEWRIGHT_STRICT", "1")
    monkeypatch.setenv("FUSEWRIGHT_FUEL", "7")
    monkeypatch.setenv("FUSEWRIGHT_DISABLE_RULE", "a, b,")
    assert Options.parse({}) == Options(strict=True, fuel=7, disable_rules=("a", "b"))
    assert Options.parse({"strict": False, "fuel": None}).fuel is None


@pytest.mark.parametrize(("name", "text"), [("STRICT", "maybe"), ("FUEL", "few"), ("FALLBACK", "sometimes")])
def test_a_bad_variable_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.setenv(f"FUSEWRIGHT_{name}", text)
    with pytest.raises(OptionError, match=f"FUSEWRIGHT_{name}"):
        Options.parse({})


def test_variables_outside_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    assert env("BACKEND") == ENV["FUSEWRIGHT_BACKEND"].default == ""
    monkeypatch.setenv("FUSEWRIGHT_BACKEND", "x86_onednn")
    assert env("BACKEND") == "x86_onednn"
    monkeypatch.setenv("FUSEWRIGHT_STRIKT", "1")
    assert unknown_env() == {"FUSEWRIGHT_STRIKT": "did you mean 'FUSEWRIGHT_STRICT'?"}


def test_the_cache_key_holds_what_changes_the_code_and_nothing_else() -> None:
    key = Options.parse({}, Toy).key()
    assert Options.parse({"fallback": "error", "dump": ["all"], "cache": False}, Toy).key() == key
    assert Options.parse({"fuel": 3}, Toy).key() != key
    assert Options.parse({"tile": 8}, Toy).key() != key


def test_options_as_text_get_the_type_of_their_default() -> None:
    given = options_of_text(["tile=8", "slack=0.25", "order=b,c", "simulate=1", "check=contract"], Toy)
    assert given == {"tile": 8, "slack": 0.25, "order": ("b", "c"), "simulate": True, "check": ("contract",)}
    assert Options.parse(given, Toy).backend == {"tile": 8, "slack": 0.25, "order": ("b", "c")}


@pytest.mark.parametrize(
    ("text", "message"), [("tyle=8", "tile"), ("tile", "NAME=VALUE"), ("slack=much", "a number"), ("tile=x", "whole")]
)
def test_options_as_text_that_fit_nothing(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        options_of_text([text], Toy)


def test_options_as_text_for_whichever_backend_is_chosen_are_those_of_any() -> None:
    assert options_of_text(["tile=8", "fallback=error"], Backend, Toy) == {"tile": 8, "fallback": "error"}

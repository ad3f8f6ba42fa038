"""Options of `torch.compile(..., options={...})` and the environment variables that set their defaults.

One dataclass holds the options, one table the variables. An explicit option overrides its variable, and the variable overrides
the default.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fusewright.errors import OptionError, nearest
from fusewright.interface import Backend
from fusewright.report import warn_once

PREFIX = "FUSEWRIGHT_"


def _option(default: Any, text: str, env: str | None = None, compiled: bool = False) -> Any:
    """A field of `Options`. `compiled`: the value affects what is compiled, so it is part of cache keys."""
    return field(default=default, metadata={"help": text, "env": env, "compiled": compiled})


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a user. `parse` checks names and types; `backend` holds the backend's own options."""

    fallback: Literal["allow", "warn", "error"] = _option(
        "warn", "what to do when eager's kernels run ops, inside of regions or outside: nothing, one line per graph, or raise",
        "FALLBACK",
    )
    strict: bool = _option(
        False, "raise on a crash inside a backend and on a kernel that cannot be built, instead of doing without", "STRICT"
    )
    verify: bool = _option(True, "check the graph against the specification after every stage", "VERIFY")
    check: tuple[Literal["contract", "weights"], ...] = _option(
        (), "what is checked while a model runs, at the cost of speed: 'contract' compares every lowered region with eager "
        "at its first run, 'weights' looks at every call for weights that were written behind torch's back", "CHECK", compiled=True
    )  # fmt: skip
    never_slower: bool = _option(
        True, "run eager beside a graph in a few of its first calls, and let eager run what is slower by more than 3%; not with "
        "'strict' or fallback='error', nor in a process group", "NEVER_SLOWER",
    )  # fmt: skip
    cache: bool = _option(True, "keep plans and measured choices on disk", "CACHE")
    fuel: int | None = _option(
        None, "how many rewrites may be applied at most, to bisect a wrong result", "FUEL", compiled=True
    )
    disable_rules: tuple[str, ...] = _option(
        (), "ids of rewrite rules that are switched off", "DISABLE_RULE", compiled=True
    )
    dump: tuple[Literal["canonicalize", "simplify", "constants", "lower", "plan", "all"], ...] = _option(
        (), "stages whose output is printed, or 'all'", "DUMP"
    )
    simulate: bool = _option(
        False, "run the backend's own code on CPU tensors, without its hardware", "SIMULATE", compiled=True
    )
    backend: Mapping[str, Any] = field(default_factory=dict, metadata={"compiled": True})

    @classmethod
    def parse(cls, raw: Mapping[str, Any] | None, backend: type[Backend] | None = None) -> Options:
        """Check what the user gave against the common options and `backend`'s own. Raises `OptionError`."""
        if not isinstance(raw, Mapping | None):
            raise OptionError(f"options is {raw!r} ({type(raw).__name__}); give a dict, e.g. options={{'fallback': 'error'}}")
        hints = typing.get_type_hints(cls)
        common = {f.name: f for f in dataclasses.fields(cls) if f.name != "backend"}
        own = dict(backend.options) if backend else {}
        values: dict[str, Any] = {}
        for name, f in common.items():
            text = os.environ.get(PREFIX + f.metadata["env"])
            if text is not None:
                values[name] = _parse_text(PREFIX + f.metadata["env"], text, hints[name])
        for name, value in (raw or {}).items():
            if name in common:
                values[name] = _check(f"option {name!r}", value, hints[name])
            elif name in own:
                own[name] = _check_own(backend, name, value)  # type: ignore[arg-type]
            else:
                raise OptionError(f"there is no option {name!r}; {nearest(name, [*common, *own])}")
        return cls(**values, backend=own)

    def key(self) -> str:
        """The options that affect what is compiled, in a fixed order, as part of a cache key."""
        named = [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self) if f.metadata["compiled"]]
        return repr([(n, sorted(v.items()) if isinstance(v, Mapping) else v) for n, v in named])


def _check_own(backend: type[Backend], name: str, value: Any) -> Any:
    what = f"option {name!r} of {backend.name}"
    if name in backend.choices:
        return _chosen(what, value, backend.choices[name])
    return _check(what, value, type(backend.options[name]))


MODES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "lite": {},
    "reduce-overhead": {"graphs": True},
    "max-autotune": {"graphs": True, "autotune": True},
    "max-autotune-no-cudagraphs": {"graphs": False, "autotune": True},
}
"""Modes of `torch.compile` as options; options that a backend lacks are left out."""


def options_of_mode(mode: str | None, backend: type[Backend] | None) -> dict[str, Any]:
    """The options that `torch.compile(mode=...)` stands for, limited to those the backend has. Raises `OptionError`."""
    if mode is None:
        return {}
    _chosen("mode", mode, tuple(MODES))
    return {k: v for k, v in MODES[mode].items() if backend is not None and k in backend.options}


def options_of_text(texts: Sequence[str], *backends: type[Backend]) -> dict[str, Any]:
    """Parse texts such as "fpmath=bf16", common options and those of any of `backends`, for `Options.parse`. Raises
    `OptionError`."""
    kinds = {k: v for k, v in typing.get_type_hints(Options).items() if k != "backend"}
    kinds |= {k: type(v) for b in backends for k, v in b.options.items()}
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in kinds:
            hint = f"; {nearest(name, kinds)}" if name not in kinds else ""
            raise OptionError(f"{text!r} is no option; write NAME=VALUE{hint}")
        found[name] = _parse_text(f"option {name}", value, kinds[name])
    return found


@dataclass(frozen=True)
class EnvVar:
    """An environment variable: full name, type, default and one line of help."""

    name: str
    type: Any
    default: Any
    help: str


def _table() -> dict[str, EnvVar]:
    hints = typing.get_type_hints(Options)
    of_options = [
        EnvVar(PREFIX + f.metadata["env"], hints[f.name], f.default, f.metadata["help"])
        for f in dataclasses.fields(Options)
        if f.metadata.get("env")
    ]
    others = [
        EnvVar(PREFIX + "BACKEND", str, "", "what backend='fusewright' uses, instead of the best one"),
        EnvVar(PREFIX + "NATIVE", bool, True, "launch kernels and check weights in C++ where fusewright-native is installed"),
        EnvVar(PREFIX + "CACHE_MB", int, 512, "megabytes of plans that the cache keeps at most"),
        EnvVar(PREFIX + "CACHE_DIR", str, "", "where the cache is; default: the user's cache directory"),
        EnvVar(PREFIX + "STATE_DIR", str, "", "where the user's key is; default: the user's state directory"),
    ]
    return {v.name: v for v in [*of_options, *others]}


ENV: dict[str, EnvVar] = _table()
"""Every environment variable that Fusewright reads, by full name."""


def env(name: str) -> Any:
    """The value of a variable of the table, e.g. `env("BACKEND")`: from the environment, else its default."""
    var = ENV[PREFIX + name]
    text = os.environ.get(var.name)
    return var.default if text is None else _parse_text(var.name, text, var.type)


def env_or_default(name: str) -> Any:
    """Like `env`, where raising would come too late: an invalid value counts as unset, with one warning."""
    try:
        return env(name)
    except OptionError as e:
        default = ENV[PREFIX + name].default
        warn_once(f"{e}; it counts as {default!r}")
        return default


def unknown_env(also: Iterable[str] = ()) -> dict[str, str]:
    """Return variables with our prefix that are neither in the table nor among `also` (those of the backends), each with a
    hint. They are probably misspelled."""
    known = {*ENV, *also}
    return {name: nearest(name, known) for name in sorted(os.environ) if name.startswith(PREFIX) and name not in known}


_BOOLS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


def _parse_text(name: str, text: str, kind: Any) -> Any:
    """Parse a variable's text as `kind`. Empty text means the empty value where there is one."""
    kind = _without_none(kind)
    if kind is bool:
        if text.lower() not in _BOOLS:
            raise OptionError(f"{name}={text!r} is not a truth value; use 1 or 0")
        return _BOOLS[text.lower()]
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            raise OptionError(f"{name}={text!r} is not {_spelled(kind)}") from None
    if kind is tuple or typing.get_origin(kind) is tuple:
        return _check(name, tuple(part.strip() for part in text.split(",") if part.strip()), kind)
    return _check(name, text, kind)


def _check(what: str, value: Any, kind: Any) -> Any:
    """Return `value` if it is of type `kind` (lists count as tuples, ints as floats), else raise `OptionError`."""
    if value is None and type(None) in typing.get_args(kind):
        return None
    kind = _without_none(kind)
    if typing.get_origin(kind) is Literal:
        return _chosen(what, value, typing.get_args(kind))
    if typing.get_origin(kind) is tuple or kind is tuple:
        one = (typing.get_args(kind) or (str,))[0]
        if typing.get_origin(one) is Literal:
            return tuple(_check(what, v, one) for v in (value if isinstance(value, list | tuple) else (value,)))
        if isinstance(value, list | tuple) and all(isinstance(v, str) for v in value):
            return tuple(value)
        raise OptionError(f"{what} is {value!r}; give a list of names, e.g. ['a']")
    if kind is float and type(value) is int:
        return float(value)
    # bool is an int to Python, but "fuel": True is a mistake.
    if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    raise OptionError(f"{what} is {value!r} ({type(value).__name__}); give {_spelled(kind)}")


def _chosen(what: str, value: Any, choices: Sequence[Any]) -> Any:
    """Return `value` if it is one of the choices, else raise an `OptionError` that names the nearest."""
    if any(value == c and type(value) is type(c) for c in choices):
        return value
    close = difflib.get_close_matches(str(value), list(map(str, choices)), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise OptionError(f"{what} is {value!r}; use one of {', '.join(map(repr, choices))}{hint}")


def _without_none(kind: Any) -> Any:
    """`int` for `int | None`; anything else as it is."""
    if typing.get_origin(kind) not in (typing.Union, types.UnionType):
        return kind
    (only,) = (k for k in typing.get_args(kind) if k is not type(None))
    return only


def _spelled(kind: Any) -> str:
    words = {bool: "True or False", int: "a whole number", float: "a number", str: "a string"}
    return words.get(kind, kind.__name__)

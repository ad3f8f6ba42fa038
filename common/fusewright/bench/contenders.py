"""The contenders of a measurement, by name: eager, Inductor in its variants, ONNX Runtime, other installed backends, ours."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import logging
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fusewright.errors import FusewrightError, nearest


class UnknownContender(FusewrightError, LookupError):
    """No backend of this name is registered; the message suggests the nearest."""


class Unavailable(RuntimeError):
    """The contender is known but cannot run here; the message says why and how to install it."""


@dataclass(frozen=True)
class Contender:
    """How to compile for one column of the table. `backend=None` is plain eager.

    `mode` is `torch.compile`'s; it excludes options. `package` is imported first, to register the backend; `env` is set in the
    process that runs it. A contender that `copies` runs no model but a copy of as many bytes; one that `exports` is no compile
    backend but a runtime for exported modules.
    """

    name: str
    backend: str | None
    options: Mapping[str, Any] = field(default_factory=dict)
    package: str = ""
    install: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    trains: bool = True
    mode: str | None = None
    copies: bool = False
    exports: bool = False

    @property
    def checked(self) -> bool:
        """Whether its results are compared: eager's are the baseline, and a copy has none."""
        return self.backend is not None

    def check_available(self) -> None:
        """Raise `Unavailable` if the package is missing. Imports nothing."""
        if self.package and importlib.util.find_spec(self.package) is None:
            raise Unavailable(f"{self.package} is not installed: {self.install}")

    def compile(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn` compiled by this contender, on its first call."""
        if self.backend is None:
            return fn
        if self.package:
            self.check_available()
            importlib.import_module(self.package)
        if self.exports:
            return _exported(fn, self.options)
        given: dict[str, Any] = {"mode": self.mode} if self.mode else {"options": dict(self.options) or None}
        compiled: Callable[..., Any] = torch.compile(fn, backend=self.backend, **given)
        return compiled


def _exported(fn: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """`fn`, a module, exported for its first call's arguments and run by ONNX Runtime from then on.

    Threads sleep between ops, as other contenders' do, unless the option `spinning` is true. Results are a list of tensors.
    """
    if not isinstance(fn, torch.nn.Module):
        raise TypeError(f"ONNX Runtime runs exported modules; {type(fn).__name__} is none")
    session: list[_Session] = []

    def call(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        if not session:
            session.append(_Session(fn, args, kwargs, **options))
        return session[0](args, kwargs)

    return call


class _Session:
    def __init__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], spinning: bool = False) -> None:
        import onnxruntime

        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = torch.get_num_threads()
        settings.add_session_config_entry("session.intra_op.allow_spinning", str(int(spinning)))
        logging.getLogger("onnxscript").setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(module, args, kwargs=kwargs, dynamo=True, verbose=False)
        assert program is not None
        model = program.model_proto.SerializeToString()
        self._session = onnxruntime.InferenceSession(model, settings, providers=["CPUExecutionProvider"])
        self._inputs = [given.name for given in self._session.get_inputs()]
        self._order = list(inspect.signature(module.forward).parameters)

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        given = {**dict(zip(self._order, args, strict=False)), **kwargs}
        # Numbers and switches are part of the exported graph.
        results = self._session.run(None, {name: given[name].numpy() for name in self._inputs})
        return [torch.from_numpy(result) for result in results]


KNOWN: dict[str, Contender] = {
    contender.name: contender
    for contender in (
        Contender("eager", None),
        Contender("dynamo-eager", "eager"),
        Contender("aot_eager", "aot_eager"),
        Contender("inductor", "inductor"),
        # The option alone freezes nothing: Dynamo, which decides whether weights are inputs, reads the global configuration.
        Contender("inductor-freezing", "inductor", options={"freezing": True}, env={"TORCHINDUCTOR_FREEZING": "1"}, trains=False),
        Contender("reduce-overhead", "inductor", mode="reduce-overhead"),
        Contender(
            "zentorch",
            "zentorch",
            package="zentorch",
            install="pip install --no-deps zentorch==2.13.0.2 deprecated wrapt",
            env={"TORCHINDUCTOR_FREEZING": "1"},
            trains=False,
        ),
        Contender(
            "onnxruntime",
            "onnxruntime",
            package="onnxruntime",
            install="pip install 'fusewright[onnxruntime]'",
            trains=False,
            exports=True,
        ),
    )
}

EAGER = KNOWN["eager"]
COPY = Contender("copy", None, copies=True)
"""The bandwidth that kernels are compared with: a clone, which allocates its result as kernels do."""


_WITH_OPTIONS = re.compile(r"([^\[\]]+)\[([^\[\]]+)\]")


def _options(name: str, text: str) -> dict[str, Any]:
    """Parse the options in brackets."""
    found = {}
    for part in text.split(";"):
        key, _, value = part.partition("=")
        try:
            found[key.strip()] = json.loads(value)
        except ValueError:
            raise UnknownContender(f"{name!r}: {part!r} is no option; write key=value, the value as in JSON") from None
    return found


def from_backend(name: str) -> Contender:
    """The contender for a backend name as in `torch.compile`, or for one of `KNOWN`. Options follow the name:
    `NAME[key=value;key=value]`, with JSON values.

    Torch's backend `eager` (Dynamo alone) is the contender `dynamo-eager`. Raises `UnknownContender`.
    """
    if match := _WITH_OPTIONS.fullmatch(name):
        plain = from_backend(match[1])
        return replace(plain, name=name, options={**plain.options, **_options(name, match[2])})
    if name == "eager":
        return KNOWN["dynamo-eager"]
    if name in KNOWN:
        return KNOWN[name]
    registered = tuple(torch.compiler.list_backends(exclude_tags=()))
    if name not in registered:
        among = tuple(dict.fromkeys((*KNOWN, *registered)))
        raise UnknownContender(f"there is no backend {name!r}; {nearest(name, among)}")
    return Contender(name, name)

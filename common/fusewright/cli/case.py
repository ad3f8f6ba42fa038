"""The arguments shared by `explain` and `report`: a model or a case of `bench`, with the backend, its options and the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

import click

from fusewright import registry
from fusewright.bench.cases import check_case
from fusewright.bench.device import check_device, default_device
from fusewright.bench.models import Size
from fusewright.bench.suite import DType
from fusewright.config import Options, options_of_text
from fusewright.errors import UnknownBackendError, nearest

Command = TypeVar("Command", bound=Callable[..., Any])

_ARGUMENTS = (
    click.argument("model"),
    click.option("--backend", default="fusewright", show_default=True, help="An installed backend; see doctor --all."),
    click.option("--device", help="Where the model is, as torch names it.  [default: where the backend computes]"),
    click.option("--dtype", type=click.Choice(get_args(DType)), default="fp32", show_default=True, help="amp: bf16 autocast."),
    click.option("--size", type=click.Choice(get_args(Size)), default="full", show_default=True, help="Of a model of the suite."),
    click.option("--train", is_flag=True, help="The training step; of a model of your own, of its loss or its outputs' squares."),
    click.option("--option", "given", multiple=True, metavar="NAME=VALUE", help="An option of torch.compile, e.g. fpmath=bf16."),
)  # fmt: skip


@dataclass(frozen=True)
class Chosen:
    """The options of torch.compile and the device, checked."""

    options: Mapping[str, Any]
    device: str


def arguments(command: Command) -> Command:
    """Add the arguments that select the model."""
    for add in reversed(_ARGUMENTS):
        command = add(command)
    return command


def chosen(model: str, backend: str, device: str | None, train: bool, given: Sequence[str]) -> Chosen:
    """Check everything before anything is built. Raises a `FusewrightError` that names the fix."""
    options = _options(backend, given)
    check_case(model, train)
    device = device or default_device(backend, options)
    check_device(device)
    return Chosen(options, device)


def _options(name: str, given: Sequence[str]) -> Mapping[str, Any]:
    """Parse and check "name=value" texts for a backend that works here."""
    if name == "fusewright":  # resolved later, by the device of the model's tensors
        return options_of_text(given, *(i.cls for i in registry.backends() if i.cls is not None and i.available))
    if name not in registry.plugins():
        known = ["fusewright", *registry.plugins()]
        raise UnknownBackendError(f"no backend is called {name!r}; {nearest(name, known)}")
    cls = registry.info(name).cls
    options = options_of_text(given, *filter(None, [cls]))
    registry.create(name, Options.parse(options, cls))  # raises the reason if it cannot work here
    return options

"""Which backends are installed, and which of them work here.

Backends are found through the entry-point group `fusewright.backends`. A plugin is not imported until it is needed. One that is
broken, too old or too new becomes `Unavailable` with a reason and affects nothing else.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fusewright.errors import BackendUnavailableError, UnknownBackendError, nearest
from fusewright.interface import INTERFACE, OPSET, Backend, Device, Unavailable

if TYPE_CHECKING:
    from fusewright.config import Options

GROUP = "fusewright.backends"
HOST = "fusewright"
"""The host's own distribution, which registers the reference backends."""


@dataclass(frozen=True)
class Plugin:
    """An entry point, not yet imported. `clashes`: distributions that register the same name and are ignored."""

    name: str
    value: str
    dist: str
    version: str
    clashes: tuple[str, ...] = ()

    @property
    def reference(self) -> bool:
        """Whether this is one of the host's own reference backends."""
        return self.dist == HOST


@dataclass(frozen=True)
class BackendInfo:
    """A plugin after loading and probing. `cls` is None if loading failed; `device` then holds the reason."""

    plugin: Plugin
    cls: type[Backend] | None
    device: Device | Unavailable

    @property
    def name(self) -> str:
        return self.plugin.name

    @property
    def available(self) -> bool:
        return self.cls is not None and isinstance(self.device, Device)

    @property
    def lowers(self) -> tuple[str, ...] | None:
        """Row names of the opset that it lowers; () for none, None if unknown."""
        if self.cls is None:
            return ()
        names = self.cls.lowers()
        return None if names is None else tuple(names)


@functools.cache
def plugins() -> dict[str, Plugin]:
    """Every registered backend by name, from package metadata alone.

    If two have the same name, the first on `sys.path` wins, as in torch's own lookup.
    """
    found: dict[str, list[Plugin]] = {}
    for e in importlib.metadata.entry_points(group=GROUP):
        dist, version = (e.dist.name, e.dist.version) if e.dist else ("unknown", "")
        found.setdefault(e.name, []).append(Plugin(e.name, e.value, dist, version))
    return {
        name: Plugin(name, same[0].value, same[0].dist, same[0].version, tuple(p.dist for p in same[1:]))
        for name, same in sorted(found.items())
    }


def refresh() -> None:
    """Discard everything found, loaded and probed, e.g. after a package was installed into the running process."""
    plugins.cache_clear()
    info.cache_clear()


@functools.cache
def info(name: str) -> BackendInfo:
    """Load and probe one backend. Raises `UnknownBackendError`, which suggests the nearest name."""
    plugin = plugins().get(name)
    if plugin is None:
        raise UnknownBackendError(f"no backend is called {name!r}; {nearest(name, plugins())}")
    cls = _load(plugin)
    if isinstance(cls, Unavailable):
        return BackendInfo(plugin, None, cls)
    return BackendInfo(plugin, cls, _probe(cls))


def backends() -> list[BackendInfo]:
    """Every registered backend, loaded and probed, sorted by name."""
    return [info(name) for name in plugins()]


def environment() -> dict[str, str]:
    """The environment variables that installed backends read, each with one line of help."""
    return {v: text for found in backends() if found.cls for v, text in found.cls.environment.items()}


def get(name: str) -> type[Backend]:
    """The class of a backend that works here. Raises `UnknownBackendError` or `BackendUnavailableError`."""
    found = info(name)
    _need(name, found.device)
    assert found.cls is not None
    return found.cls


def create(name: str, options: Options) -> Backend:
    """Create a backend on its device, or on a simulated one if the options say so. Raises like `get`."""
    found = info(name)
    device = found.cls.simulated(options.backend) if found.cls and options.simulate else found.device
    device = _need(name, device)
    assert found.cls is not None
    return found.cls(device, options.backend)


def _need(name: str, device: Device | Unavailable) -> Device:
    if isinstance(device, Device):
        return device
    fix = f" Fix: {device.fix}." if device.fix else ""
    raise BackendUnavailableError(f"backend {name!r} is unavailable: {device.reason}.{fix}")


def best(device_type: str | None = None) -> str | None:
    """The name that `backend="fusewright"` stands for, or None if no backend can do anything here.

    Candidates work on this machine, declare a priority and lower something; the highest priority wins, ties are broken by name.
    `device_type` (torch's name) limits them to backends for that kind of device.
    """
    candidates = [
        (-i.cls.priority, i.name)
        for i in backends()
        if i.cls is not None
        and i.available
        and i.cls.priority > 0
        and i.lowers != ()
        and device_type in (None, i.cls.device_type)
    ]
    return min(candidates)[1] if candidates else None


def _load(plugin: Plugin) -> type[Backend] | Unavailable:
    """Import the class and check the interface version that it was written for."""
    entry = importlib.metadata.EntryPoint(plugin.name, plugin.value, GROUP)
    update = f"install a {plugin.dist} that matches this fusewright"
    try:
        cls = entry.load()
    except (Exception, SystemExit) as e:  # a plugin may fail in any way, even by exiting; it must not harm the others
        what = f"{plugin.value} does not load: {type(e).__name__}: {e}"
        return Unavailable(what, f"reinstall or remove {plugin.dist}")
    if not (inspect.isclass(cls) and issubclass(cls, Backend)):
        return Unavailable(f"{plugin.value} is not a subclass of fusewright.interface.Backend", update)
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))
        return Unavailable(f"{plugin.value} lacks {missing}", update)
    if cls.name != plugin.name:
        return Unavailable(f"{plugin.value} is called {cls.name!r} but registered as {plugin.name!r}", update)
    if cls.interface[0] != INTERFACE[0] or cls.interface[1] > INTERFACE[1]:
        theirs, ours = (".".join(map(str, v)) for v in (cls.interface, INTERFACE))
        return Unavailable(f"written for interface {theirs}; this host has {ours}", update)
    if cls.opset > OPSET:
        return Unavailable(f"written for opset {cls.opset}; this host has {OPSET}", "update fusewright")
    return cls


def _probe(cls: type[Backend]) -> Device | Unavailable:
    """Probe a backend. A probe must not raise; one that does is reported like any other reason."""
    try:
        return cls.probe()
    except (Exception, SystemExit) as e:  # as in _load
        return Unavailable(f"its probe raised {type(e).__name__}: {e}", "report this to its authors")

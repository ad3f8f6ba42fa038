"""A backend in a process without its vendor's libraries: `python -m fusewright.conformance.isolated NAME module:Class`.

Prints a line of JSON: what is wrong with its import and its probe ("" if nothing), and its fingerprint with all libraries.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from typing import Any

HOSTS = ("torch", "fusewright")
"""Distributions that every backend depends on; their requirements are available too."""
FAMILY = "fusewright"
"""The prefix of our packages, both modules and distributions."""


class Missing:
    """Hides the modules of every distribution that is not allowed, as if it were not installed: for imports, and for
    `find_spec`, which torch calls before it registers Triton's kernels."""

    def __init__(self, allowed: frozenset[str]) -> None:
        self.allowed = allowed
        self.refused: set[str] = set()
        self.on = True

    def install(self) -> None:
        """Insert itself before all other finders."""
        sys.meta_path[:] = [_Finder(f, self) for f in sys.meta_path]

    def hides(self, name: str) -> bool:
        top = name.partition(".")[0]
        if not self.on or name in sys.modules or top in self.allowed or top.startswith(FAMILY):
            return False
        self.refused.add(top)
        return True


class _Finder:
    """A finder of `sys.meta_path` that does not find hidden modules."""

    def __init__(self, finder: Any, missing: Missing) -> None:
        self._finder, self._missing = finder, missing

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if self._missing.hides(name):
            return None
        found: ModuleSpec | None = self._finder.find_spec(name, path, target)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


def allowed(own: str) -> frozenset[str]:
    """Top-level modules that belong to no vendor: the standard library, everything loaded with torch and the host, the
    requirements of these two and of the family's packages that the backend depends on, and the backend's own package. (The
    family's are always allowed.)"""
    tops = importlib.metadata.packages_distributions()
    below = {r for d in tops.get(own, ()) for r in _direct(d) if _canonical(r).startswith(FAMILY)}
    required = {d for host in (*HOSTS, *below) for d in _required(host)}
    known = {top for top, dists in tops.items() if any(_canonical(d) in required for d in dists)}
    loaded = {name.partition(".")[0] for name in sys.modules}
    return frozenset({*sys.stdlib_module_names, *known, *loaded, own})


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _required(name: str, seen: set[str] | None = None) -> Iterator[str]:
    """The distribution and its transitive requirements without extras, by canonical name."""
    seen = set() if seen is None else seen
    if _canonical(name) in seen:
        return
    seen.add(_canonical(name))
    yield _canonical(name)
    for r in _direct(name):
        yield from _required(r, seen)


def _direct(name: str) -> list[str]:
    """Direct requirements of a distribution, without extras and those of torch builds; none if it is not installed."""
    try:
        requires = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    kept = (r for r in requires if "extra ==" not in r and not re.match(r"triton\b|nvidia", r))
    return [re.split(r"[^\w.-]", r, maxsplit=1)[0] for r in kept]


def main(argv: Sequence[str]) -> int:
    name, value = argv[:2]
    import torch  # noqa: F401  (loaded before anything is hidden)

    from fusewright import registry
    from fusewright.conformance.settings import Settings

    finder = Missing(allowed(value.partition(":")[0].partition(".")[0]))
    finder.install()
    info = registry.info(name)
    found = {"import": "", "probe": "", "fingerprint": ""}
    if info.cls is None:
        found["import"] = f"{info.device.reason}; hidden were: {', '.join(sorted(finder.refused))}"  # type: ignore[union-attr]
    else:
        found["probe"] = _probe(info.cls)
        finder.on = False
        registry.refresh()
        try:
            found["fingerprint"] = Settings(name, "--simulate" in argv).make().fingerprint()
        except LookupError:  # no device; the parent, which asks only if it has one, sees the difference
            pass
    print(json.dumps(found))
    return 0


def _probe(cls: Any) -> str:
    try:
        answer = cls.probe()
    except BaseException as e:  # whatever it raises is the finding
        return f"without the vendor's libraries probe() raises {type(e).__name__}: {e}"
    return "" if type(answer).__name__ in ("Device", "Unavailable") else f"probe() gave {type(answer).__name__}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Repository rules that no linter covers: file lengths, import layers, private torch names, local paths."""

from __future__ import annotations

import graphlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from fusewright.conformance.imports import PUBLIC, imports, not_public

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 800
VENDORS = {
    "triton": "fusewright_triton", "onednn": "fusewright_onednn", "acl": "fusewright_acl",
    "mps": "fusewright_mps", "int8": "fusewright_int8",
}  # fmt: skip
SHARED = {"cpu": "fusewright_cpu"}
"""Packages under backends/ that vendors share and may import."""
_PRIVATE = re.compile(r"\btorch\._(?:dynamo|inductor|functorch|subclasses|decomp|C)\b")
_MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|Users|root|work)/\w+")
COMPAT = "common/fusewright/_torch_compat.py"
MODULES = 15
"""Most modules in one folder."""
LAYERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "fusewright": (
        ("version", "_torch_compat", "errors", "sizes", "interface", "machine", "accuracy", "forms"),
        ("config", "report", "storage", "registry", "toolkit.ir", "toolkit"),
        ("toolkit.transform", "toolkit.rules", "ops"),
        ("toolkit.lower", "graph"),
        ("capture", "plan", "cache"),
        ("partition", "strict", "toolkit.fuse", "plan.execute", "plan.replay"),
        ("rewrite", "toolkit.region"),
        ("toolkit.backend", "forms.passes"),
        ("stages",),
        ("pipeline", "bench", "quantization", "quantization.bench", "scaffold"),
        ("dynamo", "report_page", "aot", "fusewright"),
        ("reference",),
        ("conformance",),
        ("cli",),
        ("__main__",),
    ),
    "fusewright_cpu": (
        ("arm", "openmp"), ("target", "policy"), ("emit",), ("kernels",), ("run",), ("loader",), ("onednn",), ("fusewright_cpu",),
    ),
    "fusewright_acl": (
        ("rows", "target", "verbose"), ("fpmath",), ("int8",), ("products", "convolutions"), ("lowerings", "quantized"),
        ("quantized_convolutions",), ("backend",), ("fusewright_acl",),
    ),
    "fusewright_int8": (
        ("run", "target"), ("operators",), ("engines",), ("lowerings",), ("floats", "activations"), ("siblings", "tensors"),
        ("flow",), ("backend",), ("fusewright_int8",),
    ),
    "fusewright_triton": (
        ("target",), ("emit",), ("build",), ("run",), ("kernels", "runtime"), ("autotune", "select"), ("select.attention",),
        ("lowerings",), ("backend",), ("fusewright_triton",),
    ),
    "fusewright_mps": (
        ("target", "policy", "device", "recorded"), ("emit",), ("emitter", "simulate"), ("kernels",), ("runtime",), ("select",),
        ("lowerings",), ("backend",), ("fusewright_mps",),
    ),
}  # fmt: skip
"""Layers of each package from the bottom up; a module imports only from its own layer and those below. A module that is not
listed has its folder's layer; a package's name stands for its `__init__.py`."""


def tracked() -> list[str]:
    """Return the existing text files under version control, as paths in the checkout."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [p for p in listed.splitlines() if (ROOT / p).is_file()]


def findings(path: str, text: str) -> Iterator[str]:
    """Yield the violations in one file."""
    if _MACHINE_PATH.search(text):
        yield "names a path of one machine"
    if not path.endswith((".py", ".cpp", ".h", ".hpp")):
        return
    lines = text.count("\n")
    if lines > LIMIT:
        yield f"has {lines} lines; the limit is {LIMIT}"
    if path.startswith(("common/", "backends/")) and path != COMPAT and _PRIVATE.search(text):
        yield f"uses a private part of torch; those live in {COMPAT}"
    if path.endswith(".py"):
        yield from _layering(path, set(imports(text)))


def _layering(path: str, imported: set[str]) -> Iterator[str]:
    packages = {m.split(".")[0] for m in imported}
    vendors = sorted(packages & set(VENDORS.values()))
    if path.startswith("common/"):
        shared = sorted(packages & set(SHARED.values()))
        yield from (f"imports {v}: the host imports no vendor" for v in (*vendors, *shared))
    if path.startswith("backends/"):
        own = (VENDORS | SHARED).get(path.split("/")[1], "")
        yield from (f"imports {v}: a vendor imports no other vendor" for v in vendors if v != own)
        yield from (f"imports {module}: a vendor uses only {', '.join(PUBLIC)}" for module in not_public(imported))


def structure(sources: Mapping[str, str]) -> Iterator[str]:
    """Yield violations of a package's structure. `sources` are its modules by dotted name, without `__init__`."""
    arrows = {m: sorted({t for i in imports(s) if (t := _module(i, sources)) and t != m}) for m, s in sources.items()}
    yield from (f"{' -> '.join(circle)}: modules that import each other" for circle in _circles(arrows))
    for module, targets in arrows.items():
        here = _layer(module)
        yield from (f"{module} imports {t}, which is in a higher layer" for t in targets if _layer(t) > here)


def _module(name: str, known: Collection[str]) -> str | None:
    """Return the module that an import names, or imports a name from."""
    return name if name in known else parent if (parent := name.rpartition(".")[0]) in known else None


def _layer(module: str) -> int:
    """Return the number of a module's layer, by the longest listed name that contains it. Raise LookupError if there is none."""
    package, _, inner = module.partition(".")
    numbers = {name: k for k, names in enumerate(LAYERS[package]) for name in names}
    while inner and inner not in numbers:
        inner = inner.rpartition(".")[0]
    return numbers[inner or package]


def _circles(arrows: Mapping[str, Sequence[str]]) -> Iterator[Sequence[str]]:
    """Yield the first import cycle, if there is one."""
    try:
        graphlib.TopologicalSorter(arrows).prepare()
    except graphlib.CycleError as e:
        yield e.args[1]


def packages() -> dict[str, dict[str, str]]:
    """Return the sources of each package that has layers, by dotted name."""
    found: dict[str, dict[str, str]] = {p: {} for p in LAYERS}
    for path in tracked():
        parts = Path(path).with_suffix("").parts
        package = next((p for p in parts[:3] if p in LAYERS), None)
        if path.startswith(("common/", "backends/")) and path.endswith(".py") and package:
            name = ".".join(parts[parts.index(package) :]).removesuffix(".__init__")
            found[package][name] = (ROOT / path).read_text()
    return found


def crowded(paths: Iterable[str]) -> Iterator[str]:
    """Yield folders with too many modules."""
    folders = Counter(str(Path(p).parent) for p in paths if p.endswith(".py"))
    yield from (f"{f} has {n} modules; the limit is {MODULES}" for f, n in sorted(folders.items()) if n > MODULES)


def main() -> int:
    bad = [
        f"{path}: {finding}"
        for path in tracked()
        if path != "ci/check_tree.py"
        for finding in findings(path, (ROOT / path).read_text(errors="ignore"))
    ]
    bad += crowded(tracked())
    bad += [finding for sources in packages().values() for finding in structure(sources)]
    print("\n".join(bad) or "check_tree: all files keep the rules of the house")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

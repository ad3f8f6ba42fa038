"""Plans from the disk cache and into it. A plan is stored after its first run, when everything it believes was seen to
be true.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch.fx import Graph, GraphModule, Node

from fusewright import __version__
from fusewright.config import Options, env
from fusewright.graph import printer
from fusewright.interface import Backend, KernelCode, Phase
from fusewright.plan import codegen, serial, store
from fusewright.plan.build import Plan, attribute
from fusewright.plan.ir import Run

log = logging.getLogger("fusewright")


def key(backend: Backend, options: Options, graph: Graph, phase: Phase, const: frozenset[Node]) -> str:
    """Hash of the graph with its types and of everything else that a plan depends on."""
    constants = ",".join(str(i) for i, n in enumerate(graph.nodes) if n in const)
    versions = f"{__version__} {torch.__version__} {serial.FORMAT}"
    threads = str(torch.get_num_threads())  # choices are measured with them
    text = printer.to_text(graph, sources=False)
    vendor = type(backend).__module__.partition(".")[0]
    sources = _sources("fusewright") + _sources(vendor)
    return store.key(text, constants, phase, backend.fingerprint(), options.key(), versions, threads, sources)


@functools.cache
def _sources(package: str) -> str:
    """A hash of names, sizes and times of a package's files: a changed checkout makes other code of one version."""
    file = getattr(sys.modules.get(package), "__file__", None)
    digest = hashlib.sha256()
    for path in sorted(Path(file).parent.rglob("*.py")) if file else ():
        info = path.stat()
        digest.update(f"{path.name} {info.st_size} {info.st_mtime_ns}\n".encode())
    return digest.hexdigest()


Finish = Callable[[Plan, Mapping[str, KernelCode], Run], Run]
"""From a plan, its kernels and the plan as a callable to what is called."""


def find(entry_key: str, backend: Backend, gm: GraphModule, finish: Finish) -> tuple[Run, str] | None:
    """A stored plan as a callable, and the line to say about its fallbacks ("" for none). None when there is none that
    fits.
    """
    found = store.read(entry_key)
    if found is None:
        return None
    data, code = found
    try:
        plan = serial.from_data(data["plan"], lambda name: attribute(gm, name))
        kernels = backend.restore(code, list(plan.kernels)) if code else {}
        return finish(plan, kernels, codegen.load(plan, kernels)[0]), str(data["summary"])
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as e:
        log.warning("fusewright: an entry of the plan cache does not fit (%s: %s); compiling anew", type(e).__name__, e)
        store.discard(entry_key)
        return None


def save(entry_key: str, backend: Backend, plan: Plan, summary: str) -> None:
    """Store a plan that is data throughout; others stay in memory."""
    code = backend.store(list(plan.kernels))
    if code is None:
        if plan.kernels:
            return
        code = b""  # the plan is all there is to store
    try:
        data = {"plan": serial.to_data(plan), "summary": summary}
    except serial.NotSerializable as e:
        log.debug("a plan is not cached: %s", e)
        return
    store.write(entry_key, data, code, env("CACHE_MB") * 1_000_000)

"""Compile source text to machine code with Triton. No GPU and no driver is needed.

This file imports only the standard library and Triton, because it is also the program of the compiler processes:
`python compiler.py SOCKET REQUEST` imports Triton, builds the request as a warm-up, and forks a worker for each socket that it is
sent. A worker starts in 5 ms instead of the 0.5 s (of CPU time) of that warm-up. It reads one request per line (JSON) from its
socket and answers each with a line.

A request is {"text" or "module" (a file of kernels/), "functions": [names], "signature": {parameter: Triton type},
"aligned": [parameters whose value is a multiple of 16], "options", "target": [backend, arch, lanes]} and, for
parameters that are compiled in, "constants": {parameter: value}; the answer is {"binaries":
[{"name", "code" (base64), "shared", "threads", "listing", "descriptors"}]} or {"error": text}. "descriptors" holds
the driver's settings for each tensor descriptor; it is empty where descriptors are pointers, sizes and strides.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import linecache
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

IDLE_SECONDS = 180.0
LISTINGS = {"cuda": "ptx", "hip": "amdgcn"}
"""Triton's names of the assembly text."""
CODE = {"cuda": "cubin", "hip": "hsaco"}
ALWAYS = {"enable_fp_fusion": True}
"""Options of every kernel. Fuse multiplications and additions: Triton 3.9 announces that 3.10 will not do so by default."""


def load(text: str, names: Mapping[str, Any]) -> ModuleType:
    """Return emitted source as a module without a file, with `names` in place of its imports.

    Triton reads the text of functions back through `linecache`."""
    body = [("" if line.startswith(("import ", "from ")) else line) for line in text.splitlines()]
    filename = f"<fusewright {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[filename] = (len(text), None, [f"{line}\n" for line in body], filename)
    module = ModuleType("fusewright_triton_kernel")
    module.__dict__.update(names)
    exec(compile("\n".join(body), filename, "exec"), module.__dict__)
    return module


def _imported(name: str) -> ModuleType:
    """Return a module of this package. If the package itself is not importable, skip its __init__, which imports torch."""
    folder = Path(__file__).parents[1]
    for part in ("", "emit", "kernels"):
        package = f"fusewright_triton.{part}".rstrip(".")
        if package not in sys.modules:
            bare = ModuleType(package)
            bare.__path__ = [str(folder / part)]
            sys.modules[package] = bare
    return importlib.import_module(f"fusewright_triton.{name}")


def build(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the binaries of a request, one per function. Triton's exceptions pass through."""
    import triton
    from triton.backends.compiler import GPUTarget

    backend, arch, lanes = request["target"]
    module = _imported(f"kernels.{request['module']}") if "module" in request else _emitted(request["text"])
    out = []
    for name in request["functions"]:
        source = _source(getattr(module, name), request)
        built = triton.compile(source, target=GPUTarget(backend, arch, lanes), options={**ALWAYS, **request["options"]})
        m = built.metadata
        if getattr(m, "global_scratch_size", 0) or m.profile_scratch_size:
            raise NotImplementedError(f"{name} wants scratch memory, which no launch gives it")
        out.append(
            {
                "name": m.name,
                "code": base64.b64encode(built.asm[CODE[backend]]).decode(),
                "shared": m.shared,
                "threads": m.num_warps * lanes,
                "listing": built.asm[LISTINGS[backend]],
                "descriptors": list(getattr(m, "tensordesc_meta", None) or ()),
            }
        )
    return out


def _emitted(text: str) -> ModuleType:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice

    return load(text, {"triton": triton, "tl": tl, "libdevice": libdevice, "fw": _imported("emit.device")})


def _source(function: Any, request: Mapping[str, Any]) -> Any:
    """Return a function in the form that the compiler takes: Triton's, or Gluon's, whose descriptors have layouts."""
    from triton.compiler import ASTSource

    signature, constants = request["signature"], request.get("constants", {})
    aligned = _attributes(signature, request["aligned"])
    if not getattr(function, "is_gluon", bool)():
        return ASTSource(function, signature, constants, aligned)
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource(function, {p: _with_layout(t) for p, t in signature.items()}, constants, aligned)


def _with_layout(described: str) -> str:
    """Return the type of a descriptor with Gluon's default shared memory layout of such a block; other types unchanged."""
    if not described.startswith("tensordesc"):
        return described
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.language import str_to_ty

    block = str_to_ty(described, None).block_type
    layout = NVMMASharedLayout.get_default_for([int(n) for n in block.shape], block.element_ty)
    return f"{described[:-1]},{layout!r}>"


def _attributes(signature: Mapping[str, str], aligned: Sequence[str]) -> dict[tuple[int], list[list[Any]]]:
    order = list(signature)
    return {(order.index(p),): [["tt.divisibility", 16]] for p in aligned}


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to a request; the parent raises whatever error Triton reports."""
    try:
        return {"binaries": build(request)}
    except Exception as e:
        return {"error": f"{type(e).__name__}: {e}"}


def work(connection: socket.socket) -> None:
    """Run the loop of a worker. It ends with its parent, or after some minutes without a request."""
    with connection.makefile("rw", encoding="utf-8") as stream:
        while select.select([connection], [], [], IDLE_SECONDS)[0] and (line := stream.readline()):
            stream.write(json.dumps(answer(json.loads(line))) + "\n")
            stream.flush()


def main() -> None:
    """Warm up, then fork workers until the parent ends or has not wanted one for some minutes. A fork is safe: no thread runs."""
    import triton.compiler  # noqa: F401 (while the parent is still busy)

    control = socket.socket(fileno=int(sys.argv[1]))
    answer(json.loads(sys.argv[2]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for workers
    while select.select([control], [], [], IDLE_SECONDS)[0]:
        _, sockets, _, _ = socket.recv_fds(control, 1, 1)
        if not sockets:
            return
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # Triton waits for ptxas
            control.close()
            return work(socket.socket(fileno=sockets[0]))
        os.close(sockets[0])


if __name__ == "__main__":
    main()

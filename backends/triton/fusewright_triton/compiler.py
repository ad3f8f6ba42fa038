"""From source text to machine code, with Triton. No GPU and no driver is needed.

This file imports nothing but the standard library and Triton, because it is also the program of the worker
processes: `python compiler.py` reads one request per line from its input (JSON) and answers each with a line.
A worker starts in the time that `import triton` takes.

A request is {"text", "functions": [names], "signature": {parameter: Triton type}, "aligned": [parameters whose
value is a multiple of 16], "warps", "options", "target": [backend, arch, lanes]} and, for parameters that Triton
knows when it compiles, "constants": {parameter: value}; the answer is {"binaries":
[{"name", "code" (base64), "shared", "threads", "listing"}]} or {"error": text}.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import linecache
import select
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

IDLE_SECONDS = 180.0
LISTINGS = {"cuda": "ptx", "hip": "amdgcn"}
"""What Triton calls the assembly text."""
CODE = {"cuda": "cubin", "hip": "hsaco"}


def load(text: str, names: Mapping[str, Any]) -> ModuleType:
    """Emitted source as a module without a file, with `names` in place of what its import lines would bring.

    Triton reads the text of functions back through `linecache`."""
    body = [("" if line.startswith(("import ", "from ")) else line) for line in text.splitlines()]
    filename = f"<fusewright {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[filename] = (len(text), None, [f"{line}\n" for line in body], filename)
    module = ModuleType("fusewright_triton_kernel")
    module.__dict__.update(names)
    exec(compile("\n".join(body), filename, "exec"), module.__dict__)
    return module


def _device_module() -> ModuleType:
    """`device.py` beside this file; found by path, because importing the package would import torch."""
    name = "fusewright_triton.device"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("device.py"))
        if spec is None or spec.loader is None:
            raise ImportError("device.py is missing beside compiler.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def build(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The binaries of a request, one per function. Raises what Triton raises."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.language.extra import libdevice

    names = {"triton": triton, "tl": tl, "libdevice": libdevice, "fw": _device_module()}
    module = load(request["text"], names)
    backend, arch, lanes = request["target"]
    out = []
    for name in request["functions"]:
        aligned = _attributes(request["signature"], request["aligned"])
        source = ASTSource(getattr(module, name), request["signature"], request.get("constants", {}), aligned)
        options = {"num_warps": request["warps"], **request["options"]}
        built = triton.compile(source, target=GPUTarget(backend, arch, lanes), options=options)
        out.append(
            {
                "name": built.metadata.name,
                "code": base64.b64encode(built.asm[CODE[backend]]).decode(),
                "shared": built.metadata.shared,
                "threads": built.metadata.num_warps * lanes,
                "listing": built.asm[LISTINGS[backend]],
            }
        )
    return out


def _attributes(signature: Mapping[str, str], aligned: Sequence[str]) -> dict[tuple[int], list[list[Any]]]:
    order = list(signature)
    return {(order.index(p),): [["tt.divisibility", 16]] for p in aligned}


def main() -> None:
    """The loop of a worker. It ends with its parent, or when it is asked nothing for some minutes."""
    import triton.compiler  # noqa: F401 (while the parent is still busy)

    while select.select([sys.stdin], [], [], IDLE_SECONDS)[0]:
        line = sys.stdin.readline()
        if not line:
            return
        try:
            answer: dict[str, Any] = {"binaries": build(json.loads(line))}
        except Exception as e:
            # whatever Triton finds wrong goes to the parent, which raises it there
            answer = {"error": f"{type(e).__name__}: {e}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

"""Measure the seconds to the first and the tenth answer of an HTTP server in a fresh process, with a saved program, the plan cache,
Inductor's cache and AOTInductor.

    python -m ci.bench.warm_starts [--model bert] [--size full] [--starts 3] [--backend x86_onednn] [--kinds saved,cached]

A process of each kind prepares everything first; servers listen only locally, on a free port. Exit code 1 if a saved program does
compiler work (functions that Dynamo traces, regions that the backend lowers) or its first answer takes more than 1.5 times its
tenth. Times need an idle machine, where BERT takes about four minutes; the counted work is the same anywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fusewright import _torch_compat as compat
from fusewright import registry

KINDS = ("saved", "cached", "inductor", "aotinductor")
CALLS = 10
LIMIT = 1800
MOST = 1.5
"""Largest allowed ratio of first to tenth answer."""


def main(argv: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(argv)
    if given.serve:
        print(json.dumps(_served(given)), flush=True)
        return 0
    print(f"{'':12} {'start s':>9} {'first ms':>9} {'tenth ms':>9} {'first/tenth':>12} {'traced':>7} {'lowered':>8}")
    good = True
    for kind in given.kinds:
        with tempfile.TemporaryDirectory() as folder:
            try:
                _child(given, kind, folder)  # fills the caches and writes the file
                rows = [_child(given, kind, folder) for _ in range(given.starts)]
            except subprocess.CalledProcessError as e:
                print(f"{kind:12} failed: {e.stderr.strip().splitlines()[-1][:200]}")
                good = good and kind.startswith("aot")
                continue
        start, first, tenth = (statistics.median(r[k] for r in rows) for k in ("start", "first", "tenth"))
        ratio, (traced, lowered) = first / tenth, (max(int(r[k]) for r in rows) for k in ("traced", "lowered"))
        line = f"{kind:12} {start:9.2f} {1e3 * first:9.1f} {1e3 * tenth:9.1f} {ratio:12.2f} {traced:7} {lowered:8}"
        wrong = _wrong(ratio, traced, lowered) if kind == "saved" else ""
        print(f"{line}{wrong}", flush=True)
        good = good and not wrong
    return 0 if good else 1


def _wrong(ratio: float, traced: int, lowered: int) -> str:
    """Return what a saved program did wrong, or ""."""
    worked = "  it compiled" if traced or lowered else ""
    return worked + (f"  its first answer is slower than {MOST} of its tenth" if ratio > MOST else "")


def _kinds(text: str) -> list[str]:
    found = text.split(",")
    if unknown := [k for k in found if k not in KINDS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: kinds are {', '.join(KINDS)}")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bert")
    parser.add_argument("--size", default="full", choices=("full", "small"))
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--backend", default="x86_onednn")
    parser.add_argument("--kinds", type=_kinds, default=list(KINDS), help="comma-separated; default: all")
    parser.add_argument("--serve", choices=KINDS, help=argparse.SUPPRESS)
    return parser


def _child(given: argparse.Namespace, kind: str, folder: str) -> dict[str, float]:
    command = [sys.executable, "-m", "ci.bench.warm_starts", "--serve", kind]
    command += ["--model", given.model, "--size", given.size, "--backend", given.backend]
    names = ("FUSEWRIGHT_CACHE_DIR", "FUSEWRIGHT_STATE_DIR", "TORCHINDUCTOR_CACHE_DIR", "SAVED_DIR")
    env = {**os.environ, **{n: str(Path(folder) / n.lower()) for n in names}}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env, timeout=LIMIT)
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _served(given: argparse.Namespace) -> dict[str, float]:
    """Return the seconds from a built model to a listening server, of its first answer and of its tenth."""
    import torch

    from fusewright.bench import suite

    built = suite.build(given.model, given.size)
    folder = Path(os.environ["SAVED_DIR"])
    folder.mkdir(exist_ok=True)
    lowered = _counting(given.backend)
    before, begin = compat.counted("frames").get("total", 0), time.perf_counter()
    fn = _callable(given, built, folder)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            with torch.no_grad():
                leaves = suite.flatten_outputs(built.run(fn))
            answer = json.dumps(float(leaves[0].double().sum())).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    started = time.perf_counter() - begin
    times = [_asked(server.server_address[1]) for _ in range(CALLS)]
    server.shutdown()
    work = {"traced": compat.counted("frames").get("total", 0) - before, "lowered": len(lowered)}
    return {"start": started, "first": times[0], "tenth": times[-1], **work}


def _counting(backend: str) -> list[Any]:
    """Return a list that gets every region that the backend lowers from now on."""
    cls: Any = registry.info(backend).cls
    lower, found = cls.compile, []

    def counted(self: Any, region: Any, ctx: Any) -> Any:
        found.append(region)
        return lower(self, region, ctx)

    cls.compile = counted
    return found


def _asked(port: int) -> float:
    start = time.perf_counter()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}", data=b"[]", timeout=LIMIT) as response:
        response.read()
    return time.perf_counter() - start


def _callable(given: argparse.Namespace, built: Any, folder: Path) -> Callable[..., Any]:
    import torch

    import fusewright

    if given.serve == "saved":
        file, digest = folder / "model", folder / "digest"
        if not file.exists():
            digest.write_text(fusewright.save(built.module, file, dict(built.kwargs), backend=given.backend))
        loaded: Callable[..., Any] = fusewright.load(built.module, file, sha256=digest.read_text())
        return loaded
    if given.serve == "aotinductor":
        inductor = compat.aot_inductor()
        package = str(folder / "model.pt2")
        if not Path(package).exists():
            with torch.no_grad():
                exported = torch.export.export(built.module, built.args, dict(built.kwargs), strict=False)
            inductor.aoti_compile_and_package(exported, package_path=package)
        aot: Callable[..., Any] = inductor.aoti_load_package(package)
        return aot
    return torch.compile(built.fn, backend="inductor" if given.serve == "inductor" else given.backend)


if __name__ == "__main__":
    sys.exit(main())

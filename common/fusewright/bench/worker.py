"""The parent's end of a measuring process: start, ask, time out, stop."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any


class WorkerError(RuntimeError):
    """A request failed. `fatal`: the process is gone (it crashed or timed out)."""

    def __init__(self, text: str, fatal: bool) -> None:
        super().__init__(text)
        self.fatal = fatal


class Worker:
    """One `fusewright.bench.child` process. `ask` sends a request and waits for the answer."""

    def __init__(self, env: Mapping[str, str], threads: int) -> None:
        self._log = tempfile.TemporaryFile()
        self._buffer = b""
        fixed = {
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "PYTHONPATH": _python_path(),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fusewright.bench.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **fixed, **env},
            # The parent handles Ctrl-C. In a session of its own, a suspended child (`turns`) would outlive a killed parent; the
            # system ends an orphaned group of this session.
            process_group=0,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, do: str, timeout: float, **fields: Any) -> dict[str, Any]:
        """The answer to one request. Raises `WorkerError`; after a fatal one this worker is stopped."""
        self.tell(do, **fields)
        return self.answer(timeout)

    def tell(self, do: str, **fields: Any) -> None:
        """Send one request; its answer must be read before the next one. Raises `WorkerError`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._died() from error

    def answer(self, timeout: float) -> dict[str, Any]:
        """The answer to the last request. Raises `WorkerError`."""
        answer: dict[str, Any] = json.loads(self._read_line(timeout))
        if "error" in answer:
            raise WorkerError(answer["error"], fatal=False)
        return answer

    def _read_line(self, timeout: float) -> bytes:
        assert self._process.stdout is not None
        descriptor, deadline = self._process.stdout.fileno(), time.monotonic() + timeout
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise WorkerError(f"no answer within {timeout:.0f} s", fatal=True)
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                raise self._died()
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _died(self) -> WorkerError:
        code = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return WorkerError(f"process ended with code {code}" + (f": {lines[-1]}" if lines else ""), fatal=True)

    def close(self) -> None:
        """Stop the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None and not stream.closed:
                try:
                    stream.close()
                except BrokenPipeError:  # an unread request is still buffered for a dead process
                    continue

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self._log.close()


def _python_path() -> str:
    """Make the child import the same fusewright as this process."""
    root = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join(dict.fromkeys([root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]))

"""Children forked from a process that has imported what they need: torch and its database of ops take eight CPU seconds.

    python -m fusewright.conformance.jobs.warm FD    # that process; requests come from the socket FD
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch


def possible() -> bool:
    """Whether children can be forked: on Linux, without an accelerator, whose driver may be used on one side of a fork only."""
    return sys.platform == "linux" and not torch.accelerator.is_available()


class Forked:
    """A child that runs `main(arguments)` of a module, with what `subprocess.Popen` offers for its own children.

    Before the first of them, the warm process calls the module's `warm_up()`. Children share nothing but these imports."""

    def __init__(self, module: str, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        (its_input, stdin), (stdout, its_output), (status, its_status) = os.pipe(), os.pipe(), os.pipe()
        try:
            _request(module, [its_input, its_output, its_status])
        finally:
            for fd in (its_input, its_output, its_status):
                os.close(fd)
        self.stdin, self.stdout, self._status = os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb"), os.fdopen(status)
        given = {"arguments": list(arguments), "env": dict(env), "path": search_path(env)}
        with contextlib.suppress(BrokenPipeError):  # the warm process ended, and `wait` says so
            self.stdin.write(json.dumps(given).encode() + b"\n")
            self.stdin.flush()

    @functools.cached_property
    def pid(self) -> int:
        """The child's number and that of its process group; 0 if the warm process ended before it forked."""
        return int(self._status.readline() or 0)

    def kill(self) -> None:
        """End the child and the processes that it has started."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Return the exit code, as `Popen` gives it."""
        with self._status, self.stdout:
            return int(self._status.readline() or 1) if self.pid else 1


def search_path(env: Mapping[str, str]) -> list[str]:
    """Return the module search path of a child: PYTHONPATH, then this process's."""
    added = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p]
    return list(dict.fromkeys([*added, *(p or os.getcwd() for p in sys.path)]))


# ---------------------------------------------------------------- the warm process, from outside


class _Warm:
    """The warm process of this one, which ends with it."""

    def __init__(self) -> None:
        self.control, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(search_path(os.environ))}
        with its:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(its.fileno())], env=env, pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True,  # this process handles Ctrl-C
            )  # fmt: skip
        atexit.register(self.close)

    def close(self) -> None:
        self.control.close()
        self.process.terminate()  # it may still be warming up
        self.process.wait()


_LOCK = threading.Lock()
_warm: _Warm | None = None


def _request(module: str, fds: Sequence[int]) -> None:
    global _warm
    with _LOCK:
        if _warm is None or _warm.process.poll() is not None:
            _warm = _Warm()
        with contextlib.suppress(BrokenPipeError):  # it ended just now, and the pipes with it
            socket.send_fds(_warm.control, [module.encode()], list(fds))


# ---------------------------------------------------------------- inside of it


def _serve(control: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, _reap)
    warmed: set[str] = set()
    while True:
        said, fds, _, _ = socket.recv_fds(control, 1 << 12, 3)
        if not said:
            return
        if (module := said.decode()) not in warmed:
            importlib.import_module(module).warm_up()
            warmed.add(module)
        if not os.fork():
            control.close()
            os._exit(_supervise(module, *fds))
        for fd in fds:
            os.close(fd)


def _reap(*_: Any) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _supervise(module: str, stdin: int, stdout: int, status: int) -> int:
    """Fork the child, and write its number and its exit code to `status`, one a line."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        for fd in (stdin, stdout, status):
            os.close(fd)
        os._exit(_run(module))
    os.close(stdin)
    os.close(stdout)
    with contextlib.suppress(PermissionError, ProcessLookupError):  # whichever of the two comes first
        os.setpgid(child, child)
    os.write(status, f"{child}\n".encode())
    os.write(status, f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n".encode())
    return 0


def _run(module: str) -> int:
    sys.stdin, sys.stdout = open(0), open(1, "w")
    given: dict[str, Any] = json.loads(sys.stdin.readline())
    os.environ.clear()
    os.environ.update(given["env"])
    sys.path[:] = given["path"]
    out = sys.stdout
    try:
        return int(importlib.import_module(module).main(given["arguments"]))
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        out.flush()


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))

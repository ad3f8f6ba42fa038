"""Parse ONEDNN_VERBOSE: what oneDNN runs, and which of it are reference implementations.

Format: https://uxlfoundation.github.io/oneDNN/dev_guide_verbose.html, version 1.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

HEAVY = frozenset({"matmul", "inner_product", "convolution", "deconvolution", "rnn"})
"""Primitives whose reference implementation is up to a hundred times slower than an optimized one, unlike reorders and
pointwise ones."""


@dataclass(frozen=True)
class Execution:
    """A primitive that ran: its kind, the implementation's name, whether it computes gradients, and the sizes."""

    primitive: str
    implementation: str
    phase: str
    problem: str

    @property
    def heavy(self) -> bool:
        return self.primitive in HEAVY

    @property
    def reference(self) -> bool:
        """Whether the implementation, or one that it builds on, is oneDNN's portable C++."""
        return "ref" in re.split(r"[:+]", self.implementation)


def parse(text: str) -> list[Execution]:
    """Return the executions in the output of a process run with ONEDNN_VERBOSE=1; other lines are skipped."""
    found = []
    for line in text.splitlines():
        at = line.find("onednn_verbose,")
        fields = line[at:].split(",") if at >= 0 else []
        if "exec" in fields[:5]:
            kind, implementation, phase = fields[(k := fields.index("exec") + 2) : k + 3]
            found.append(Execution(kind, implementation, phase, fields[-2]))
    return found


def references(executions: Iterable[Execution]) -> list[Execution]:
    """Return the heavy primitives that ran as a reference implementation."""
    return [e for e in executions if e.heavy and e.reference]


def executed(run: Callable[[], Any]) -> list[Execution]:
    """Return the primitives that `run` executes. Captures the process's standard output meanwhile, and forwards it afterwards."""
    sys.stdout.flush()
    libc, out = ctypes.CDLL(None), os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
                run()
        finally:
            sys.stdout.flush()
            libc.fflush(None)
            os.dup2(out, 1)
            os.close(out)
        file.seek(0)
        text = file.read().decode(errors="replace")
    sys.stdout.write("".join(line for line in text.splitlines(keepends=True) if "onednn_verbose," not in line))
    return parse(text)

"""Parses the assembly of kernels for other machines."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fusewright_cpu.run.codegen import kernels_to_text, to_assembly
from fusewright_cpu.run.sources import Source, hash_of
from fusewright_cpu.target import CpuTarget, target_machine


def instructions(source: Source, target: CpuTarget) -> list[str]:
    """Instructions and labels ("name:") of a kernel's body, without directives and comments."""
    text, _ = kernels_to_text({hash_of(source): source}, target, parallel=False)
    lines = [line.split("//")[0].strip() for line in to_assembly(text, target_machine(target)).splitlines()]
    start = next(k for k, line in enumerate(lines) if re.match(r"(_|l_)?fw_\w+\.body:", line))
    stop = next(k for k in range(start, len(lines)) if re.match(r"\.?Lfunc_end|\.globl|_?fw_\w+:", lines[k]))
    return [x for x in lines[start:stop] if x and (x.endswith(":") or not x.startswith("."))]


Blocks = dict[str, tuple[list[str], list[str]]]
"""Basic blocks by label: their instructions and successors."""
_BRANCH = re.compile(r"(b|b\.\w+|cbn?z|tbn?z)\s")


def blocks(lines: Sequence[str]) -> Blocks:
    """The control flow of a function; its first block is called "entry"."""
    found: Blocks = {"entry": ([], [])}
    here: str | None = "entry"
    for number, line in enumerate(lines):
        if line.endswith(":") and number:
            if here is not None:
                found[here][1].append(line[:-1])
            here = line[:-1]
            found[here] = ([], [])
        elif here is not None:
            found[here][0].append(line)
            if not _BRANCH.match(line):
                here = None if line.startswith(("ret", "br\t")) else here
                continue
            found[here][1].append(line.replace(",", " ").split()[-1])
            if line.startswith("b\t"):
                here = None
                continue
            found[here][1].append(f"after {number}")
            here = f"after {number}"
            found[here] = ([], [])
    return found


def loops(lines: Sequence[str]) -> list[list[str]]:
    """The instructions of every innermost loop, in the order of the text."""
    graph = blocks(lines)
    order = {name: k for k, name in enumerate(graph)}

    def reached(start: str, within: frozenset[str]) -> set[str]:
        seen, todo = set[str](), [start]
        while todo:
            fresh = [n for n in graph[todo.pop()][1] if n in within and n not in seen]
            seen.update(fresh)
            todo.extend(fresh)
        return seen

    def inner(within: frozenset[str]) -> list[frozenset[str]]:
        reach = {n: reached(n, within) for n in within}
        rings = {frozenset(m for m in reach[n] if n in reach[m]) for n in within if n in reach[n]}
        return [loop for ring in rings for loop in inner(ring - _heads(graph, ring)) or [ring]]

    found = sorted(inner(frozenset(graph)), key=lambda ring: min(order[n] for n in ring))
    return [[x for n in sorted(ring, key=order.__getitem__) for x in graph[n][0]] for ring in found]


def _heads(graph: Blocks, ring: frozenset[str]) -> frozenset[str]:
    """The blocks at which a loop is entered."""
    return frozenset(n for name, (_, after) in graph.items() if name not in ring for n in after if n in ring)


def has(lines: Sequence[str], pattern: str) -> bool:
    return any(re.match(pattern, line) for line in lines)


VECTOR = r".*\b(v\d+\.(16b|8h|4s|2d|4h|8b|2s)|z\d+|q\d+)\b"
"""A NEON or SVE vector instruction."""

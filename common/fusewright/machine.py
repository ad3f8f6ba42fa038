"""Facts about the current machine and process that several backends need: CPU features, cores, memory, other processes."""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from fusewright import _torch_compat as compat

_CPUINFO = Path("/proc/cpuinfo")

# Features whose names differ: torch's name on the left, the kernel's name in /proc/cpuinfo on the right.
_KERNEL_NAMES = {
    "avx512_f": "avx512f", "avx512_bw": "avx512bw", "avx512_vl": "avx512vl", "avx512_dq": "avx512dq",
    "avx512_cd": "avx512cd", "avx512_ifma": "avx512ifma", "avx512_vbmi": "avx512vbmi", "fma3": "fma", "lzcnt": "abm",
    "bmi": "bmi1", "sse3": "pni", "sha": "sha_ni",
    "neon": "asimd", "fp16_arith": "asimdhp", "dot": "asimddp", "sve_bf16": "svebf16",
}  # fmt: skip


current_stream = compat.current_stream
"""The handle of an accelerator's current stream, by the accelerator's index."""


def capturing(device: str) -> Callable[[], bool]:
    """What tells whether a graph of the current stream is being captured, for devices of this type."""
    found: Callable[[], bool] = getattr(getattr(torch, device, None), "is_current_stream_capturing", lambda: False)
    return found


def on_host() -> AbstractContextManager[Any]:
    """A context manager in which tensors without a named device are made on the host, whatever `torch.set_default_device` says."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def arch() -> str:
    """The machine's architecture in a normalized spelling: "x86_64", "aarch64", or what the system reports."""
    machine = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)


@functools.cache
def cpu_features() -> frozenset[str]:
    """Instruction-set features, named as in `torch.cpu.get_capabilities`, e.g. "avx512_vnni", "bf16"."""
    if hasattr(torch.cpu, "get_capabilities"):
        return frozenset(name for name, value in torch.cpu.get_capabilities().items() if value is True)
    return features_of(_CPUINFO.read_text()) if _CPUINFO.exists() else frozenset()


def features_of(cpuinfo: str) -> frozenset[str]:
    """The features listed in a text in the format of /proc/cpuinfo, torch's names included."""
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    flags = set(found.group(1).split()) if found else set()
    return frozenset(flags | {ours for ours, theirs in _KERNEL_NAMES.items() if theirs in flags})


@functools.cache
def cpu_name() -> str:
    """The processor's name as given by its maker, or the architecture if the system does not report one."""
    if _CPUINFO.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", _CPUINFO.read_text(), re.MULTILINE)
        if found:
            return found.group(1).strip()
    return platform.processor() or arch()


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """CPUs granted by the control group (1.5 is one and a half), cgroup v2 or v1; None without a limit."""
    try:
        if (root / "cpu.max").exists():
            quota, period = (root / "cpu.max").read_text().split()
        else:
            quota = (root / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu/cpu.cfs_period_us").read_text().strip()
    except OSError:
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)


def free_memory(meminfo: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of host memory that can be had without swapping or exceeding the control group's limit (v2 or v1): a quarter of all
    memory where the system does not tell, 0 if it tells nothing."""
    try:
        if not meminfo.exists():
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
        (available,) = re.findall(r"^MemAvailable:\s*(\d+) kB$", meminfo.read_text(), re.MULTILINE)
        free = int(available) << 10
        for limit, used, cached in _MEMORY_LIMITS:
            text = (group / limit).read_text().strip() if (group / limit).exists() else "max"
            if text != "max":
                stat = (group / limit).with_name("memory.stat").read_text()
                (reclaimable,) = re.findall(rf"^{cached} (\d+)$", stat, re.MULTILINE)
                free = min(free, int(text) - int((group / used).read_text()) + int(reclaimable))
        return max(0, free)
    except (AttributeError, OSError, ValueError):
        return 0


_MEMORY_LIMITS = (
    ("memory.max", "memory.current", "file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_cache"),
)
"""Files of a control group with its limit and its use, and the line of memory.stat with what of that is cached files."""


def most_memory() -> int:
    """The most bytes of host memory that this process has used; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << (0 if sys.platform == "darwin" else 10)


def several_processes() -> bool:
    """Whether this process belongs to a group of several."""
    d = torch.distributed
    return d.is_available() and d.is_initialized() and d.get_world_size() > 1


def torch_switches(*names: str) -> str:
    """Values of torch's settings, given by dotted names such as "backends.cudnn.enabled", for fingerprints. "-" for those that
    this torch lacks or refuses to read."""
    return ",".join(f"{name.removeprefix('backends.')}={_switch(name)}" for name in names)


def _switch(name: str) -> str:
    try:
        value = attrgetter(name)(torch)
        return str(value() if callable(value) else value)
    except (AttributeError, RuntimeError):  # RuntimeError: the setting was made through torch's newer interface
        return "-"


_PRODUCTS = {"cpu": "mkldnn", "cuda": "cuda"}
"""Torch's settings of products, by the type of device."""


def matmul_precision(device: str) -> str:
    """What torch may round the operands of fp32 products to on a type of device: "ieee" (nothing), "tf32" or "bf16".
    `torch.get_float32_matmul_precision` raises where a setting was made through torch's newer interface."""
    settings = getattr(torch.backends, _PRODUCTS.get(device, ""), None)
    found = "none" if settings is None else str(settings.matmul.fp32_precision)
    return "ieee" if found == "none" else found


def matmul_precisions() -> tuple[str, ...]:
    """`matmul_precision` of all types of devices."""
    return tuple(map(matmul_precision, _PRODUCTS))


def environment(*names: str) -> str:
    """Those of the named environment variables that are set, for fingerprints. A trailing "*" matches any suffix."""
    found = [n for n in os.environ for wanted in names if n == wanted or (wanted[-1] == "*" and n.startswith(wanted[:-1]))]
    return ",".join(f"{n}={os.environ[n]}" for n in sorted(set(found)))


@functools.cache
def sources(package: str) -> str:
    """A hash of the names, sizes and times of a package's Python files and native extensions, so that a modified checkout or a
    rebuilt core counts as different code. The package need not be imported. Of a module that is a single file, only that
    counts."""
    digest = hashlib.sha256()
    for name, info in _files(package):
        digest.update(f"{name} {info.st_size} {info.st_mtime_ns}\n".encode())
    return digest.hexdigest()


_CODE = (".py", *importlib.machinery.EXTENSION_SUFFIXES)


def _files(package: str) -> Iterator[tuple[str, os.stat_result]]:
    module = sys.modules.get(package)
    spec = importlib.util.find_spec(package) if module is None else module.__spec__
    if spec is None or spec.submodule_search_locations is None:
        if file := getattr(module, "__file__", None):
            yield Path(file).name, os.stat(file)
        return
    for root in sorted(spec.submodule_search_locations):  # two of an editable package, whose extension lies in the second
        for folder, folders, names in os.walk(root):
            folders.sort()
            for path in (os.path.join(folder, n) for n in sorted(names) if n.endswith(_CODE)):
                yield os.path.relpath(path, root), os.stat(path)

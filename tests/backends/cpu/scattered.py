"""An address space in which the next mapping lands far from everything else. Imports only ctypes."""

from __future__ import annotations

import ctypes

PAGE = 4096
STEP = 5 << 30
"""Bytes between two holes: more than the reach of a call or a load, 2 GiB on x86-64 and 4 GiB on AArch64."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_NOBODYS = 0x4022  # MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, with PROT_NONE: addresses without memory
_FAILED = ctypes.c_void_p(-1).value


def reserve(size: int) -> int | None:
    """Reserve `size` bytes of addresses and return their start; None if no gap is that large."""
    found = _libc.mmap(None, size, 0, _NOBODYS, -1, 0)
    return None if found == _FAILED else found


def scatter(holes: int) -> None:
    """Leave `holes` single free pages, `STEP` bytes apart, above the one large gap: one-page mappings land in the holes, all
    others in the gap."""
    half = STEP * holes
    start = reserve(2 * half)
    assert start is not None, "no such gap in the address space"
    size = half
    while size >= PAGE:
        if reserve(size) is None:
            size = size // 2 // PAGE * PAGE
    for k in range(holes):
        assert _libc.munmap(start + half + STEP * k + STEP // 2, PAGE) == 0
    assert _libc.munmap(start, half) == 0

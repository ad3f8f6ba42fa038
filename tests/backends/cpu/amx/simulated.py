"""The tile instructions of AMX as Python functions that kernels call in their place, on CPUs without them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, partial

import numpy as np
import pytest

from fusewright_cpu.kernels.amx import TILE_BYTES, TILE_ROWS, TILES, Tiles
from fusewright_cpu.kernels.amx_linear import emit_amx_linear
from fusewright_cpu.kernels.by_hand import AmxLinear
from fusewright_cpu.run import codegen, jit
from fusewright_cpu.run.pool import symbol_address

_tiles = np.zeros((TILES, TILE_ROWS, TILE_BYTES), np.uint8)
_configured = False


def _rows(p: int, step: int) -> list[ctypes.Array[ctypes.c_uint8]]:
    return [(ctypes.c_uint8 * TILE_BYTES).from_address(p + r * step) for r in range(TILE_ROWS)]


def _configure(p: int) -> None:
    global _configured
    config = np.frombuffer((ctypes.c_uint8 * 64).from_address(p), np.uint8)
    assert config[0] == 1
    assert (config[16:32].view(np.uint16) == TILE_BYTES).all()
    assert (config[48:56] == TILE_ROWS).all()
    _configured = True


def _release() -> None:
    global _configured
    _configured = False


def _zero(tile: int) -> None:
    assert _configured
    _tiles[tile] = 0


def _load(tile: int, p: int, step: int) -> None:
    assert _configured
    for to, row in zip(_tiles[tile], _rows(p, step), strict=True):
        to[:] = row


def _store(tile: int, p: int, step: int) -> None:
    assert _configured
    for row, here in zip(_rows(p, step), _tiles[tile], strict=True):
        row[:] = here.tolist()


def _floats(tile: int) -> np.ndarray:
    return (_tiles[tile].view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _multiply(sums: int, x: int, w: int) -> None:
    assert _configured
    pairs = _floats(w).reshape(TILE_ROWS, -1, 2).transpose(0, 2, 1).reshape(2 * TILE_ROWS, -1)
    total = _tiles[sums].view(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        total += _floats(x) @ pairs


_I, _L, _P = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
_FUNCTIONS: dict[str, tuple[Callable[..., None], tuple[type, ...]]] = {
    "ldtilecfg": (_configure, (_P,)), "tilerelease": (_release, ()), "tilezero": (_zero, (_I,)),
    "tileloadd64": (_load, (_I, _P, _L)), "tilestored64": (_store, (_I, _P, _L)), "tdpbf16ps": (_multiply, (_I, _I, _I)),
}  # fmt: skip
_CALLS = {name: ctypes.CFUNCTYPE(None, *types)(function) for name, (function, types) in _FUNCTIONS.items()}
ADDRESSES = {f"simulated_{name}": ctypes.cast(call, ctypes.c_void_p).value or 0 for name, call in _CALLS.items()}
"""Of the functions that simulated kernels import."""


class SimulatedTiles(Tiles):
    """Calls instead of instructions."""

    def _call(self, name: str, types: list[str], args: str) -> None:
        wide = [t.replace("i8 immarg", "i32") for t in types]
        self.f.module.declare(f"simulated_{name}", "void", wide, external=True)
        self.f.raw(f"call void @simulated_{name}({args.replace('i8 ', 'i32 ')})")


@cache
def _process() -> jit._Process:
    return jit._Process()


def simulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Link kernels that call the simulation, in a JIT of their own: code is found by a hash that says nothing of tiles."""
    monkeypatch.setattr(jit, "symbol_address", lambda name: ADDRESSES.get(name) or symbol_address(name))
    monkeypatch.setattr(jit, "_only_process", _process)


def simulate_linears(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let linears run on any CPU with masked stores."""
    monkeypatch.setattr(AmxLinear, "refused", lambda self, target: "")
    monkeypatch.setattr(codegen, "emit_amx_linear", partial(emit_amx_linear, tiles=SimulatedTiles))
    simulate(monkeypatch)

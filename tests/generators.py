"""Generators on the host as torch has them on GPUs: the device's own one can be made to draw from the state of another."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from fusewright.plan.replay import copies
from tests.unit.plan.replay.test_training import Forgetful


@dataclass
class _State:
    content: torch.Tensor


class Generator(torch.Generator):
    """A generator of which several objects may share a state."""

    state: _State
    device = torch.device("cpu", 0)  # type: ignore[misc]

    @classmethod
    def of(cls, state: _State) -> Generator:
        made = cls()
        made.state = state
        return made

    @classmethod
    def seeded(cls, seed: int) -> Generator:
        return cls.of(_State(torch.Generator().manual_seed(seed).get_state()))

    def clone_state(self) -> Generator:
        return Generator.of(_State(self.get_state()))

    def manual_seed(self, seed: int) -> Generator:
        self.state.content = torch.Generator().manual_seed(seed).get_state()
        return self

    def get_state(self) -> torch.Tensor:
        return self.state.content.clone()

    def set_state(self, content: torch.Tensor) -> Generator:
        self.state.content = content.clone()
        return self


class Own(Generator):
    """The host's own generator: it draws from the state that it was last given."""

    def graphsafe_get_state(self) -> Generator:
        return Generator.of(self.state)

    def graphsafe_set_state(self, other: Generator) -> None:
        self.state.content = torch.get_rng_state()
        self.state = other.state
        torch.set_rng_state(self.state.content)

    def get_state(self) -> torch.Tensor:
        return torch.get_rng_state()


def installed(monkeypatch: pytest.MonkeyPatch) -> Generator:
    """Let torch find the host's own generator as it finds a GPU's."""
    made = Own.of(_State(torch.get_rng_state()))
    monkeypatch.setattr(torch.cpu, "default_generators", [made], raising=False)
    monkeypatch.setattr(torch.cpu, "_get_generator", lambda device: made, raising=False)
    return made


class Drawing(Forgetful):
    """A recorder that computes again in each replay, from the memory that the recorded call read, which it does not hold. What it
    draws from is left as it was when it records."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[list[torch.Generator]] = []

    def record(self, run: Any, warm: bool, shared: bool = True) -> tuple[Any, Callable[[], None]]:
        assert not warm and not shared
        return self.record_drawing(run, shared, ())

    def record_drawing(
        self, run: Any, shared: Any, generators: Sequence[torch.Generator]
    ) -> tuple[Any, Callable[[], None]]:
        self.given.append(list(generators))
        before = [g.get_state() for g in generators]
        with torch.random.fork_rng(devices=()):
            results = run()
        for g, state in zip(generators, before, strict=True):
            g.set_state(state)
        self.recorded += 1
        *first, given = run.args
        body, args = partial(run.func, *first), [_elsewhere(a) if isinstance(a, torch.Tensor) else a for a in given]
        del run, given

        def again() -> None:
            self.replays += 1
            for old, new in zip(results, body(args), strict=True):
                copies.flat(old).copy_(copies.flat(new))

        return results, again


def _elsewhere(t: torch.Tensor) -> torch.Tensor:
    """A tensor of the same memory that does not keep it."""
    span = copies.flat(t)
    if not span.numel():
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
    memory = (ctypes.c_byte * (span.numel() * t.element_size())).from_address(t.data_ptr())
    return torch.frombuffer(memory, dtype=torch.uint8).view(t.dtype).as_strided(t.shape, t.stride())

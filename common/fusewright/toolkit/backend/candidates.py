"""Candidates of a measured choice (`CompileContext.choose`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

Thunk: TypeAlias = Callable[[], Any]


class Lazy(Mapping[str, Thunk]):
    """Candidates whose tensors are allocated on first use, so that a remembered choice costs nothing."""

    def __init__(self, makers: Mapping[str, Callable[[], Thunk]]) -> None:
        self._makers = makers
        self._thunks: dict[str, Thunk] = {}

    def __getitem__(self, name: str) -> Thunk:
        maker = self._makers[name]

        def run() -> Any:
            if name not in self._thunks:
                self._thunks[name] = maker()
            return self._thunks[name]()

        return run

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

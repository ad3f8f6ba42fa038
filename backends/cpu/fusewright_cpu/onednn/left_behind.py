"""Limit the memory that oneDNN keeps for deleted models: 0.6 MB of machine code for each shape and form of a product, half of it
outside its cache of primitives and unreachable. A process that compiles and drops models of ever new shapes would
grow without bound, so after some number of such products new shapes stay with eager."""

from __future__ import annotations

import threading
import weakref

MOST = 128
"""The most shapes of products that deleted models may leave behind. Those of living models are not counted."""


class Shapes:
    """The shapes of products that oneDNN has code for, and their users."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._used: weakref.WeakKeyDictionary[object, set[str]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def admit(self, key: str, owner: object) -> bool:
        """Return whether oneDNN may get the shape `key`, for as long as `owner` lives. A shape that it has code for is free."""
        with self._lock:
            if key not in self._seen:
                living = set().union(*self._used.values())
                if len(self._seen - living) >= MOST:
                    return False
                self._seen.add(key)
            if owner is not None:
                self._used.setdefault(owner, set()).add(key)
            return True

    def clear(self) -> None:
        """Reset to the state of a new process, for tests."""
        with self._lock:
            self._seen.clear()
            self._used.clear()


SHAPES = Shapes()

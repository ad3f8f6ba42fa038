"""What oneDNN keeps of models that are gone: machine code for each shape and form of a product, 0.6 MB of it, half of it
beyond its cache of primitives and out of anybody's reach. A process that compiles and drops models of ever new shapes would
grow for ever, so that new shapes stay with eager from some number of such products on."""

from __future__ import annotations

import threading
import weakref

MOST = 128
"""Shapes of products that models which are gone may leave behind. Those of living models are not counted."""


class Shapes:
    """Which shapes of products oneDNN has code for, and who uses them."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._used: weakref.WeakKeyDictionary[object, set[str]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def admit(self, key: str, owner: object) -> bool:
        """Whether oneDNN may get the shape `key`, for as long as `owner` lives. One that it has code for costs nothing."""
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
        """As in a new process, for tests."""
        with self._lock:
            self._seen.clear()
            self._used.clear()


SHAPES = Shapes()

"""Verdicts that were found before."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

V = TypeVar("V")


class VerdictCache(Generic[V]):
    """The latest `most` verdicts, by digests of what was asked. Keys and values are small, so this bounds its bytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[bytes, V] = OrderedDict()

    def get(self, key: bytes) -> V | None:
        """What was found, if it is still known."""
        if (found := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
        return found

    def keep(self, key: bytes, verdict: V) -> None:
        """Know this from now on, in place of what was asked for longest ago."""
        self._kept[key] = verdict
        self._kept.move_to_end(key)
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)

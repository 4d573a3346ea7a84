"""An endless, resumable order over a data set: a pure function of (seed, epoch), so every rank draws the same."""

import hashlib
import random
from functools import lru_cache
from typing import Any


class Stream:
    """`position` counts the items drawn so far; to resume, set it.

    Epochs follow without a gap, so a draw may span two epochs and contain an item twice.
    """

    def __init__(self, items: list[Any], seed: int = 0, shuffle: bool = True):
        self.items, self.seed, self.shuffle = items, seed, shuffle
        self.position = 0
        self._order = lru_cache(maxsize=1)(self._order_of)

    def digest(self) -> str:
        """A digest of all items, in their order in the data set."""
        content = hashlib.sha256()
        for item in self.items:
            content.update(repr(item).encode())
        return content.hexdigest()

    def next(self, count: int) -> list[Any]:
        places = [divmod(place, len(self.items)) for place in range(self.position, self.position + count)]
        self.position += count
        return [self.items[self._order(epoch)[offset]] for epoch, offset in places]

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self.items)))
        if self.shuffle:
            # A string, not numbers added up: (seed 1, epoch 0) and (seed 0, epoch 1) must not share an order.
            digest = hashlib.sha256(f"{self.seed}/{epoch}".encode()).digest()
            random.Random(int.from_bytes(digest, "big")).shuffle(order)
        return order

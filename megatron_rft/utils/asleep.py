"""GPU memory that a sleeping engine of this process gave back to the driver. torch's allocator still counts it."""

import contextlib
from collections.abc import Iterator


class Asleep:
    """`size`: bytes now; `least`: the fewest since the last `take`."""

    size = least = 0

    @contextlib.contextmanager
    def changes(self) -> Iterator[None]:
        """The engine falls asleep or wakes up inside."""
        import torch

        torch.cuda.empty_cache()  # vLLM takes memory from the driver, not what torch's allocator keeps
        before = torch.cuda.mem_get_info()[0]
        yield
        self.size += torch.cuda.mem_get_info()[0] - before
        self.least = min(self.least, self.size)

    def take(self) -> int:
        least, self.least = self.least, self.size
        return least


asleep = Asleep()

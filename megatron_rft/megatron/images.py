"""Places the images of prompts in a packed micro-batch.

A prompt's image is a run of image tokens, one for each `merge` x `merge` patches. Its features come from the vision
tower and replace the embeddings of these tokens. Positions have three axes, time, height and width. A text token has
the same position in all; an image of (t, h, w) such cells has a grid of them, and the text after it goes on behind its
longer side (Qwen2-VL, arXiv:2409.12191, section 2.1). A text, an image of 2 x 3 and a text:

    time    0 1 | 2 2 2 2 2 2 | 5 6
    height  0 1 | 2 2 2 3 3 3 | 5 6
    width   0 1 | 2 3 4 2 3 4 | 5 6

Images are large, so a batch has only their keys. Each rank asks its source for what it computes: grids, and on the
first pipeline stage pixels, once for all responses to a prompt in a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rft.records import send
from megatron_rft.utils.errors import DataError

Grid = tuple[int, int, int]  # patches of an image in time, height and width


@dataclass
class Seen:
    """The images of a micro-batch on one rank. `pixels` [patches, width], on the first pipeline stage, and `grids`
    [images, 3]: the tower's inputs. `cells` [n]: the image tokens among this context-parallel rank's tokens; `features`
    [n]: the tower's output for each. `deep`: what the forward pass adds after the first layers, by layer."""

    pixels: Tensor | None
    grids: Tensor
    cells: Tensor
    features: Tensor
    deep: tuple[tuple[Tensor, Tensor], ...] = ()


@dataclass(frozen=True)
class Images:
    """`source` has, for the key of a prompt's images, `grids(key)`, a list of Grid, and `pixels(key)`, [patches,
    width]. `token`: the id of image tokens. `first_stage`: this rank needs pixels."""

    source: Any
    token: int
    merge: int
    first_stage: bool

    def place(self, cells: Any, keys: Tensor, tokens: Tensor, positions: Tensor) -> "Placed | None":
        """Place the images `keys` [B] of the sequences of `cells` (packing._Cells), whose `tokens` and `positions` [T]
        have no images yet. A sequence's images are those of its prompt, then those that its response was shown."""
        rope, features = positions.expand(3, -1).clone(), torch.full_like(tokens, -1)
        firsts, count = {}, 0  # the first feature of each key
        for number, key in enumerate(keys.tolist()):
            if key < 0 or not (grids := self.source.grids(key)):
                continue
            own = cells.of(number)
            rope[:, own] = rope_positions(tokens[own], grids, self.token, self.merge)
            mine = own[tokens[own] == self.token]
            if key not in firsts:
                firsts[key], count = count, count + len(mine)
            features[mine] = firsts[key] + torch.arange(len(mine))
        if ((tokens == self.token) & (features < 0)).any():
            raise DataError(f"a sequence has the token {self.token} of an image, which has no image: leave it out")
        if not firsts:
            return None
        pixels = torch.cat([self.source.pixels(key) for key in firsts]) if self.first_stage else None
        return Placed(rope, features, [self.source.grids(key) for key in firsts], pixels)


@dataclass(frozen=True)
class Placed:
    """Placed images: `positions` [3, T], `features` [T] the tower's output for each token, -1 for text."""

    positions: Tensor
    features: Tensor
    grids: list[list[Grid]]
    pixels: Tensor | None

    def seen(self, order: Tensor, device: torch.device) -> Seen:
        """What a rank that computes the tokens `order` sees."""
        mine = self.features[order]
        cells = (mine >= 0).nonzero().flatten()
        grids = torch.tensor([grid for each in self.grids for grid in each])
        pixels = None if self.pixels is None else send(self.pixels, device)
        return Seen(pixels, send(grids, device), send(cells, device), send(mine[cells], device))


def runs(ids: Tensor, grids: Sequence[Grid], token: int, merge: int) -> list[tuple[bool, int]]:
    """[n] ids of a sequence -> its runs of image tokens, one for each of `grids`, and of text: (is an image, length).
    Raises DataError if they do not fit."""
    same, lengths = (ids == token).unique_consecutive(return_counts=True)
    wanted = [t * (h // merge) * (w // merge) for t, h, w in grids]
    if (found := lengths[same].tolist()) != wanted:
        raise DataError(f"a sequence has runs of {found} image tokens, and its images {[*grids]} need {wanted}")
    return list(zip(same.tolist(), lengths.tolist(), strict=True))


def rope_positions(ids: Tensor, grids: Sequence[Grid], token: int, merge: int) -> Tensor:
    """[n] ids of a sequence -> [3, n] positions. Raises DataError if its runs of image tokens do not fit `grids`."""
    parts, start, rest = [], 0, iter(grids)
    for is_image, length in runs(ids, grids, token, merge):
        if is_image:
            t, h, w = next(rest)
            h, w = h // merge, w // merge
            axes = torch.meshgrid(*map(torch.arange, (t, h, w)), indexing="ij")
            parts.append(torch.stack(axes).view(3, -1) + start)
            start += max(h, w)
        else:
            parts.append(torch.arange(start, start + length).expand(3, -1))
            start += length
    return torch.cat(parts, 1)

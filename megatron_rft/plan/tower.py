"""Sizes and cost of a vision tower. No torch.

Each prompt is taken to have one image, the largest that the limit of pixels and the longest prompt allow. A micro-batch
computes it once.
"""

import math
from typing import Any

from megatron_rft.config.lora import VISION
from megatron_rft.config.sections import Data
from megatron_rft.families.towers import TOWER, tower_shapes, vision_of

PIXELS = 1 << 20  # of an image, where data.max_image_pixels does not limit it
PASSES = {"frozen": 1, "with adapters": 2, "trained": 3}  # by Recipe.vision: forward, gradients of inputs, of weights


class Tower:
    def __init__(self, config: Any):
        c = vision_of(config)
        shapes = {TOWER + name.removesuffix(".weight"): shape for name, shape in tower_shapes(config).items()}
        self.linear = {name: shape for name, shape in shapes.items() if VISION.fullmatch(name)}
        self.parameters = [math.prod(shape) for shape in shapes.values()]
        self.whole = sum(self.parameters)
        self.depth, self.hidden, self.ffn = c.depth, c.hidden_size, c.intermediate_size
        self.patch, self.merge = c.patch_size, c.spatial_merge_size  # pixels of a patch's side, patches of a token's
        self.deep = hasattr(c, "deepstack_visual_indexes")  # Qwen3-VL's: other norms, no gate, no windows

    def grid(self, data: Data, prompt: int) -> tuple[int, int, int]:
        """The largest image of a prompt of `prompt` tokens: time, height and width in patches."""
        tokens = (data.max_image_pixels or PIXELS) // (self.patch * self.merge) ** 2
        tokens = max(1, min(tokens, prompt - 8))  # a prompt has text too
        height = math.isqrt(tokens)
        return 1, height * self.merge, tokens // height * self.merge

    def activations(self, patches: int, vision: str) -> int:
        """Elements that the tower keeps for its backward pass; of a frozen one those of the block at work."""
        block = 10 * self.hidden + 2 * self.ffn if self.deep else 14 * self.hidden + 4 * self.ffn
        return patches * (block * (1 if vision == "frozen" else self.depth) + 8 * self.hidden)

    def flops(self, patches: int, vision: str = "frozen") -> float:
        """Of an image's forward pass and, unless the tower is frozen, of its backward pass."""
        attention = 4 * patches * self.hidden * self.depth / (1 if self.deep else 8)  # most layers have windows
        return patches * (2 * self.whole + attention) * PASSES[vision]

    def line(self, data: Data, vision: str) -> str:
        """The plan's line."""
        _, height, width = self.grid(data, data.max_prompt_tokens)
        tokens, cost = height * width // self.merge**2, self.flops(height * width, vision)
        return (
            f"vision tower: {self.whole / 1e6:.1f} M parameters, {vision}, on ranks of the first stage; an image of "
            f"{height * self.patch} x {width * self.patch} pixels: {tokens} tokens, {cost / 1e9:,.1f} GFLOP"
        )

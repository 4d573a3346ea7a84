"""Which experts a transformers model used in its last forward pass, if it is a mixture of experts."""

import numpy as np
import torch
from torch import Tensor, nn


class Routes:
    """Notes what each layer's router gives to its experts: transformers calls them with the tokens, the numbers of the
    experts of each token, and their weights."""

    def __init__(self, model: nn.Module):
        self._last: dict[int, Tensor] = {}  # place among the layers with experts -> [tokens, experts per token]
        layers = [module for name, module in model.named_modules() if name.endswith(".experts")]
        for place, experts in enumerate(layers):
            experts.register_forward_pre_hook(lambda _, given, place=place: self._last.update({place: given[1]}))
        self.layers, self.chosen = len(layers), model.config.num_experts_per_tok if layers else 0

    def last(self) -> Tensor:
        """[tokens, layers x experts per token] int16, the tokens in the order of the flattened input."""
        return torch.cat([self._last[place] for place in range(self.layers)], -1).short()

    def by_layer(self, experts: np.ndarray) -> np.ndarray:
        return experts.reshape(len(experts), self.layers, self.chosen)

"""Which experts a transformers model used in its last forward pass, if it is a mixture of experts."""

import torch
from torch import Tensor, nn


class Routes:
    """Notes what each layer's router gives to its experts: transformers calls them with the tokens, the numbers of the
    experts of each token, and their weights."""

    def __init__(self, model: nn.Module):
        self._last: dict[nn.Module, Tensor] = {}  # a layer's experts -> [tokens, experts per token]
        for name, module in model.named_modules():
            if name.endswith(".experts"):
                module.register_forward_pre_hook(lambda experts, given: self._last.update({experts: given[1]}))

    def last(self) -> Tensor:
        """[tokens, layers with experts, experts per token] int16, the tokens in the order of the flattened input."""
        return torch.stack([*self._last.values()], 1).short()

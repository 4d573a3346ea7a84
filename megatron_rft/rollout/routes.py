"""The routes of sampled responses: which experts of a mixture the engine used for each token, in each layer.

The trainer computes with the same experts (router replay, "R3": arXiv 2510.11370), because a token whose experts flip
between engine and trainer has another log-prob than rounding would give. Routes are large (layers x experts per token,
one or two bytes each), so they stay on the rank whose engine made them. A batch has only their keys,
`sequences["route"]`, and `megatron/routers.py` moves routes to the ranks that compute their layers and tokens.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rft.families.shapes import experts, is_mixture
from megatron_rft.utils.errors import RunFailed

PREFIX = "routes."  # of a checkpoint's tensors


@dataclass
class RouteStore:
    """The routes that this rank holds. `layers`: the numbers of the layers with experts, from 0."""

    layers: list[int]
    experts: int
    chosen: int  # experts per token
    held: dict[int, np.ndarray] = field(default_factory=dict)  # key -> [tokens, layers, chosen]

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.uint8 if self.experts <= 256 else np.int16)

    @classmethod
    def of(cls, config: Any) -> "RouteStore":
        layers = [layer for layer in range(config.num_hidden_layers) if is_mixture(config, layer)]
        return cls(layers, experts(config), config.num_experts_per_tok)

    def take(self, rollouts: list, step: int) -> list:
        """Keep the routes of this rank's rollouts. Returns the rollouts with keys instead."""
        kept = []
        for rollout in rollouts:
            if rollout.score.error is not None:  # no batch has it, and its episode may have ended anywhere
                kept.append(replace(rollout, response=replace(rollout.response, routes=-1)))
                continue
            response, routes = rollout.response, rollout.response.routes
            prompt = len(response.prompt_ids or rollout.prompt.token_ids)
            tokens = prompt + len(response.token_ids) - response.segment_count  # the last ones are not fed
            if response.segment_count > 1 and routes is not None:
                routes = np.concatenate(routes)
            where = f"step {step}, problem {rollout.prompt.index}, response {rollout.sample}"
            routes = self.checked(routes, tokens, where)
            key = step << 32 | rollout.prompt_index << 12 | rollout.sample
            self.held[key] = routes
            kept.append(replace(rollout, response=replace(rollout.response, routes=key)))
        return kept

    def checked(self, routes: np.ndarray | None, tokens: int, where: str) -> np.ndarray:
        """Return `routes` in the smallest type. Raises RunFailed, with token and layer, if some are missing, double or
        not those of this model."""
        wanted = (tokens, len(self.layers), self.chosen)
        shape = (0, *wanted[1:]) if routes is None else routes.shape
        if routes is None or shape[1:] != wanted[1:] or shape[0] < tokens:
            what = f"token {shape[0]} has no experts" if shape[1:] == wanted[1:] else "each token has other numbers"
            raise self._refused(where, f"{what}: {shape} of (tokens, layers, experts per token) {wanted}")
        routes = routes[:tokens]
        ordered = np.sort(routes, -1)
        problems = {
            "is missing": routes < 0,
            f"is foreign: the model has {self.experts}": routes >= self.experts,
            "is there twice": ordered[..., 1:] == ordered[..., :-1],
        }
        for problem, places in problems.items():
            if places.any():
                token, layer, place = (int(numbers[0]) for numbers in places.nonzero())
                found = (ordered if "twice" in problem else routes)[token, layer, place]
                raise self._refused(where, f"token {token}, layer {self.layers[layer]}: expert {found} {problem}")
        return routes.astype(self.dtype)

    def _refused(self, where: str, problem: str) -> RunFailed:
        return RunFailed(
            f"{where}: the engine's experts cannot be replayed: {problem}. rollout.replay_routes=off trains with the "
            "trainer's own"
        )

    def release(self, step: int, wanted: Iterable[Tensor]) -> None:
        """Forget the routes of batches up to `step`, apart from the keys in `wanted`."""
        kept = {key for keys in wanted for key in keys.tolist()}
        self.held = {key: routes for key, routes in self.held.items() if key >> 32 > step or key in kept}

    def state(self, gather: Callable[[list], list]) -> dict[str, Tensor]:
        """Return all routes for a checkpoint, on rank 0. `gather`: the items of all ranks on rank 0."""
        held = gather(list(self.held.items()))
        return {f"{PREFIX}{key}": torch.from_numpy(np.ascontiguousarray(routes)) for key, routes in sorted(held)}

    def restore(self, state: dict[str, Tensor], rank: int, world: int) -> dict[str, Tensor]:
        """Take this rank's part of a checkpoint's routes. Returns the rest of the state."""
        saved = {name: routes for name, routes in state.items() if name.startswith(PREFIX)}
        for name in sorted(saved)[rank::world]:
            self.held[int(name.removeprefix(PREFIX))] = saved[name].numpy()
        return {name: value for name, value in state.items() if name not in saved}

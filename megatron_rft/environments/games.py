"""Environments of gymnasium and textarena. A problem's field `seed`, else the number of its row, is the seed of its
world, so all responses to a problem meet the same one."""

import importlib
import json
import re
from typing import Any

import numpy as np

from megatron_rft.environments.base import Environment, Turn
from megatron_rft.responses import Prompt, Score
from megatron_rft.utils.errors import ConfigError, first_line

HIGHLIGHTED = re.compile(r"\x1b\[[1-9][0-9;]*m(.*?)\x1b\[0m")  # on a terminal: mostly where the player stands


class Game(Environment):
    """One world of the library's `make`."""

    library: str

    def __init__(self, make: Any, id: str, options: dict[str, Any]):
        self.world = make(id, **options)

    @classmethod
    def shared(cls, id: str, options: dict[str, Any]) -> dict[str, Any]:
        """The arguments of each environment; one is made to see that it can be."""
        shared = {"make": importlib.import_module(cls.library).make, "id": id, "options": options}
        try:
            cls(**shared).close()
        except Exception as error:  # of a library and the user's options
            raise ConfigError(f"environment.id: {id} cannot be made: {first_line(error)}") from None
        return shared

    def close(self) -> None:
        self.world.close()


class GymnasiumEnvironment(Game):
    """The policy writes an action: the last number of its turn for `Discrete`, the text for `Text`, JSON for others.
    With `render_mode: ansi` it sees the drawn world, else the observation as JSON. pass@1 counts an episode whose
    rewards sum to the environment's `reward_threshold`, or to 1."""

    library = "gymnasium"

    def reset(self, prompt: Prompt, seed: int) -> str:
        self.total = 0.0
        observation, _ = self.world.reset(seed=world_seed(prompt))
        return self.shown(observation)

    def step(self, text: str) -> Turn:
        space = self.world.action_space
        try:
            action = read_action(space, text)
        except (ValueError, TypeError, LookupError):
            return Turn(f"That is no action of {space}.")
        observation, reward, terminated, truncated, _ = self.world.step(action)
        self.total += float(reward)
        return Turn(self.shown(observation), float(reward), bool(terminated or truncated))

    def shown(self, observation: Any) -> str:
        if self.world.render_mode == "ansi":
            return HIGHLIGHTED.sub(r"[\1]", self.world.render()).strip()
        if isinstance(observation, str):
            return observation
        return json.dumps(self.world.observation_space.to_jsonable([observation]), default=np.ndarray.tolist)[1:-1]

    def score(self) -> Score:
        wanted = self.world.spec.reward_threshold or 1.0
        return Score(0.0, f"rewards of {self.total:g}", correct=self.total >= wanted)


def read_action(space: Any, text: str) -> Any:
    """Raises an exception if the text is no action of the space."""
    kind = type(space).__name__
    if kind == "Discrete":
        action = int(re.findall(r"-?\d+", text)[-1])
    else:
        action = text.strip() if kind == "Text" else space.from_jsonable([json.loads(text)])[0]
    if not space.contains(action):
        raise ValueError(text)
    return action


class TextArenaEnvironment(Game):
    """A game for one player. `id` should end with -raw: the other wrappers repeat the whole game in each turn."""

    library = "textarena"

    def reset(self, prompt: Prompt, seed: int) -> str:
        self.world.reset(num_players=1, seed=world_seed(prompt))
        return self.shown()

    def step(self, text: str) -> Turn:
        done, _ = self.world.step(action=text)
        return Turn(self.shown(), done=done)

    def shown(self) -> str:
        """What the game says; the player's own action is left out."""
        player, observation = self.world.get_observation()
        if isinstance(observation, str):
            return observation
        return "\n".join(message for sender, message, _ in observation if sender != player)

    def score(self) -> Score:
        rewards, about = self.world.close()
        return Score(float((rewards or {}).get(0, 0.0)), reason=str(about[0].get("reason", "not finished")))

    def close(self) -> None:
        """`score` has closed it."""


def world_seed(prompt: Prompt) -> int:
    return int(prompt.fields.get("seed", prompt.index))

"""gymnasium's FrozenLake as an environment of its own: the policy sees the lake and writes a move."""

import re

import gymnasium

from megatron_rft.environments import Environment, Prompt, Turn

MOVES = "Cross the lake from S to G without falling into a hole H. Answer with 0: left, 1: down, 2: right, 3: up."
HERE = re.compile(r"\x1b\[41m(.*?)\x1b\[0m")  # on a terminal where the player stands is red


class FrozenLake(Environment):
    def reset(self, prompt: Prompt, seed: int) -> str:
        self.world = gymnasium.make("FrozenLake-v1", is_slippery=False, render_mode="ansi")
        self.world.reset(seed=prompt.index)
        self.crossed = False
        return f"{MOVES}\n\n{self.lake()}"

    def lake(self) -> str:
        return HERE.sub(r"[\1]", self.world.render()).strip()

    def step(self, text: str) -> Turn:
        moves = re.findall(r"\b[0-3]\b", text)
        if not moves:
            return Turn("That is no move. " + MOVES)
        _, reward, fallen, too_long, _ = self.world.step(int(moves[-1]))
        self.crossed = reward > 0
        return Turn(self.lake(), done=fallen or too_long)

    def score(self) -> float:
        return float(self.crossed)

"""An environment for the tiny run: it shows a digit after the first turn, and the second turn has to repeat it."""

from megatron_rft.environments import Environment, Prompt, Score, Turn


class Repeat(Environment):
    def reset(self, prompt: Prompt, seed: int) -> None:
        self.digit, self.heard = str(seed % 3), []

    def step(self, text: str) -> Turn:
        self.heard.append(text)
        return Turn(self.digit, reward=0.5 * (text in tuple("012")), done=len(self.heard) == 2)

    def score(self) -> Score:
        right = self.heard[1:] == [self.digit]
        return Score(float(right), reason=f"the digit was {self.digit}", correct=right)


class Silent(Repeat):
    """The recipe's reward judges the last turn."""

    def score(self) -> None:
        return None


class Opened(Repeat):
    """Its first message follows the prompt."""

    def reset(self, prompt: Prompt, seed: int) -> str:
        super().reset(prompt, seed)
        return "0"

    def score(self) -> Score:
        """Right is who ends two turns, which a random model does in one of eight episodes."""
        return Score(float(len(self.heard) == 2))

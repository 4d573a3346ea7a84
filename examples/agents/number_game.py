"""The number game: a number from 0 to 6, three guesses. After a wrong guess the environment says whether the number is
larger (>) or smaller (<). Who ignores the answers finds it in 3 of 7 games (0.43); who bisects finds it in all."""

from megatron_rft.environments import Environment, Prompt, Score, Turn


class Guess(Environment):
    def reset(self, prompt: Prompt, seed: int) -> None:
        self.number, self.guesses = prompt.answer, []

    def step(self, text: str) -> Turn:
        self.guesses.append(text)
        if text == self.number or text not in tuple("0123456"):
            return Turn(done=True)
        return Turn(self.answer(text))

    def answer(self, guess: str) -> str:
        return ">" if self.number > guess else "<"

    def score(self) -> Score:
        found = self.number in self.guesses
        return Score(float(found), reason=f"guessed {' '.join(self.guesses)} for {self.number}", correct=found)


class Silent(Guess):
    """The same without an answer: what can be learned by luck alone."""

    def answer(self, guess: str) -> str:
        return "?"

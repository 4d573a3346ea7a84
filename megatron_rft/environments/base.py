"""The protocol of an environment, which plays one episode with the policy."""

from dataclasses import dataclass

from megatron_rft.responses import Prompt, Score

Message = dict[str, str]  # {"role": "user", "content": "..."}


@dataclass(frozen=True)
class Turn:
    """The answer to a turn of the policy. `text` is shown to it as a message of the user, a list of messages with their
    roles; then the policy has another turn, unless `done`. `reward` is added to the episode's score."""

    text: str | list[Message] = ""
    reward: float = 0.0
    done: bool = False


class Environment:
    """One episode. It is made without arguments, in another process. An exception drops the episode.

    What it says must depend on the problem, the seed and the policy's texts alone: a lost environment is made again and
    hears the same texts. Before each call the generators of `random` and, if it is imported, numpy get a seed.
    """

    def reset(self, prompt: Prompt, seed: int) -> str | list[Message] | None:
        """Begin an episode. Returns messages that follow the problem's prompt, if there are any. `prompt` has no
        token ids. `seed` depends on the run's seed, the step, the problem and the number of the response."""

    def step(self, text: str) -> Turn:
        """Answer a turn of the policy: its text without special tokens."""
        raise NotImplementedError

    def score(self) -> Score | float | None:
        """Judge the whole episode; None: the recipe's reward judges the policy's last turn."""
        return None

    def close(self) -> None:
        """Free what the episode holds."""

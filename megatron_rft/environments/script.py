"""Plays episodes in which the policy says given texts, to try an environment or a program."""

from collections.abc import Callable, Iterable, Iterator

from megatron_rft.environments.player import Episodes
from megatron_rft.inference.engine import Engine, Group, Request, Sampling, limit
from megatron_rft.records import Prompt, Response


class Script(Engine):
    """Says given texts, one after the other; the last one again and again."""

    def __init__(self, encode: Callable[[str], list[int]], texts: list[str]):
        self.encode, self.texts = encode, list(texts)

    def generate(self, requests: list[Request], sampling: Sampling) -> Iterator[Group]:
        for request in requests:
            ids = self.encode(self.texts.pop(0) if len(self.texts) > 1 else self.texts[0])
            most = limit(request, sampling)
            finish, ids = "stop" if len(ids) <= most else "length", tuple(ids[:most])
            yield Group(request.id, (Response(ids, (0.0,) * len(ids), finish, 0),) * request.n)

    def load_weights(self, stream: Iterable, version: int) -> None:
        """It has none."""

    def checksums(self) -> dict[str, int | None]:
        return {}

    def close(self) -> None:
        """It holds nothing."""


def scripted(player: Episodes, episodes: list[tuple[Prompt, list[str]]], longest: int) -> list[Response]:
    """Play episodes of at most `longest` tokens, each with the texts that the policy says in it."""
    template, found = player.template, []

    def encode(text: str) -> list[int]:
        return [*template.tokenizer.encode(text, add_special_tokens=False), template.stops[0]]

    for number, (problem, texts) in enumerate(episodes):
        request = Request(number, problem.token_ids, 1, number, problem=problem)
        found += [r for g in player.play(Script(encode, texts), [request], Sampling(longest)) for r in g.responses]
    return found

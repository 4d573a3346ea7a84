"""Guesses of responses, for a decoder to check many tokens at a time. They change its speed, and never a token.

Position i of a response draws its token from the logits after the tokens before it, with a random number of its own
(`decoding.uniforms`). Whoever has the logits at many positions therefore has their tokens, as long as the guess of what
is before each of them was right; the first token that differs from the guess is right too, and what is behind it is
dropped.
"""

FIRST_GUESSES = 4  # after a difference; a guess that holds doubles the next
SUFFIX = 3  # tokens by which the place in the draft is found again


class Guess:
    """Where one response is in its draft, and how far ahead it is worth guessing."""

    def __init__(self, draft: tuple[int, ...]):
        self.draft, self.place, self.reach = draft, 0, len(draft)

    def next(self, most: int) -> tuple[int, ...]:
        """Up to so many tokens that may come next."""
        return self.draft[self.place : self.place + most]

    def tokens(self) -> tuple[int, ...]:
        """Those of them that are worth a pass."""
        return self.next(self.reach)

    def took(self, written: list[int], new: int) -> None:
        """`written` are the last tokens of the response, of which `new` have just come, and a few before them.

        A copy goes on where it was. After a difference the place is where the last tokens stand in the draft, nearest
        to where it should be; else one token is taken to have been changed.
        """
        guessed = self.draft[self.place : self.place + new]
        if guessed == tuple(written[-new:]):
            self.place, self.reach = self.place + new, max(2 * self.reach, FIRST_GUESSES)
            return
        held = next(i for i, token in enumerate(written[-new:]) if guessed[i : i + 1] != (token,))
        self.reach = max(FIRST_GUESSES, 2 * held)
        expected = self.place + new
        self.place = next(
            (place for size in range(SUFFIX, 1, -1) if (place := self._after(tuple(written[-size:]), expected))),
            expected,
        )

    def _after(self, suffix: tuple[int, ...], expected: int) -> int | None:
        size = len(suffix)
        ends = [end for end in range(size, len(self.draft) + 1) if self.draft[end - size : end] == suffix]
        return min(ends, key=lambda end: abs(end - expected), default=None)

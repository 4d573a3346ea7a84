"""Builds the self-teacher's prompts with feedback on a response (SDPO): a correct sibling, the verifier's reason, or
the reference solution. The objective sees only these prompts, the contexts.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from megatron_rft.config.algorithms.online import SDPO
from megatron_rft.records import Prompt
from megatron_rft.rollout.sampler import ScoredResponse


@dataclass(frozen=True)
class Feedback:
    """Builds the contexts for the responses of a group.

    Of the sources in `options`, a wrong response gets all that are available, but the reference solution only if no
    sibling is correct. A correct response gets only a correct sibling.

    Args:
        encode: (problem, text of the prompt) -> token ids, through the chat template where prompts go through it.
    """

    options: SDPO
    encode: Callable[[Prompt, str], list[int]]
    tokenizer: Any

    def __call__(self, group: list[ScoredResponse]) -> list[ScoredResponse]:
        """The responses with their contexts. What an environment said comes before the verifier's reason."""
        return [replace(each, context=self._context(index, group)) for index, each in enumerate(group)]

    def _context(self, index: int, group: list[ScoredResponse]) -> tuple[int, ...]:
        prompt, parts = group[index].prompt, self._parts(index, group)
        if not parts:
            return ()
        feedback = self.cut("\n\n".join(parts))
        asked = self.options.teacher_template.format(prompt=prompt.question, feedback=feedback)
        return tuple(self.encode(prompt, asked))

    def cut(self, text: str) -> str:
        """The text up to the most tokens that feedback may have."""
        ids, limit = self.tokenizer.encode(text, add_special_tokens=False), self.options.max_feedback_tokens
        return text if len(ids) <= limit else self.tokenizer.decode(ids[:limit])

    def _parts(self, index: int, group: list[ScoredResponse]) -> list[str]:
        """Return the parts of the feedback on response `index`. Its sibling is the next correct one in sample order."""
        own, options = group[index], self.options
        right = [i for i, each in enumerate(group) if each.score.error is None and each.score.right]
        others = sorted((i for i in right if i != index), key=lambda i: (i < index, i))
        reason = "\n".join(filter(None, (*own.response.said, own.score.reason)))
        solution = own.prompt.fields.get(options.solution_field)
        parts = []
        if "sibling" in options.feedback and others:
            parts.append(options.solution_template.format(group[others[0]].text.strip()))
        elif "solution" in options.feedback and index not in right and solution:
            parts.append(options.solution_template.format(str(solution).strip()))
        if "error" in options.feedback and index not in right and reason:
            parts.append(options.error_template.format(reason.strip()))
        return parts

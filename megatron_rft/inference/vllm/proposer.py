"""Predicted output for vLLM's speculative decoding: the draft is a prediction of the whole response.

A request may carry a draft (`Request.draft`). The proposer proposes its next tokens, and the model verifies them in one
pass.
"""

from typing import Any

FIRST_REACH = 4  # tokens to propose after a mismatch; doubled after each fully accepted proposal
SUFFIX = 3  # last tokens of the response that are searched for in the draft after a mismatch


class DraftPosition:
    """The position of one response in its draft, and how many tokens to propose next."""

    def __init__(self, draft: tuple[int, ...]):
        self.draft, self.position, self.reach = draft, 0, len(draft)

    def proposal(self) -> tuple[int, ...]:
        return self.draft[self.position : self.position + self.reach]

    def update(self, written: list[int], new: int) -> None:
        """Advance the position. `written`: the last tokens of the response; the last `new` of them are new.

        If the new tokens match the draft, the position advances by `new`. Otherwise the last tokens of the response are
        searched for in the draft, and the match nearest to the expected position counts. Without a match the position
        also advances by `new`, as if one token had been replaced.
        """
        expected = self.draft[self.position : self.position + new]
        if expected == tuple(written[-new:]):
            self.position, self.reach = self.position + new, max(2 * self.reach, FIRST_REACH)
            return
        accepted = next(i for i, token in enumerate(written[-new:]) if expected[i : i + 1] != (token,))
        self.reach = max(FIRST_REACH, 2 * accepted)
        after = self.position + new
        found = (self._end_of(tuple(written[-size:]), after) for size in range(SUFFIX, 1, -1))
        self.position = next((end for end in found if end), after)

    def _end_of(self, suffix: tuple[int, ...], expected: int) -> int | None:
        """Return the position at which `suffix` ends in the draft: the nearest to `expected`, None if there is none."""
        size = len(suffix)
        ends = [end for end in range(size, len(self.draft) + 1) if self.draft[end - size : end] == suffix]
        return min(ends, key=lambda end: abs(end - expected), default=None)


class PredictedOutput:
    """Implements vLLM's interface for a custom proposer. The engine sets `runner`, which has the requests."""

    def __init__(self, vllm_config: Any):
        self.count = vllm_config.speculative_config.num_speculative_tokens
        self.longest = vllm_config.model_config.max_model_len
        self.runner: Any = None
        self.positions: dict[str, DraftPosition] = {}  # by request id

    def load_model(self, *_: Any, **__: Any) -> None:
        """Do nothing: predicted output has no model."""

    def propose(self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings=None) -> list[list[int]]:
        """Return the tokens to verify next for each row of the batch.

        Args:
            sampled_token_ids: the tokens of the last step for each row.
            num_tokens_no_spec: [rows] length of prompt and response.
            token_ids_cpu: [rows, longest] prompt and response.
        """
        if self.runner is None:  # during vLLM's warm-up
            return [[] for _ in sampled_token_ids]
        ids, proposals = self.runner.input_batch.req_ids, []
        for row, sampled in enumerate(sampled_token_ids):
            length = int(num_tokens_no_spec[row])
            last = token_ids_cpu[row, max(0, length - len(sampled) - SUFFIX) : length].tolist()
            room = max(0, min(self.count, self.longest - length - 1))
            proposals.append(self._next(ids[row], last, len(sampled))[:room] if sampled else [])
        self.positions = {id: self.positions[id] for id in ids if id in self.positions}
        return proposals

    def _next(self, id: str, last: list[int], new: int) -> list[int]:
        draft = (self.runner.requests[id].sampling_params.extra_args or {}).get("draft")
        if not draft:
            return []
        position = self.positions.setdefault(id, DraftPosition(tuple(draft)))
        position.update(last, new)
        return list(position.proposal())

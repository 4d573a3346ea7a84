"""A request's guess of its response (`Request.draft`) as a method of vLLM's speculative decoding: its next tokens are
checked by the model in one pass, like any draft's. Where one is in the guess, `drafts.Guess` knows."""

from typing import Any

from megatron_rft.inference.hf.drafts import SUFFIX, Guess


class PredictedOutput:
    """vLLM's interface of a custom proposer. `runner`, which knows the requests, is set once the engine stands."""

    def __init__(self, vllm_config: Any):
        self.count = vllm_config.speculative_config.num_speculative_tokens
        self.longest = vllm_config.model_config.max_model_len
        self.runner: Any = None
        self.guesses: dict[str, Guess] = {}  # of the requests under way

    def load_model(self, *_: Any, **__: Any) -> None:
        """There is none."""

    def propose(self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings=None) -> list[list[int]]:
        """For each row of the batch the tokens to check next. `sampled_token_ids`: those that have just come;
        `token_ids_cpu`: prompt and response [rows, longest], of which `num_tokens_no_spec` [rows] are written."""
        if self.runner is None:  # vLLM warms up
            return [[] for _ in sampled_token_ids]
        ids, found = self.runner.input_batch.req_ids, []
        for row, sampled in enumerate(sampled_token_ids):
            length = int(num_tokens_no_spec[row])
            last = token_ids_cpu[row, max(0, length - len(sampled) - SUFFIX) : length].tolist()
            room = max(0, min(self.count, self.longest - length - 1))
            found.append(self._next(ids[row], last, len(sampled))[:room] if sampled else [])
        self.guesses = {id: self.guesses[id] for id in ids if id in self.guesses}
        return found

    def _next(self, id: str, last: list[int], new: int) -> list[int]:
        draft = (self.runner.requests[id].sampling_params.extra_args or {}).get("draft")
        if not draft:
            return []
        guess = self.guesses.setdefault(id, Guess(tuple(draft)))
        guess.took(last, new)
        return list(guess.tokens())

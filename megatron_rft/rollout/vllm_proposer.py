"""Speculative decoding from a guess of the response that the request itself carries (`Request.draft`).

The tokens that the guess has next are checked by the model in one pass, like any draft's. Worth it where a response
repeats most of something known: a refiner that copies what it corrects.
"""

from typing import Any

ANCHOR = 3  # written tokens that must stand in the draft to know where one is in it
UNSURE = 3  # tokens to propose where they do not: as if the last ones were replaced one by one


def place_in(draft: list[int], written: list[int], shift: int) -> int | None:
    """The place in `draft` right after what was last `written`; of several, the nearest to the one that `shift`, the
    distance so far between places in the draft and in the response, leads to. None where there is none."""
    anchor = written[-ANCHOR:]
    expected, size = len(written) + shift, len(anchor)
    if draft[max(0, expected - size) : max(0, expected)] == anchor:
        return expected
    places = [end for end in range(size, len(draft) + 1) if draft[end - size : end] == anchor]
    return min(places, key=lambda place: abs(place - expected), default=None)


class PredictedOutput:
    """vLLM's interface of a custom proposer. `runner`, which knows the requests, is set once the engine stands."""

    def __init__(self, vllm_config: Any):
        self.count = vllm_config.speculative_config.num_speculative_tokens
        self.longest = vllm_config.model_config.max_model_len
        self.runner: Any = None
        self.shifts: dict[str, int] = {}  # request -> distance between places in its draft and in its response

    def load_model(self, *_: Any, **__: Any) -> None:
        """There is none."""

    def propose(self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings=None) -> list[list[int]]:
        """For each row of the batch the tokens to check next. `token_ids_cpu`: prompt and response [rows, longest],
        of which `num_tokens_no_spec` [rows] are written."""
        if self.runner is None:  # vLLM warms up
            return [[] for _ in sampled_token_ids]
        ids = self.runner.input_batch.req_ids
        found = []
        for row, sampled in enumerate(sampled_token_ids):
            length = int(num_tokens_no_spec[row])
            room = min(self.count, self.longest - length - 1)
            found.append(self._next(ids[row], token_ids_cpu[row, :length], room) if sampled and room > 0 else [])
        self.shifts = {id: self.shifts[id] for id in ids if id in self.shifts}
        return found

    def _next(self, id: str, tokens: Any, room: int) -> list[int]:
        request = self.runner.requests[id]
        draft = (request.sampling_params.extra_args or {}).get("draft")
        if not draft:
            return []
        written = tokens[len(request.prompt_token_ids) :].tolist()
        shift = self.shifts.get(id, 0)
        place = place_in(draft, written, shift)
        if place is None:
            return draft[len(written) + shift :][: min(room, UNSURE)] if len(written) + shift > 0 else []
        self.shifts[id] = place - len(written)
        return draft[place : place + room]

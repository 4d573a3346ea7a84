"""Metrics of speculative decoding from vLLM's counters: how many draft tokens the model accepted."""

from collections import Counter
from collections.abc import Iterable

COUNTERS = tuple(f"vllm:spec_decode_num_{what}" for what in ("drafts", "draft_tokens", "accepted_tokens"))
PASSES, PROPOSED, ACCEPTED = (f"speculation/{what}" for what in ("passes", "proposed", "accepted"))


class Acceptance:
    """Measures the increase of the counters between two calls of `since`."""

    def __init__(self):
        self._seen: Counter[str] = Counter()

    def since(self, counted: Iterable[tuple[str, float]]) -> dict[str, float]:
        """Return the metrics since the last call. `counted`: (name, value) pairs; values of the same name are added."""
        total: Counter[str] = Counter()
        for name, value in counted:
            total[name] += value
        new = [total[name] - self._seen[name] for name in COUNTERS]
        self._seen = total
        return metrics(*new)


def metrics(passes: float, proposed: float, accepted: float) -> dict[str, float]:
    """Return the metrics for `passes` of the model over drafts with `proposed` and `accepted` draft tokens."""
    if not passes:
        return {}
    found = {PASSES: passes, PROPOSED: proposed, ACCEPTED: accepted}
    return found | {"speculation/tokens_per_step": 1 + accepted / passes}


def joined(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return the sum of the metrics of several engines or rounds."""
    parts = [part for part in parts if part]
    return metrics(*(sum(part[name] for part in parts) for name in (PASSES, PROPOSED, ACCEPTED)))

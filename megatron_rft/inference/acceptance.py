"""How far the drafts of speculative decoding went: metrics from vLLM's counters."""

from collections.abc import Iterable

COUNTERS = tuple(f"vllm:spec_decode_num_{what}" for what in ("drafts", "draft_tokens", "accepted_tokens"))
PASSES, PROPOSED, ACCEPTED = (f"speculation/{what}" for what in ("passes", "proposed", "accepted"))


class Acceptance:
    """What was counted between two looks."""

    def __init__(self):
        self._seen = dict.fromkeys(COUNTERS, 0.0)

    def since(self, counted: Iterable[tuple[str, float]]) -> dict[str, float]:
        """`counted`: (name, value) of some counters, a name perhaps several times."""
        total = dict.fromkeys(COUNTERS, 0.0)
        for name, value in counted:
            if name in total:
                total[name] += value
        new = [total[name] - self._seen[name] for name in COUNTERS]
        self._seen = total
        return metrics(*new)


def metrics(passes: float, proposed: float, accepted: float) -> dict[str, float]:
    """Of `passes` of the model over drafts: tokens proposed and accepted, and tokens per pass."""
    if not passes:
        return {}
    return {
        PASSES: passes,
        PROPOSED: proposed,
        ACCEPTED: accepted,
        "speculation/tokens_per_step": 1 + accepted / passes,
    }


def joined(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    """Of several engines, or of one several times."""
    parts = [part for part in parts if part]
    return metrics(*(sum(part[name] for part in parts) for name in (PASSES, PROPOSED, ACCEPTED)))

"""Seconds of a step's generation with a tail of long responses, for the comparison with published steps (fit_table.py).

Lengths are lognormal with the given mean, and one response of a hundred reaches the limit, so that a batch empties
slowly: its last steps read all weights for a few sequences. That is what an engine on more devices shortens, at the
price of two sums over its devices in each layer. This roofline is divided by the share of it that engines reach.
"""

import math
from statistics import NormalDist

from megatron_rft.plan import memory
from megatron_rft.plan.devices import Efficiency
from megatron_rft.plan.search import Search
from tools.generation import KERNELS, EngineEstimate

AT_LIMIT = 0.01  # share of responses that reach the limit
PARTS = 256  # of the longest response, in which the number of sequences is taken as constant
SUM = 10e-6  # seconds of a sum over an engine's devices: a few kilobytes over NVLink
# Share of this roofline that engines reached in whole steps of RL, with the host's work, sampling, uneven engines and
# all between the phases. Fitted to three published steps; docs/planning.md has three others to test it.
REACHED = 0.44
NORMAL = NormalDist()


def share_longer(tokens: float, mean: float, longest: float) -> float:
    """Return the share of responses with more than `tokens` tokens, lognormal with this mean."""
    if mean >= longest:
        return 1.0
    edge = NORMAL.inv_cdf(1 - AT_LIMIT)
    sigma = edge - math.sqrt(max(edge**2 - 2 * math.log(longest / mean), 0.0))
    return 1 - NORMAL.cdf((math.log(max(tokens, 1e-9) / mean) + sigma**2 / 2) / sigma)


def tail(engine: EngineEstimate, prompts: int, group: int, prompt: float, response: float, longest: float) -> float:
    """Return the seconds of `engine` for `group` responses to each of `prompts`. `prompt`, `response`: mean lengths."""
    s, count = engine.s, prompts * group
    fixed = len(s.mixture) * (KERNELS * engine.efficiency.launch + (2 * SUM if engine.devices > 1 else 0))
    waves = math.ceil(count / engine.places)
    width, total = longest / PARTS, 0.0
    for part in range(PARTS):
        done = (part + 0.5) * width
        alive = max(count / waves * share_longer(done, response, longest), 1.0)  # the longest response of all
        read = engine.read(math.ceil(alive)) * engine.element + alive * (prompt + done) * engine.token
        total += width * (max(read / engine.bandwidth, 2 * s.multiplied * alive / engine.flops) + fixed)
    prefill = 2 * s.multiplied * prompts * prompt / engine.flops
    return (waves * total + prefill) / REACHED


def generation(search: Search, workers: int) -> float:
    """Return the seconds of a step's generation by colocated engines of so many GPUs."""
    r, longest = search.recipe, search.recipe.rollout.max_response_tokens
    prompts = -(-r.rollout.prompts_per_step // max(1, search.own.world // workers))
    element = memory.BYTES[r.rollout.dtype or r.model.precision]
    engine = EngineEstimate(search.chip, Efficiency(), search.s, workers, r.rollout.max_batch_sequences, element)
    mean = r.data.max_prompt_tokens * search.fraction, longest * search.fraction
    return tail(engine, prompts, r.rollout.group_size, *mean, longest)

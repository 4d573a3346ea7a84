"""The section `evaluation`. No torch."""

import re

from megatron_rft.config.messages import at
from megatron_rft.config.rewards import AnyReward
from megatron_rft.config.sections import Count, Natural, NonNegative, Section, Source


class Benchmark(Source):
    reward: AnyReward | None = None
    """Grades its responses. None: its adapter's reward, without an adapter the recipe's."""


class Evaluation(Section):
    every: Natural = 0
    """Steps between evaluations of data.validation. 0: only at the start and the end."""
    samples: Count = 1
    """Responses per problem."""
    temperature: NonNegative = 0.7
    """0 is greedy."""
    limit: Count | None = None
    """Evaluate only this many problems, from the first."""
    max_response_tokens: Count | None = None
    """None: rollout.max_response_tokens."""
    batch: Count = 64
    """Problems that are submitted to the engine together."""
    benchmarks: dict[str, Benchmark] = {}
    """Further data sets for the command `evaluate`, by their name in its table."""

    def _check(self):
        for name, benchmark in self.benchmarks.items():
            if name in ("train", "validation", "test") or not re.fullmatch(r"\w[\w.+-]*", name):
                raise at(f"benchmarks.{name}", "cannot name a benchmark: it is a part of data, or no file name")
            if benchmark.reward:
                benchmark.reward.check_alone(f"benchmarks.{name}.reward.")

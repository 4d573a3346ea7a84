"""DAPO: GRPO with a wider upper clip and token-level denominators, without groups of equal rewards (pipo.txt A.2).

As in the paper, the loss is a mean over the tokens of a prompt's responses, then over prompts. Aggregation "token_mean"
divides by the tokens of the whole mini-batch instead, as most implementations do.

The soft overlong penalty changes the rewards from which advantages are computed. The verifier's reward stays without
it: the group filter and PIPO use the verifier's reward.
"""

import torch
from torch import Tensor

from megatron_rft.config.algorithms import online as section
from megatron_rft.objectives.advantages import degenerate, overlong_penalty
from megatron_rft.objectives.grpo import GRPO
from megatron_rft.records import Batch, segment_ids


class DAPO(GRPO):
    options: section.DAPO

    def keep(self, batch: Batch) -> Tensor:
        equal = degenerate(batch.sequences["rewards"], batch.groups)
        return ~equal if self.options.filter_groups else super().keep(batch)

    def rewards(self, batch: Batch) -> Tensor:
        return super().rewards(batch) + self._penalty(batch)

    def batch_metrics(self, batch: Batch) -> dict[str, float]:
        if not self.options.overlong_buffer:
            return super().batch_metrics(batch)
        return super().batch_metrics(batch) | {"reward/overlong_penalty": -self._penalty(batch).mean().item()}

    def _penalty(self, batch: Batch) -> Tensor:
        if not self.options.overlong_buffer:
            return torch.zeros(len(batch))
        segments, of = batch.by_segment()[0].lengths, segment_ids(batch.segment_counts)
        # the limit is that of each segment of an episode
        longest = torch.zeros_like(batch.prompt_lens).scatter_reduce(0, of, segments, "amax") - batch.prompt_lens
        shape = overlong_penalty(longest, self.setting.max_response_tokens, self.options.overlong_buffer)
        return self.options.overlong_coefficient * shape

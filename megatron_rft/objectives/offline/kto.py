"""KTO (arXiv:2402.01306; fpa.txt B.2): compares each trajectory with the mean log-ratio, without pairs.

    loss = mean of lambda_w (1 - sigmoid(beta (r - z0)))   if right
                   lambda_l (1 - sigmoid(beta (z0 - r)))   if wrong,      r = log pi(y|x) - log pi_ref(y|x)

z0 is the mean of r over the whole global mini-batch, without a gradient, and may be negative. It is computed from
`old_logprobs`, one more forward pass with the weights before the step, because no micro-batch has all trajectories.
"""

import torch

from megatron_rft.config.algorithms import offline as section
from megatron_rft.objectives.base import Outputs, Prepared, State, Sum, trained_tokens
from megatron_rft.objectives.offline.base import Offline, log_ratios, over_sequences
from megatron_rft.records import Batch, send


class KTO(Offline):
    options: section.KTO

    needs = frozenset({"ref_logprobs", "old_logprobs"})

    def prepare(self, batch: Batch, state: State) -> Prepared:
        ratios = log_ratios(batch.tokens["old_logprobs"], batch)[trained_tokens(batch) > 0]
        z0 = ratios.mean().item() if len(ratios) else 0.0
        prepared = super().prepare(batch.without_tokens("old_logprobs").with_scalars(z0=z0), state)
        prepared.metrics["dynamics/z0"] = z0
        return prepared

    def terms(self, outputs: Outputs, batch: Batch) -> dict[str, tuple[float, Sum]]:
        ratios = log_ratios(outputs["logprobs"], batch)
        right = send(batch.sequences["rewards"] > 0, ratios.device)
        sign = torch.where(right, self.options.beta, -self.options.beta).to(ratios)
        weight = torch.where(right, self.options.weight_correct, self.options.weight_incorrect).to(ratios)
        losses = weight * (1 - torch.sigmoid(sign * (ratios - batch.scalars["z0"])))
        return {"kto": (1.0, over_sequences(losses, batch))}

"""SDPO: which responses are trained on, with which teacher, and SDPO inside PIPO."""

import pytest
import torch

from megatron_rft.objectives.base import SecondDistribution, counts
from megatron_rft.records import Batch
from tests.made import made, pipo


def sampled() -> Batch:
    """Three responses of 2, 1 and 3 tokens; the second has no feedback."""
    batch = Batch.of(
        [[1], [1], [1]],
        [[5, 6], [7], [8, 9, 10]],
        tokens={
            "old_logprobs": torch.tensor([-1.0, -1.0, -1.0, -2.0, -2.0, -2.0]),
            "teacher_logprobs": torch.tensor([-0.5, -2.0, -9.0, -2.0, -1.0, -4.0]),
            "rollout_logprobs": torch.zeros(6),
        },
        sequences={"group": torch.tensor([0, 0, 1]), "rewards": torch.tensor([0.0, 1.0, 0.0])},
        scalars={"sampled_reward_sum": 1.0, "sampled_count": 3.0},
    )
    return batch.with_contexts([[3, 3, 1], [], [4, 1]])


def test_only_responses_with_feedback_are_trained_on():
    prepared = made("sdpo").prepare(sampled(), {})
    (update,) = prepared.updates
    assert update.batch.response_ids.tolist() == [5, 6, 8, 9, 10] and update.batch.context_lens.tolist() == [3, 2]
    assert update.second == SecondDistribution("actor", in_context=True)
    assert prepared.metrics == pytest.approx({"sdpo/informed": 2 / 3})


def test_loss_is_the_token_mean_of_the_kl():
    """(1 + 2 + 3 + 4 + 5) / 5 = 3; the difference from the teacher is only logged."""
    (update,) = made("sdpo").prepare(sampled(), {}).updates
    (step,) = update.steps()
    kl = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], requires_grad=True)
    outputs = {"reverse_kl": kl, "logprobs": torch.full((5,), -2.0), "entropy": torch.ones(5)}
    loss = update.loss(outputs | {"other_logprobs": torch.full((5,), -1.5)}, step)
    mean = loss.mean(counts(step))
    mean.backward()
    assert mean.item() == 3 and kl.grad.tolist() == pytest.approx([0.2] * 5)
    assert loss.metrics["teacher_advantage"].total.item() == 2.5


def test_attribution_is_the_teachers_log_prob_less_the_policys():
    assert made("sdpo").advantages(sampled()).tolist() == [0.5, -1.0, 0.0, 0.0, 1.0, -2.0]
    assert pipo(made("sdpo")).needs == {"old_logprobs", "teacher_logprobs"} and made("sdpo").needs == frozenset()


def test_without_any_feedback_there_is_no_step():
    (update,) = made("sdpo").prepare(sampled().with_contexts([[], [], []]), {}).updates
    assert list(update.steps()) == []


def test_verification_scales_the_attributions():
    plugin, state = pipo(made("sdpo"), window=2), pipo(made("sdpo"), window=2).init()
    for mean in (0.2, 0.4, 0.7):  # anchor 0.3, std 0.1 sqrt 2: xi = 0.4 / 0.1414
        prepared = plugin.prepare(sampled().with_scalars(sampled_reward_sum=mean, sampled_count=1.0), state)
        state = prepared.state
    verification = prepared.updates[0]
    expected = 2.0**1.5 * torch.tensor([0.5, -1.0, 0.0, 1.0, -2.0])  # without the token that had no feedback
    torch.testing.assert_close(verification.scale * verification.batch.tokens["advantages"], expected)
    (step,) = verification.steps()
    assert counts(step)["response_tokens"] == 5  # Z
    assert verification.batch.context_ids is None and verification.second is None


@pytest.mark.parametrize(
    "cap, expected", [(None, 1.0), (2.0, (1 + 2 + 0.5 + 1 + 1) / 5), (5.0, (1 + 4 + 0.5 + 1 + 1) / 5)]
)
def test_importance_weights_are_capped_and_have_no_gradient(cap, expected):
    """Ratios to the old policy: 1, 4, 1/2, 1, 1 on divergences of 1."""
    objective = made("sdpo", importance_cap=cap, mini_batches=2)
    assert objective.needs == ({"old_logprobs"} if cap else frozenset())
    (update,) = objective.prepare(sampled(), {}).updates
    ratio = torch.tensor([1.0, 4.0, 0.5, 1.0, 1.0])
    logprobs = (update.batch.tokens["old_logprobs"] + ratio.log()).requires_grad_()
    kl = torch.ones(5, requires_grad=True)
    outputs = {"reverse_kl": kl, "logprobs": logprobs, "entropy": torch.ones(5), "other_logprobs": torch.zeros(5)}
    loss, number = update.loss(outputs, update.batch), counts(update.batch)
    mean = loss.mean(number)
    mean.backward()
    assert mean.item() == pytest.approx(expected) and logprobs.grad is None
    logged = loss.logged(number).get("importance_mean")
    assert logged is None if cap is None else logged.item() == pytest.approx(expected)  # as cut

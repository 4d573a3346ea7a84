"""GRPO and SFT as whole objectives."""

import math

import pytest
import torch

from megatron_rft.objectives.base import counts
from megatron_rft.objectives.surrogates import mismatch
from megatron_rft.utils.errors import CodeError
from tests.made import made

LN2 = math.log(2)


def means(objective, batch, logprobs, entropy=None) -> dict[str, float]:
    """The loss and logged metrics of the one update, with the batch as one mini-batch."""
    (update,) = objective.prepare(batch, objective.init()).updates
    outputs = {"logprobs": logprobs, "entropy": torch.zeros_like(logprobs) if entropy is None else entropy}
    loss = update.loss(outputs, update.batch)
    number = counts(update.batch)
    logged = {name: mean.item() for name, mean in loss.logged(number).items()}
    return logged | {"loss": loss.mean(number).item()}


@pytest.mark.parametrize("wrong", [lambda rewards, group: rewards[:1], lambda rewards, group: rewards.mean()])
def test_advantages_of_another_shape_are_refused(make_batch, wrong):
    """Torch would give all responses the same one."""
    objective = made("grpo")
    objective.relative = wrong
    batch = make_batch([3, 1], [0, 0], [1.0, 0.0])
    for credit in (objective.advantages, objective.improvement_attributions):
        with pytest.raises(
            CodeError, match=r"GRPO.relative gave torch.Size\(\[1?\]\): give a number for each of 2 responses"
        ):
            credit(batch)


def test_loss_by_hand(make_batch):
    """Two responses of 3 and 1 tokens, A = 1 and -1, ratio 1 but for one token of ratio 1/2 in the first.

    surrogate: (-(1 + 1 + 1/2) / 3 + 1) / 2 = 1/12. The reference is twice as sure of the last token alone:
    k3 = 1 - ln 2 there, sequence mean (1 - ln 2) / 2, token mean (1 - ln 2) / 4. Entropy 2 everywhere.
    """
    old = torch.full((4,), -1.0)
    logprobs = torch.tensor([-1.0, -1.0, -1.0 - LN2, -1.0])
    ref = torch.tensor([-1.0, -1.0, -1.0 - LN2, -1.0 + LN2])
    batch = make_batch([3, 1], [0, 0], [1.0, 0.0], old_logprobs=old, ref_logprobs=ref)
    objective = made("grpo", kl_coefficient=0.1, entropy_coefficient=0.01)
    found = means(objective, batch, logprobs, entropy=torch.full((4,), 2.0))
    assert found["surrogate"] == pytest.approx(1 / 12)
    assert found["kl_penalty"] == pytest.approx((1 - LN2) / 2) and found["kl"] == pytest.approx((1 - LN2) / 4)
    assert found["entropy"] == 2.0 and found["clip_fraction"] == 0.0 and found["ratio_mean"] == pytest.approx(3.5 / 4)
    assert found["loss"] == pytest.approx(1 / 12 + 0.1 * (1 - LN2) / 2 - 0.01 * 2)


def test_needs_only_what_it_uses():
    assert made("grpo", epochs=2).needs == made("grpo", mini_batches=2).needs == {"old_logprobs", "ref_logprobs"}
    assert made("grpo").needs == {"ref_logprobs"} and made("grpo", kl_coefficient=0.0).needs == set()


def test_on_policy_step_is_that_of_equal_old_logprobs(make_batch):
    logprobs = torch.tensor([-1.0, -0.5, -2.0], requires_grad=True)
    given = make_batch([2, 1], [0, 0], [0.0, 1.0], old_logprobs=logprobs.detach())
    given = given.with_tokens(advantages=torch.tensor([-1.0, -1.0, 1.0]), rollout_logprobs=logprobs.detach() + 0.2)
    outputs, grpo = {"logprobs": logprobs, "entropy": torch.zeros(3)}, made("grpo", kl_coefficient=0.0)
    gradients = []
    for batch in (given, given.without_tokens("old_logprobs")):
        loss = grpo.loss(outputs, batch)
        gradients.append(torch.autograd.grad(loss.mean(counts(batch)), logprobs)[0])
    assert torch.equal(*gradients)
    assert loss.metrics["mismatch/share"].total == 3 and loss.metrics["mismatch/kl"].total > 0
    assert made("sft").needs == set()


def test_the_gradient_raises_the_better_response(make_batch):
    logprobs = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    batch = make_batch([2, 1], [0, 0], [0.0, 1.0], old_logprobs=logprobs.detach(), ref_logprobs=logprobs.detach())
    (update,) = made("grpo").prepare(batch, {}).updates
    update.loss({"logprobs": logprobs, "entropy": torch.zeros(3)}, update.batch).mean(counts(batch)).backward()
    assert (-logprobs.grad).sign().tolist() == [-1.0, -1.0, 1.0]


def test_the_kl_pulls_towards_the_reference(make_batch):
    """A group of equal rewards has no other gradient: log-probs rise where the reference's are higher, and fall where
    lower."""
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    batch = make_batch([1, 1], [0, 0], [1.0, 1.0], old_logprobs=logprobs.detach(), ref_logprobs=[-0.5, -1.5])
    (update,) = made("grpo", kl_coefficient=0.1).prepare(batch, {}).updates
    update.loss({"logprobs": logprobs, "entropy": torch.zeros(2)}, update.batch).mean(counts(batch)).backward()
    assert (-logprobs.grad).sign().tolist() == [1.0, -1.0]


def test_the_entropy_bonus_raises_the_entropy(make_batch):
    entropy = torch.ones(2, requires_grad=True)
    batch = make_batch([1, 1], [0, 0], [1.0, 0.0], old_logprobs=[-1, -1])
    (update,) = made("grpo", kl_coefficient=0.0, entropy_coefficient=0.1).prepare(batch, {}).updates
    assert "entropy" in update.outputs
    update.loss({"logprobs": torch.full((2,), -1.0), "entropy": entropy}, update.batch).mean(counts(batch)).backward()
    torch.testing.assert_close(-entropy.grad, torch.tensor([0.05, 0.05]))


def test_a_bandit_is_learned():
    """Four arms, the third pays: plain gradient steps on sampled one-token responses find it."""
    from megatron_rft.records import Batch

    generator = torch.Generator().manual_seed(0)
    logits = torch.zeros(4, requires_grad=True)
    for _ in range(40):
        arms = torch.multinomial(logits.detach().softmax(0), 16, replacement=True, generator=generator)
        batch = Batch.of(
            [[0]] * 16,
            [[arm] for arm in arms.tolist()],
            tokens={"old_logprobs": logits.detach().log_softmax(0)[arms]},
            sequences={"rewards": (arms == 2).float(), "group": torch.arange(16) // 8},
        )
        (update,) = made("grpo", kl_coefficient=0.0).prepare(batch, {}).updates
        for mini_batch in update.steps():
            outputs = {"logprobs": logits.log_softmax(0)[mini_batch.response_ids], "entropy": torch.zeros(16)}
            (gradient,) = torch.autograd.grad(update.loss(outputs, mini_batch).mean(counts(mini_batch)), logits)
            logits.data -= 0.5 * gradient
    assert logits.softmax(0)[2].item() > 0.9


def test_sft_is_the_mean_over_tokens(make_batch):
    """Token mean for any lengths: (1 + 2 + 3 + 6) / 4 = 3, not ((1 + 2 + 3) / 3 + 6) / 2 = 4."""
    found = means(made("sft"), make_batch([3, 1], [0, 0], [0, 0]), torch.tensor([-1.0, -2.0, -3.0, -6.0]))
    assert found == {"nll": 3.0, "loss": 3.0}


def test_mismatch_by_hand():
    """Differences ln 2, 0 and one masked out: k3 = (1 - ln 2) / 2, the largest ln 2, half of them beyond 0.1."""
    rollout, old = torch.tensor([-2.0, -1.0, -1.0]), torch.tensor([-2.0 + LN2, -1.0, -9.0])
    found = mismatch(rollout, old, torch.tensor([1.0, 1.0, 0.0]))
    assert found == pytest.approx({"mismatch/kl": (1 - LN2) / 2, "mismatch/max": LN2, "mismatch/share": 0.5}, rel=1e-6)
    assert set(mismatch(rollout, old, torch.zeros(3)).values()) == {0.0}

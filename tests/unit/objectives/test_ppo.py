"""PPO: its advantages, its two updates, and the steps that train only the critic."""

import pytest
import torch

from megatron_rft.objectives.base import counts
from megatron_rft.objectives.ppo import value_loss
from tests.made import made, pipo


def sampled(make_batch):
    """Two responses of 2 and 1 tokens with rewards 1 and 0; k1 = log pi - log ref is 1 on the first token alone."""
    tokens = {"old_logprobs": [-1.0, -1.0, -1.0], "ref_logprobs": [-2.0, -1.0, -1.0], "values": [0.5, 0.25, 0.5]}
    batch = make_batch([2, 1], [0, 1], [1.0, 0.0], **tokens)
    return batch.with_scalars(sampled_reward_sum=1.0, sampled_count=2.0)


def test_credit_by_hand(make_batch):
    """KL coefficient 0.1: rewards (-0.1, 1) and (0). Lambda 0: A = delta = (-0.35, 0.75), (-0.5); returns = A + V."""
    ppo = made("ppo", kl_coefficient=0.1, lam=0.0, whiten_advantages=False)
    value, policy = ppo.prepare(sampled(make_batch), ppo.init()).updates
    torch.testing.assert_close(policy.batch.tokens["advantages"], torch.tensor([-0.35, 0.75, -0.5]))
    torch.testing.assert_close(value.batch.tokens["returns"], torch.tensor([0.15, 1.0, 0.0]))
    assert (value.model, policy.model) == ("critic", "actor")
    assert ppo.needs == {"old_logprobs", "ref_logprobs", "values"}


def test_whitening(make_batch):
    advantages = made("ppo").advantages(sampled(make_batch))
    assert advantages.mean().item() == pytest.approx(0, abs=1e-6)
    assert advantages.std(correction=0).item() == pytest.approx(1)
    rewards = made("ppo", whiten_rewards=True, kl_coefficient=0.0, lam=1.0, whiten_advantages=False)
    _, policy = rewards.prepare(sampled(make_batch), rewards.init()).updates
    torch.testing.assert_close(policy.batch.tokens["returns"], torch.tensor([1.0, 1.0, -1.0]))  # rewards 1 and -1


@pytest.mark.parametrize(
    "value, old, target, clip, loss, gradient",
    [
        (2.0, 1.0, 0.0, 0.5, 2.0, 2.0),  # max(4, 1.5 squared): moved away beyond the clip, and is pulled back
        (2.0, 1.0, 3.0, 0.5, 1.125, 0.0),  # max(1, 1.5 squared): moved far enough towards it
        (1.25, 1.0, 3.0, 0.5, 1.53125, -1.75),  # within the clip
        (2.0, 1.0, 3.0, 0.0, 0.5, -1.0),  # no clip
    ],
)
def test_value_loss_by_hand(value, old, target, clip, loss, gradient):
    values = torch.tensor([value], requires_grad=True)
    found = value_loss(values, torch.tensor([old]), torch.tensor([target]), clip)
    found.sum().backward()
    assert found.item() == pytest.approx(loss) and values.grad.item() == pytest.approx(gradient)


def test_only_the_critic_is_updated_in_the_warmup(make_batch):
    ppo, batch, names = made("ppo", critic={"warmup_steps": 2}), sampled(make_batch), []
    state = ppo.init()
    for _ in range(4):
        prepared = ppo.prepare(batch, state)
        state = prepared.state
        names.append([update.name for update in prepared.updates])
    assert names == [["value"], ["value"], ["value", "policy"], ["value", "policy"]]


def test_pipo_does_not_remember_steps_without_a_policy_update(make_batch):
    """After two warm-up steps, two more fill the window before the first verification."""
    plugin, batch, names = pipo(made("ppo", critic={"warmup_steps": 2}), window=2), sampled(make_batch), []
    state = plugin.init()
    for mean in (0.9, 0.8, 0.1, 0.2, 0.4):
        prepared = plugin.prepare(batch.with_scalars(sampled_reward_sum=mean, sampled_count=1.0), state)
        state = prepared.state
        names.append([update.name for update in prepared.updates])
    assert names == [["value"]] * 2 + [["value", "policy"]] * 2 + [["verification", "value", "policy"]]
    assert state["mu"].tolist() == pytest.approx([0.2, 0.4])
    assert prepared.metrics["pipo/anchor_mean"] == pytest.approx(0.15)


def test_explained_variance_of_the_critic(make_batch):
    """Returns (1, 1, 0) with lambda 1 and no KL, values (1, 1, 0): all variance is explained."""
    ppo = made("ppo", kl_coefficient=0.0, lam=1.0)
    batch = sampled(make_batch).with_tokens(values=torch.tensor([1.0, 1.0, 0.0]))
    metrics = ppo.prepare(batch, ppo.init()).metrics
    assert metrics["critic/explained_variance"] == pytest.approx(1) and metrics["critic/returns"] == pytest.approx(
        2 / 3
    )
    value, _ = ppo.prepare(batch, ppo.init()).updates
    (step,) = value.steps()
    loss = value.loss({"values": torch.tensor([1.0, 1.0, 0.0])}, step)
    assert loss.mean(counts(step)).item() == 0

"""Log-probs and entropy from hidden states against float64 log_softmax: values, gradients, padding, bf16, no tokens."""

import math

import pytest
import torch

from megatron_rft.megatron.vocabulary import logprobs_and_entropy
from megatron_rft.records import Support, segment_ids

VOCAB, PADDED, HIDDEN = 700, 768, 16
SMALL = 4 * 41 * 256  # bytes: three blocks of 256 columns for 41 tokens
ONE = 1 << 20  # everything in one block


def problem(tokens=41):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(PADDED, HIDDEN, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, VOCAB, (tokens,), generator=generator)
    pulls = torch.randn(2, tokens, generator=generator, dtype=torch.float64)
    return hidden, weight, targets, pulls


def dense(hidden, weight, targets, temperature):
    full = (hidden @ weight[:VOCAB].t() / temperature).log_softmax(-1)
    return full.gather(1, targets.unsqueeze(1)).squeeze(1), -(full.exp() * full).sum(-1)


def run(function, dtype, pulls, hidden, weight):
    """Values, then gradients of sum(pull * value) with respect to hidden and weight, in float64."""
    hidden, weight = (t.to(dtype).detach().requires_grad_() for t in (hidden, weight))
    values = function(hidden, weight)
    sum((pull * value).sum() for pull, value in zip(pulls, values, strict=True)).backward()
    return [t.detach().double() for t in (*values, hidden.grad, weight.grad)]


def distance(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("temperature,block_bytes", [(1.0, SMALL), (0.6, SMALL), (0.6, ONE)])
@pytest.mark.parametrize("dtype,bound", [(torch.float64, 1e-13), (torch.float32, 3e-6)])
def test_values_and_gradients_equal_the_dense_softmax(dtype, bound, temperature, block_bytes):
    hidden, weight, targets, pulls = problem()
    ours = run(
        lambda h, w: logprobs_and_entropy(
            h, w, targets, vocab_size=VOCAB, temperature=temperature, block_bytes=block_bytes
        ),
        dtype,
        pulls,
        hidden,
        weight,
    )
    expected = run(lambda h, w: dense(h, w, targets, temperature), torch.float64, pulls, hidden, weight)
    for found, true in zip(ours, expected, strict=True):
        assert distance(found, true) < bound
    assert ours[3][VOCAB:].abs().max() == 0  # padded rows do not exist


@pytest.mark.parametrize("block_bytes", [SMALL, ONE])
def test_logprobs_alone_equal_those_with_entropy(block_bytes):
    hidden, weight, targets, pulls = problem()
    both, alone = (
        run(
            lambda h, w, on=on: logprobs_and_entropy(
                h, w, targets, vocab_size=VOCAB, with_entropy=on, block_bytes=block_bytes
            )[:1],
            torch.float64,
            pulls[:1],
            hidden,
            weight,
        )
        for on in (True, False)
    )
    for found, true in zip(alone, both, strict=True):
        assert distance(found, true) < 1e-14
    assert logprobs_and_entropy(hidden, weight, targets, vocab_size=VOCAB, with_entropy=False)[1] is None


def test_uniform_and_certain_distributions():
    """Zero hidden states: log(1/V) and entropy log V. One overwhelming logit: log-prob 0 and entropy 0, all finite."""
    targets = torch.tensor([5, 2])
    logprobs, entropy = logprobs_and_entropy(torch.zeros(2, 4), torch.ones(256, 4), targets, vocab_size=200)
    assert torch.allclose(logprobs, torch.full((2,), -math.log(200))) and torch.allclose(entropy, -logprobs)
    weight = torch.zeros(200, 4)
    weight[5] = 1e4
    logprobs, entropy = logprobs_and_entropy(torch.ones(2, 4), weight, targets, vocab_size=200)
    assert logprobs.tolist() == [0.0, -4e4] and entropy.tolist() == [0.0, 0.0]


def test_bf16_is_as_exact_as_a_softmax_of_bf16_logits():
    """The reference is the dense softmax in fp32 of the bf16 logits."""
    hidden, weight, targets, pulls = problem()
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    expected = run(lambda h, w: dense(h, w, targets, 1.0), torch.float64, pulls, hidden, weight)
    ours = run(
        lambda h, w: logprobs_and_entropy(h, w, targets, vocab_size=VOCAB, block_bytes=SMALL),
        torch.bfloat16,
        pulls,
        hidden,
        weight,
    )

    def rounded(h, w):
        full = (h @ w[:VOCAB].t()).float().log_softmax(-1)
        return full.gather(1, targets.unsqueeze(1)).squeeze(1), -(full.exp() * full).sum(-1)

    measure = run(rounded, torch.bfloat16, pulls, hidden, weight)
    for found, usual, true in zip(ours, measure, expected, strict=True):
        assert distance(found, true) < 1.2 * distance(usual, true) + 1e-4


@pytest.mark.parametrize("with_entropy", [True, False])
def test_no_tokens_still_run_backward(with_entropy):
    hidden, weight = torch.empty(0, HIDDEN, requires_grad=True), torch.randn(PADDED, HIDDEN, requires_grad=True)
    none = torch.empty(0, dtype=torch.long)
    logprobs, entropy = logprobs_and_entropy(hidden, weight, none, vocab_size=VOCAB, with_entropy=with_entropy)
    (logprobs.sum() + (entropy.sum() if with_entropy else 0)).backward()
    assert hidden.grad.shape == (0, HIDDEN) and weight.grad.abs().max() == 0


def test_frozen_inputs_and_broken_ones():
    hidden, weight, targets, _ = problem()
    weight.requires_grad_()
    logprobs_and_entropy(hidden, weight, targets, vocab_size=VOCAB)[0].sum().backward()
    assert hidden.grad is None and weight.grad.abs().max() > 0
    hidden[7, 0] = float("nan")
    logprobs, _ = logprobs_and_entropy(hidden, weight, targets, vocab_size=VOCAB)
    assert logprobs.isnan().nonzero().flatten().tolist() == [7]  # seen, and only where it is


def kept(lens, targets):
    """A support of `lens` tokens for each row, the target among them."""
    generator = torch.Generator().manual_seed(5)
    ids = []
    for length, target in zip(lens.tolist(), targets.tolist(), strict=True):
        others = [token for token in torch.randperm(VOCAB, generator=generator).tolist() if token != target]
        ids += [target, *others[: length - 1]] if length else []
    return Support(torch.tensor(ids), lens)


def truncated(full, support):
    """Logits with -inf outside of each row's support; a row without one stays."""
    mask = torch.zeros_like(full, dtype=torch.bool)
    mask[segment_ids(support.lens), support.ids] = True
    return full.masked_fill(~mask & (support.lens > 0)[:, None], float("-inf"))


@pytest.mark.parametrize("block_bytes", [SMALL, ONE])
@pytest.mark.parametrize("dtype,bound", [(torch.float64, 1e-13), (torch.float32, 3e-6)])
def test_a_truncated_distribution_equals_the_dense_one(dtype, bound, block_bytes):
    """Supports of 0 (everything) to 8 tokens. A support of one token is certain: no entropy, no gradient."""
    hidden, weight, targets, pulls = problem()
    support = kept(torch.arange(len(targets)) % 9, targets)

    def reference(h, w):
        full = truncated(h @ w[:VOCAB].t() / 0.6, support).log_softmax(-1)
        entropy = -(full.exp() * full.masked_fill(full.isinf(), 0.0)).sum(-1)
        return full.gather(1, targets[:, None])[:, 0], entropy

    options = {"vocab_size": VOCAB, "temperature": 0.6, "block_bytes": block_bytes, "support": support}
    ours = run(lambda h, w: logprobs_and_entropy(h, w, targets, **options), dtype, pulls, hidden, weight)
    expected = run(reference, torch.float64, pulls, hidden, weight)
    for found, true in zip(ours, expected, strict=True):
        assert found.isfinite().all() and distance(found, true) < bound
    certain = support.lens == 1
    assert not ours[0][certain].any() and not ours[1][certain].any() and not ours[2][certain].any()

"""Sampling tokens, and the bookkeeping of rows."""

import numpy as np
import pytest
import torch

from megatron_rft.inference.engine import Sampling, checksum
from megatron_rft.inference.hf.decoder import choose, uniforms

LOGITS = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()


def draws(sampling: Sampling, count: int = 20_000) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    u = torch.from_numpy(uniforms(seed=1, sample=0, count=count))
    return choose(LOGITS.expand(count, -1), u, sampling)


def test_the_inverse_of_the_cumulative_distribution_by_hand():
    u = torch.tensor([0.0, 0.09, 0.11, 0.29, 0.31, 0.59, 0.61, 0.99999994])
    token, logprob, _ = choose(LOGITS.expand(8, -1), u, Sampling(1))
    assert token.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    torch.testing.assert_close(logprob.exp(), torch.tensor([0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 0.4, 0.4]))


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_frequencies_are_the_probabilities(temperature):
    """chi^2 with 3 degrees of freedom exceeds 16.3 once in 1,000 draws of the whole sample."""
    token, logprob, support = draws(Sampling(1, temperature=temperature))
    assert support is None
    expected = (LOGITS / temperature).softmax(-1)
    torch.testing.assert_close(logprob.exp(), expected[token])
    seen = token.bincount(minlength=4)
    assert float(((seen - 20_000 * expected) ** 2 / (20_000 * expected)).sum()) < 16.3


@pytest.mark.parametrize(
    "sampling, expected",
    [
        (Sampling(1, top_k=2), [0, 0, 3 / 7, 4 / 7]),
        (Sampling(1, top_p=0.65), [0, 0, 3 / 7, 4 / 7]),
        (Sampling(1, top_p=0.75), [0, 2 / 9, 3 / 9, 4 / 9]),
        (Sampling(1, top_k=2, top_p=0.5), [0, 0, 0, 1]),
        (Sampling(1, temperature=0.5, top_k=2), [0, 0, 9 / 25, 16 / 25]),
        (Sampling(1, top_k=4, min_p=0.5), [0, 2 / 9, 3 / 9, 4 / 9]),
        (Sampling(1, top_k=3, top_p=0.7, min_p=0.9), [0, 0, 0, 1]),
        (Sampling(1, top_k=4, top_p=0.5, min_p=0.6), [0, 0, 0, 1]),  # without min_p, or after top_p: 3 / 7 and 4 / 7
    ],
)
def test_truncation_renormalises(sampling, expected):
    token, logprob, support = draws(sampling)
    kept = [i for i in reversed(range(4)) if expected[i]]
    assert {tuple(i for i in row if i >= 0) for row in support.tolist()} == {tuple(kept)}
    expected = torch.tensor(expected, dtype=torch.float32)
    torch.testing.assert_close(logprob.exp(), expected[token])
    torch.testing.assert_close(token.bincount(minlength=4) / 20_000, expected, atol=0.02, rtol=0)


def test_a_token_of_probability_zero_is_never_drawn():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    for u in (0.0, 0.5, 0.99999994):
        assert choose(logits, torch.tensor([u]), Sampling(1))[0].item() in (1, 3)


def test_streams():
    first = uniforms(seed=7, sample=0, count=100)
    assert first.dtype == np.float32 and first.min() >= 0 and first.max() < 1
    np.testing.assert_array_equal(uniforms(7, 0, 10), first[:10])
    assert not np.array_equal(uniforms(7, 1, 100), first) and not np.array_equal(uniforms(8, 0, 100), first)


def test_checksums_see_values_order_and_signs():
    values = torch.tensor([1.0, 2.0, 0.0])
    different = [values, values.flip(0), -values, values.bfloat16()]
    assert len({checksum(each) for each in different}) == len(different)
    assert checksum(values) == checksum(values.clone().view(3, 1)) == checksum(torch.tensor([1.0, 2.0, -0.0]))

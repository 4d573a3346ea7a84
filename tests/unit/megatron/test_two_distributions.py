"""Two distributions from hidden states against float64 autograd on materialised logits: values, gradients, corners."""

import math
from types import SimpleNamespace

import pytest
import torch

from megatron_rft.megatron import actor as actors
from megatron_rft.megatron.two_distributions import NAMES, WITH_GRADIENT, compare
from megatron_rft.megatron.vocabulary import logprobs_and_entropy
from megatron_rft.records import Support

VOCAB, PADDED, HIDDEN, OTHER_HIDDEN, TOKENS = 700, 768, 16, 12, 29
BLOCKS = {"several": 4 * TOKENS * 256, "one": 1 << 20}  # bytes: three blocks of 256 columns, or everything in one


def problem(spread=1.0):
    generator = torch.Generator().manual_seed(3)
    shapes = ((TOKENS, HIDDEN), (PADDED, HIDDEN), (TOKENS, OTHER_HIDDEN), (PADDED, OTHER_HIDDEN))
    tensors = [torch.randn(*shape, generator=generator, dtype=torch.float64) * spread for shape in shapes]
    return *tensors, torch.randint(0, VOCAB, (TOKENS,), generator=generator)


def pulls():
    generator = torch.Generator().manual_seed(4)
    return {name: torch.randn(TOKENS, generator=generator, dtype=torch.float64) for name in sorted(NAMES)}


def dense(hidden, weight, other_hidden, other_weight, targets, temperature=1.0, extrapolation=0.0, vocab=VOCAB):
    """Every statistic from [N, V] logits in float64."""
    z, u = hidden @ weight[:vocab].t() / temperature, other_hidden @ other_weight[:vocab].t() / temperature
    p, q = z.log_softmax(-1), u.log_softmax(-1)
    mixed = torch.logaddexp(p, q) - math.log(2)
    ahead = ((1 + extrapolation) * z - extrapolation * u).log_softmax(-1)
    return {
        "logprobs": p.gather(1, targets[:, None])[:, 0],
        "entropy": -(p.exp() * p).sum(-1),
        "other_logprobs": q.gather(1, targets[:, None])[:, 0],
        "extrapolated_logprobs": ahead.gather(1, targets[:, None])[:, 0],
        "jsd": 0.5 * (p.exp() * (p - mixed)).sum(-1) + 0.5 * (q.exp() * (q - mixed)).sum(-1),
        "reverse_kl": (p.exp() * (p - q)).sum(-1),
        "forward_kl": (q.exp() * (q - p)).sum(-1),
    }


def run(function, dtype, names, tensors, targets):
    """Values, then the gradients of sum(pull * value) over the differentiable ones, in float64."""
    hidden, weight, *other = (t.to(dtype).detach() for t in tensors)
    hidden.requires_grad_(), weight.requires_grad_()
    values, pull = function(hidden, weight, *other, targets), pulls()
    total = sum((pull[name] * values[name]).sum() for name in names & WITH_GRADIENT)
    total.backward()
    return {name: values[name].detach().double() for name in names}, hidden.grad.double(), weight.grad.double()


def distance(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def assert_equal_to_dense(names, dtype, bound, temperature=1.0, extrapolation=0.0, block_bytes=BLOCKS["several"]):
    *tensors, targets = problem()
    options = {"temperature": temperature, "extrapolation": extrapolation}

    def ours(*given):
        return compare(*given, names=names, vocab_size=VOCAB, block_bytes=block_bytes, **options)

    values, *gradients = run(ours, dtype, names, tensors, targets)
    expected, *expected_gradients = run(lambda *t: dense(*t, **options), torch.float64, names, tensors, targets)
    assert set(values) == names
    for name in names:
        assert distance(values[name], expected[name]) < bound, name
    for found, true in zip(gradients, expected_gradients, strict=True):
        assert distance(found, true) < bound
    assert gradients[1][VOCAB:].abs().max() == 0  # padded rows do not exist


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("temperature,extrapolation", [(1.0, 0.0), (0.6, 2.0)])
@pytest.mark.parametrize("dtype,bound", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_all_of_them_equal_the_dense_computation(dtype, bound, temperature, extrapolation, blocks):
    assert_equal_to_dense(NAMES, dtype, bound, temperature, extrapolation, BLOCKS[blocks])


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize(
    "names",
    [{name, "logprobs"} for name in sorted(NAMES)] + [{"reverse_kl"}, {"forward_kl"}, {"entropy"}],
    ids=lambda names: "+".join(sorted(names)),
)
def test_any_choice_of_names_gives_the_same(names, blocks):
    assert_equal_to_dense(frozenset(names), torch.float64, 1e-12, 0.8, 1.5, BLOCKS[blocks])


def test_logprobs_and_entropy_are_those_of_the_single_distribution():
    hidden, weight, *other, targets = problem()
    found = compare(hidden, weight, *other, targets, names=NAMES, vocab_size=VOCAB, block_bytes=BLOCKS["several"])
    alone = logprobs_and_entropy(hidden, weight, targets, vocab_size=VOCAB, block_bytes=BLOCKS["several"])
    assert torch.equal(found["logprobs"], alone[0]) and torch.equal(found["entropy"], alone[1])


def test_without_extrapolation_the_future_policy_is_the_present_one():
    *tensors, targets = problem()
    found = compare(*tensors, targets, names=NAMES, vocab_size=VOCAB, extrapolation=0.0)
    torch.testing.assert_close(found["extrapolated_logprobs"], found["logprobs"], rtol=0, atol=1e-12)


def test_by_hand():
    """Two words. pi = (3/4, 1/4), q = (1/2, 1/2); lambda = 1 squares the odds of pi over q: 9 to 1."""
    identity = torch.eye(2)
    p, q = torch.tensor([[0.75, 0.25]]), torch.tensor([[0.5, 0.5]])
    found = compare(
        p.log(), identity, q.log(), identity, torch.tensor([0]), names=NAMES, vocab_size=2, extrapolation=1.0
    )
    expected = {
        "logprobs": torch.tensor(0.75).log(),
        "other_logprobs": torch.tensor(0.5).log(),
        "extrapolated_logprobs": torch.tensor(0.9).log(),
        "entropy": -(p * p.log()).sum(),
        "reverse_kl": (p * (p / q).log()).sum(),
        "forward_kl": (q * (q / p).log()).sum(),
    }
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value.reshape(1))


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_equal_distributions_have_no_divergence_and_no_pull(blocks, scale):
    hidden, weight, _, _, targets = problem()
    hidden, weight = (hidden * scale).float().requires_grad_(), weight.float().requires_grad_()
    found = compare(
        hidden, weight, hidden, weight, targets, names=NAMES, vocab_size=VOCAB, extrapolation=3.0,
        block_bytes=BLOCKS[blocks],
    )  # fmt: skip
    (found["reverse_kl"] + found["forward_kl"]).sum().backward()
    assert found["reverse_kl"].abs().max() == 0 and found["forward_kl"].abs().max() == 0
    assert hidden.grad.abs().max() < 1e-5 and weight.grad.abs().max() < 1e-5 * scale
    torch.testing.assert_close(found["other_logprobs"], found["logprobs"])
    torch.testing.assert_close(found["extrapolated_logprobs"], found["logprobs"], rtol=1e-5, atol=1e-5 * scale)


def test_small_divergences_keep_their_digits():
    """KL of two fp32 distributions 1e-3 apart: half of the variance of the logits' difference, about 5e-7 sigma^2."""
    hidden, weight, _, _, targets = problem()
    moved = hidden + 1e-3 * hidden.roll(1, 0)
    names = frozenset({"reverse_kl", "forward_kl"})
    found = compare(
        moved.float(), weight.float(), hidden.float(), weight.float(), targets, names=names, vocab_size=VOCAB
    )
    expected = dense(moved, weight, hidden, weight, targets)
    for name in names:
        torch.testing.assert_close(found[name].double(), expected[name], rtol=0, atol=2e-6)


def test_extreme_logits_stay_finite():
    """Logits of tens of thousands: everything is finite and as float64 says."""
    hidden, weight, other_hidden, other_weight, targets = problem(spread=60.0)
    tensors = [t.float() for t in (hidden, weight, other_hidden, other_weight)]
    tensors[0].requires_grad_(), tensors[1].requires_grad_()
    found = compare(*tensors, targets, names=NAMES, vocab_size=VOCAB, extrapolation=20.0, block_bytes=BLOCKS["several"])
    expected = dense(*(t.double() for t in tensors), targets, extrapolation=20.0)
    sum(found[name].sum() for name in WITH_GRADIENT).backward()
    for name in NAMES:
        assert found[name].isfinite().all(), name
        torch.testing.assert_close(found[name].double(), expected[name].detach(), rtol=1e-5, atol=1e-2)
    assert tensors[0].grad.isfinite().all() and tensors[1].grad.isfinite().all()


def test_bf16_is_as_exact_as_a_dense_computation_on_bf16_logits():
    *tensors, targets = problem()
    tensors = [t.bfloat16().double() for t in tensors]
    options = {"names": NAMES, "vocab_size": VOCAB, "block_bytes": BLOCKS["several"], "extrapolation": 1.0}
    values, *gradients = run(lambda *t: compare(*t, **options), torch.bfloat16, NAMES, tensors, targets)
    expected, *expected_gradients = run(lambda *t: dense(*t, extrapolation=1.0), torch.float64, NAMES, tensors, targets)

    def rounded(hidden, weight, other_hidden, other_weight, targets):
        eye, other_eye = torch.eye(PADDED), torch.eye(PADDED)
        z, u = (hidden @ weight.t()).float(), (other_hidden @ other_weight.t()).float()
        return dense(z, eye, u, other_eye, targets, extrapolation=1.0)

    usual, *usual_gradients = run(rounded, torch.bfloat16, NAMES, tensors, targets)
    for name in NAMES:
        assert distance(values[name], expected[name]) < 1.2 * distance(usual[name], expected[name]) + 1e-4, name
    for found, measure, true in zip(gradients, usual_gradients, expected_gradients, strict=True):
        assert distance(found, true) < 1.2 * distance(measure, true) + 1e-4


def test_no_tokens_still_run_backward_and_nan_stays_where_it_is():
    hidden, weight, other_hidden, other_weight, targets = problem()
    none, empty = torch.empty(0, dtype=torch.long), hidden[:0].requires_grad_()
    found = compare(empty, weight.requires_grad_(), other_hidden[:0], other_weight, none, names=NAMES, vocab_size=VOCAB)
    sum(found[name].sum() for name in WITH_GRADIENT).backward()
    assert empty.grad.shape == (0, HIDDEN) and weight.grad.abs().max() == 0
    other_hidden[7, 0] = float("nan")
    found = compare(hidden, weight, other_hidden, other_weight, targets, names=NAMES, vocab_size=VOCAB)
    assert found["logprobs"].isfinite().all()
    for name in ("other_logprobs", "extrapolated_logprobs", "reverse_kl", "forward_kl"):
        assert found[name].isfinite().logical_not().nonzero().flatten().tolist() == [7], name


def test_only_the_first_distribution_has_a_gradient():
    hidden, weight, other_hidden, other_weight, targets = problem()
    other_hidden.requires_grad_(), other_weight.requires_grad_(), weight.requires_grad_()
    found = compare(hidden, weight, other_hidden, other_weight, targets, names=NAMES, vocab_size=VOCAB)
    assert {name for name, value in found.items() if value.requires_grad} == WITH_GRADIENT
    found["forward_kl"].sum().backward()
    assert other_hidden.grad is None and other_weight.grad is None and weight.grad.abs().max() > 0


@pytest.mark.parametrize("extrapolation", [1.0, 20.0])
@pytest.mark.parametrize("blocks", BLOCKS)
def test_bf16_logits_are_not_rounded_before_they_are_extrapolated(extrapolation, blocks):
    """Against float64 on the same bf16 inputs, the two models close together. Rounding the products first is wrong by
    up to 0.1 nats at lambda 1 and 2.4 at lambda 20 here, and too low in the mean."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, 256, generator=generator)
    weight = torch.randn(PADDED, 256, generator=generator) * 0.4
    other = hidden + 0.02 * torch.randn(TOKENS, 256, generator=generator)
    targets = (hidden @ weight[:VOCAB].t()).argmax(-1)
    given = [each.bfloat16() for each in (hidden, weight, other, weight)]
    names, options = frozenset({"extrapolated_logprobs"}), {"vocab_size": VOCAB, "block_bytes": BLOCKS[blocks]}
    found = compare(*given, targets, names=names, extrapolation=extrapolation, **options)["extrapolated_logprobs"]
    expected = dense(*(each.double() for each in given), targets, extrapolation=extrapolation)["extrapolated_logprobs"]
    assert (found - expected).abs().max() < 1e-3


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("dtype,bound", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_truncated_distributions_are_compared_within_the_support(dtype, bound, blocks):
    """Both distributions are renormalised over the tokens that the engine kept; a row without any has all."""
    *tensors, targets = problem()
    lens = torch.arange(TOKENS) % 7
    others = torch.arange(TOKENS * 7).view(TOKENS, 7) * 3
    rows = [[t, *o][:n] for t, o, n in zip(targets.tolist(), others.tolist(), lens.tolist(), strict=True)]
    support = Support(torch.tensor([token for row in rows for token in row]), lens)
    names = NAMES - {"extrapolated_logprobs"}

    def reference(hidden, weight, other_hidden, other_weight, targets):
        found = []
        for n in range(TOKENS):
            columns = sorted(set(rows[n])) or list(range(VOCAB))
            target = torch.tensor([columns.index(targets[n].item())])
            part = hidden[n : n + 1], weight[columns], other_hidden[n : n + 1], other_weight[columns]
            found.append(dense(*part, target, vocab=len(columns)))
        return {name: torch.cat([each[name] for each in found]) for name in names}

    def ours(*given):
        return compare(*given, names=names, vocab_size=VOCAB, block_bytes=BLOCKS[blocks], support=support)

    values, *gradients = run(ours, dtype, names, tensors, targets)
    expected, *expected_gradients = run(reference, torch.float64, names, tensors, targets)
    for name in names:
        assert distance(values[name], expected[name]) < bound, name
    for found, true in zip(gradients, expected_gradients, strict=True):
        assert found.isfinite().all() and distance(found, true) < bound


def test_ranks_gather_outputs_in_one_order(monkeypatch):
    """A set of names has another order in each process, and context-parallel ranks gather the outputs one by one."""
    monkeypatch.setattr(actors, "copy_to_tensor_model_parallel_region", lambda hidden: hidden)
    outputs = {"reverse_kl": torch.zeros(2), "logprobs": torch.zeros(2)}
    actor = SimpleNamespace(value_head=False, config=SimpleNamespace(sequence_parallel=False))
    actor._distributions, actor._gather_context = (lambda *_: outputs), (lambda value, _: value)
    micro = SimpleNamespace(rows=torch.tensor([0, 1]))
    found = actors.Actor._heads(actor, torch.zeros(1, 2, 3), micro, frozenset(outputs), None)
    assert list(found) == ["logprobs", "reverse_kl"]

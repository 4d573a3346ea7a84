"""Computes the gradients of every offline objective under given layouts. test_offline_invariance runs it on several
ranks.

usage: offline_cases.py OUT.pt CASE [CASE ...]      a case is "tp=2,sp=1,budget=64"; recorded=1 reads hidden states
The first run, on one process, writes what the others are compared with.
"""

import json
import math
import sys

import torch
import torch.distributed as dist

from megatron_rft.config import Batching, Megatron
from megatron_rft.megatron import model as models
from megatron_rft.megatron import parallel, weights
from megatron_rft.megatron.actor import Actor
from megatron_rft.megatron.two_distributions import Second
from megatron_rft.records import Batch
from megatron_rft.training.offline import draw
from tests.made import OFFLINE, made
from tests.parity.gradient_cases import KEYS, mini_batch, model_config, poisoned, read
from tests.parity.layouts import shutdown

OBJECTIVES = {name: made(name) for name in OFFLINE} | {
    "off_rl_kl": made("off_rl", kl_coefficient=0.5),
    "fpa_incorrect": made("fpa", extrapolation=2.0, fpa_on="incorrect"),
    "offline_distil": made("offline_distil", divergence="jsd", jsd_beta=0.3),
}


class Case:
    """The model in one layout, and a reference."""

    def __init__(self, options: dict[str, int]):
        self.masked = bool(options.get("masked"))
        megatron = Megatron(
            sequence_parallel=bool(options.get("sp")), **{KEYS[k]: v for k, v in options.items() if k in KEYS}
        )
        parallel.initialize(megatron)
        batching = Batching(
            micro_batch_tokens=options.get("budget", 1000),
            forward_only_tokens=options.get("budget", 2000),
            pack_sequences=not options.get("padded"),
            share_prompts="auto" if options.get("shared", 1) else "off",
        )
        optimizer = {"lr": 1e-3, "clip_grad": 1.0, "use_distributed_optimizer": False}
        self.actor = Actor(model_config(), megatron, batching, "fp32", optimizer=optimizer)
        self.actor.load(weights.random_tensors(model_config(), seed=4))
        self.reference = self.actor.snapshot()
        with self.actor.use_weights(self.reference):
            data = self._data()
            self.hidden = self.actor.hidden_states(data)
            if parallel.is_last_stage():
                self.output = models.output_weight(self.actor.models[-1]).detach().clone()
        self.data = data.with_tokens(data_index=torch.arange(len(data.response_ids)))
        self.actor.load(weights.random_tensors(model_config(), seed=3))

    def _data(self) -> Batch:
        data = mini_batch(masked=self.masked)
        data = data.only(set(), {"group"}).with_sequences(rewards=torch.tensor([1.0, -1.0, -1.0, 1.0] * 3))
        return data.with_tokens(ref_logprobs=self.actor.outputs(data, frozenset({"logprobs"}))["logprobs"])

    def second(self, update, batch: Batch, recorded: bool) -> Second | None:
        if update.second is None:
            return None
        if not recorded:
            return Second(batch, self.reference, update.second.extrapolation, update.second.mixture)
        index = batch.tokens["data_index"]
        output = self.output if parallel.is_last_stage() else None
        given = {"rows": lambda tokens: self.hidden[index[tokens]], "output_weight": output}
        return Second(batch, None, update.second.extrapolation, update.second.mixture, **given)

    def gradient(self, objective, recorded: bool) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        data = objective.annotate(self.data)
        batch = draw(data, objective.examples(data))
        if "old_logprobs" in objective.needs:
            batch = batch.with_tokens(old_logprobs=self.actor.outputs(batch, frozenset({"logprobs"}))["logprobs"])
        gradients, metrics = self._gradient(objective, batch, recorded)
        if self.masked:
            again, others = self._gradient(objective, poisoned(batch), recorded)
            assert all(torch.equal(gradients[n], again[n]) for n in gradients) and metrics == others, objective
        return gradients, metrics

    def _gradient(self, objective, batch: Batch, recorded: bool) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        (update,) = objective.prepare(batch, {}).updates
        (mini,) = update.steps()
        second = self.second(update, mini, recorded)
        metrics = self.actor.backward(mini, update.loss, update.counts(mini), update.outputs, second)
        metrics = {name: -1.0 if math.isnan(value) else value for name, value in metrics.items()}  # RFT has none wrong
        with self.actor.use_weights([p.main_grad.clone() for m in self.actor.models for p in m.parameters()]):
            return {name: value.clone().cpu() for name, value in self.actor.stream()}, metrics


def main() -> None:
    path, *cases = sys.argv[1:]
    for text in cases:
        options = {k: int(v) for k, v in (part.split("=") for part in text.split(",") if part)}
        case = Case(options)
        found = {name: case.gradient(each, bool(options.get("recorded"))) for name, each in OBJECTIVES.items()}
        parallel.destroy_layout()
        if "write" in options:
            torch.save(found, f"{path}.{case.masked}")
        wanted = read(f"{path}.{case.masked}")
        for name, (gradients, metrics) in found.items():
            expected, expected_metrics = wanted[name]
            worst = max(((gradients[n] - expected[n]).abs().max() / expected[n].abs().max()).item() for n in expected)
            off = max(abs(metrics[n] - v) / (abs(v) + 1e-3) for n, v in expected_metrics.items())
            if not dist.is_initialized() or dist.get_rank() == 0:
                line = {"case": text, "objective": name, "gradient": worst, "metrics": off, "loss": metrics["loss"]}
                print("RESULT", json.dumps(line), flush=True)
    shutdown()


if __name__ == "__main__":
    main()

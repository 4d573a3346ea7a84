"""The sections of the online family: recipes that cannot work, or with options without effect, are refused with a
message."""

import json

import pytest
import yaml

from megatron_rft.config import dump, load
from megatron_rft.config.algorithms import SECTIONS
from megatron_rft.plan import check
from megatron_rft.utils.errors import ConfigError
from tests.made import ONLINE
from tests.unit.config.test_config import SHAPE


@pytest.fixture
def recipe(tmp_path):
    """A recipe with two optimizer steps per batch, so that clips matter."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(SHAPE))
    content = {
        "run": {"output_dir": str(tmp_path / "out"), "steps": 20},
        "model": {"path": str(tmp_path / "model"), "initialise": "random", "precision": "fp32"},
        "data": {"train": "examples/quickstart/arithmetic.py:rows"},
        "rollout": {"prompts_per_step": 8, "group_size": 4},
        "algorithm": {"mini_batch_prompts": 4},
    }
    (tmp_path / "rl.yaml").write_text(yaml.safe_dump(content))
    return tmp_path / "rl.yaml"


def refusal(recipe, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        check(load(recipe, list(overrides)))
    return str(error.value)


@pytest.mark.parametrize("name", [name for name in ONLINE if SECTIONS[name].compares_responses is True])
def test_a_group_of_one_has_nothing_to_compare(recipe, name):
    words = refusal(recipe, f"algorithm.name={name}", "rollout.group_size=1")
    assert f"rollout.group_size: {name} compares the responses of a group: it takes 2 or more, not 1" in words


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["algorithm.clip_low=-0.1"], "algorithm.clip_low: -0.1 is not at least 0"),
        (["algorithm.clip_low=1.5"], "algorithm.clip_low: 1.5 is not at most 1"),
        (["algorithm.clip_high=-0.2"], "algorithm.clip_high: -0.2 is not"),
        (["algorithm.dual_clip=1"], "algorithm.dual_clip: 1"),
        (["algorithm.kl_coefficient=.nan"], "algorithm.kl_coefficient"),
        (["algorithm.kl_estimator=k4"], "'k4' is not one of"),
        (["algorithm.aggregation=mean"], "'mean' is not one of"),
        (["pipo.window=1"], "pipo.window: 1 is not at least 2"),
        (["pipo.rectification=1.5"], "pipo.rectification: 1.5 is not at most 1"),
        (["pipo.rectification=-0.1"], "pipo.rectification: -0.1 is not at least 0"),
        (["algorithm.name=ppo"], "critic: is missing: ppo trains a separate value model"),
        (["algorithm.name=ppo", "critic.warmup_steps=2"], "critic.lr: is required"),
        (["algorithm.name=ppo", "critic={lr: 1e-5, warmup_steps: 20}"], "leaves the policy no step: the run has 20"),
        (
            ["algorithm.name=ppo", "critic={lr: 1e-5, warmup_steps: 15}", "optimizer.lr_warmup_steps=11"],
            "optimizer.lr_warmup_steps: 11 is beyond the run's optimizer steps, 10",
        ),
        (
            ["algorithm.name=ppo", "critic={lr: 1e-5, lr_warmup_steps: 41}"],
            "critic.lr_warmup_steps: 41 is beyond the run's optimizer steps, 40",
        ),
        (["critic.lr=1e-5"], "critic: does nothing with algorithm grpo"),
        (
            ["algorithm.name=ppo", "critic={lr: 1e-5, value_clip: 0.5}", "algorithm.mini_batch_prompts=null"],
            "critic.value_clip: does nothing where a sampled batch gets one step",
        ),
        (
            ["algorithm={name: ppo, gamma: 0.0, lam: 0.5}", "critic={lr: 1e-5}"],
            "algorithm.lam: does nothing while gamma is 0",
        ),
        (["algorithm={name: sdpo, feedback: []}"], "algorithm.feedback: is empty"),
        (["algorithm={name: sdpo, feedback: [luck]}"], "'luck' is not one of"),
        (["algorithm={name: sdpo, feedback: [error, error]}"], "names a source twice"),
        (["algorithm={name: sdpo, feedback: [sibling]}", "rollout.group_size=1"], "it takes 2 or more, not 1"),
        (["algorithm={name: sdpo, teacher_template: '{prompt}'}"], "must have {feedback} and {prompt}"),
        (["algorithm={name: sdpo, solution_template: 'x'}"], "must have {}"),
        (["algorithm={name: sdpo, max_feedback_tokens: 10000}"], "algorithm.max_feedback_tokens: with 10000 more"),
        (["algorithm={name: dapo, overlong_buffer: 512}"], "every response would be penalised"),
        # options that would do nothing
        (["algorithm.kl_coefficient=0", "algorithm.kl_in=reward"], "kl_in: does nothing while kl_coefficient is 0"),
        (["algorithm.kl_coefficient=0", "algorithm.kl_estimator=k1"], "does nothing while kl_coefficient is 0"),
        (
            ["algorithm.kl_estimator=k1"],
            "k1 in the loss lacks the KL's gradient. Use k2, k3 or exact, or kl_in: reward",
        ),
        (["algorithm.kl_estimator=k3", "algorithm.kl_in=reward"], "k3 in the reward lacks the KL's gradient"),
        (["algorithm={name: rloo, kl_estimator: exact}"], "exact in the reward lacks the KL's gradient"),
        (["constraint={kind: static, eta: 0.1, mode: reward}", "algorithm.kl_estimator=k2"], "k2 in the reward"),
        (["algorithm.importance_cap=3"], "does nothing while importance is none"),
        (["algorithm.importance=masked", "algorithm.old_logprobs=rollout"], "they are the same"),
        (["algorithm={name: dapo, filter_groups: false, max_rounds: 2}"], "does nothing while filter_groups is false"),
        (["algorithm={name: dapo, overlong_coefficient: 2}"], "does nothing while overlong_buffer is 0"),
        (["algorithm.mini_batch_prompts=null", "algorithm.clip_low=0.1"], "one on-policy step, whose ratio is 1"),
        (["algorithm={name: sdpo, clip_high: 0.1}"], "does nothing without pipo"),
        (
            ["algorithm={name: sdpo}", "faults.on_mismatch=stop"],
            "faults.on_mismatch: does nothing with several steps of sdpo",
        ),
        (["algorithm={name: sdpo, old_logprobs: rollout}"], "does nothing without pipo"),
        (["algorithm={name: sdpo, feedback: [error], solution_template: 'a {}'}"], "does nothing while feedback is"),
        (["algorithm.name=sdpo", "model.reference=x"], "does nothing without a KL to it"),
        (
            ["algorithm={name: cispo, dual_clip: 3}"],
            "does nothing with algorithm cispo, only with ppo, grpo,",
        ),
        # the constraint
        (["constraint={kind: dynamic, eta: -0.1}"], "constraint.eta: -0.1 is not at least 0"),
        (["constraint={kind: dynamic}"], "constraint.eta: is required with kind dynamic"),
        (["constraint={kind: static}"], "constraint.eta: is required with kind static"),
        (["constraint={kind: fixed}"], "'fixed' is not one of none, static, dynamic"),
        (["constraint={kind: none, eta: 0.1}"], "constraint.eta: does nothing with kind none"),
        (["constraint={kind: static, eta: 0.1, filter: false}"], "constraint.filter: does nothing with kind static"),
        (["constraint={kind: none, first: 3}"], "constraint.first: does nothing with kind none"),
        (["constraint={kind: dynamic, eta: 0, filter: false}"], "constraint.filter: does nothing while eta is 0"),
        (["constraint={kind: dynamic, eta: 0, per: pairs}"], "constraint.per: does nothing while eta is 0"),
        (["constraint={kind: dynamic, eta: 0.1, mode: reward, per: pairs}"], "does nothing with mode reward"),
        (["constraint={kind: static, eta: 0.1, per: pairs}"], "constraint.per: does nothing with kind static"),
        (["constraint={kind: dynamic, eta: 0.1, agreeing: true}"], "grpo leaves no group out"),
        (
            ["constraint={kind: dynamic, eta: 0.1, agreeing: true}", "algorithm={name: dapo, filter_groups: false}"],
            "dapo leaves no group out",
        ),
        (
            ["constraint={kind: dynamic, eta: 0.1, mode: reward, agreeing: true}", "algorithm.name=dapo"],
            "constraint.agreeing: with mode reward, penalties would be all that differs in such a group",
        ),
        (["algorithm={name: sdpo, importance_cap: 0.5}"], "algorithm.importance_cap: 0.5 is not at least 1"),
        (
            ["algorithm={name: sdpo, importance_cap: 2}", "algorithm.mini_batch_prompts=8"],
            "algorithm.importance_cap: does nothing where a sampled batch gets one on-policy step",
        ),
        (["constraint={kind: dynamic, eta: 0.1, share: 0}"], "constraint.share: 0 is not above 0"),
        (["constraint={kind: dynamic, eta: 0.1, first: 4}"], "constraint.first: does nothing: rollout.group_size is 4"),
        (["constraint={kind: dynamic, eta: 0.1, template: cod}"], "Did you mean 'code'?"),
        (["constraint={kind: dynamic, eta: 0.1}", "reward.kind=choice"], "constraint.template: is required with"),
        (["constraint={kind: dynamic, eta: 0.1, mode: reward, norms_every: 5}"], "the loss has only one part"),
        (["constraint={kind: none}", "algorithm.kl_coefficient=0.1"], "algorithm.kl_coefficient: 0.1 contradicts"),
        (["constraint={kind: static, eta: 0.1, mode: loss}", "algorithm.kl_in=reward"], "constraint.mode is loss"),
        (["constraint={kind: dynamic, eta: 0.1}", "algorithm.name=sdpo"], "the loss of sdpo has none"),
        (["constraint={kind: none}", "model.reference=x"], "does nothing without a KL to it"),
    ],
)
def test_a_refusal_names_option_value_and_fix(recipe, overrides, words):
    if overrides[0].startswith("algorithm={"):
        overrides = [overrides[0].replace("{", "{mini_batch_prompts: 4, ", 1), *overrides[1:]]
    assert words in refusal(recipe, *overrides)


@pytest.mark.parametrize("name", [name for name in ONLINE if SECTIONS[name].uses_rewards])
def test_every_algorithm_has_a_plan(recipe, name):
    critic = ["critic.lr=1e-5", "rollout.group_size=1"] if name == "ppo" else []
    plan = str(
        check(load(recipe, [f"algorithm.name={name}", "pipo.window=4", *critic, "batching.micro_batch_tokens=8192"]))
    )
    assert "updates: 2 optimizer steps = 2 x 4 prompts" in plan and "from step 5 on" in plan
    assert ("critic: as many steps at 1e-05" in plan) == (name == "ppo")


@pytest.mark.parametrize(
    "constraint, kl",
    [
        ("{kind: none}", (0.0, "loss", "k3")),
        ("{kind: static, eta: 0.02}", (0.02, "loss", "k3")),
        ("{kind: static, eta: 0.02, mode: reward}", (0.02, "reward", "k1")),
        ("{kind: dynamic, eta: 0.02}", (0.0, "loss", "k3")),
    ],
)
def test_a_constraint_sets_the_algorithms_kl(recipe, tmp_path, constraint, kl):
    """A recipe that was written out gives the same."""
    loaded = load(recipe, [f"constraint={constraint}"])
    assert (loaded.algorithm.kl_coefficient, loaded.algorithm.kl_in, loaded.algorithm.estimator) == kl
    (tmp_path / "dumped.yaml").write_text(dump(loaded))
    assert load(tmp_path / "dumped.yaml") == loaded
    assert ("constraint:" in str(check(loaded))) == (loaded.constraint.kind != "none")


def test_a_dynamic_constraint_beside_a_kl(recipe):
    assert (
        load(recipe, ["constraint={kind: dynamic, eta: 0.1}", "algorithm.kl_coefficient=0.5"]).algorithm.kl_coefficient
        == 0.5
    )


@pytest.mark.parametrize(
    "text, words",
    [
        ("{question} alone", "must have {question} and {response}, may have {reward}, and nothing else"),
        ("{question} {response} {answer}", "must have {question} and {response}, may have {reward}, and nothing else"),
        ("{question} {response} {", "literal braces are written"),
        (None, "is neither a template's name nor a text file"),
    ],
)
def test_templates_without_their_fields(recipe, tmp_path, text, words):
    path = tmp_path / "template.txt"
    if text:
        path.write_text(text)
    assert words in refusal(recipe, f"constraint={{kind: dynamic, eta: 0.1, template: {path}}}")


def test_valid_combinations_of_refiner_and_sdpo_options(recipe):
    """Each option has an effect in this combination."""
    for overrides in (
        ["algorithm.name=dapo", "constraint={kind: dynamic, eta: 0.1, agreeing: true}"],
        ["constraint={kind: dynamic, eta: 0.1, mode: loss, per: pairs}"],
        ["algorithm={name: sdpo, importance_cap: 2}"],
        ["algorithm={name: sdpo, importance_cap: 2, old_logprobs: rollout, mini_batch_prompts: 8}"],
        ["algorithm={name: sdpo, importance_cap: 2, mini_batch_prompts: 8}", "pipo.window=2"],
    ):
        check(load(recipe, overrides))


def test_each_line_of_the_table_has_the_name_of_its_section():
    assert [section.model_fields["name"].default for section in SECTIONS.values()] == list(SECTIONS)

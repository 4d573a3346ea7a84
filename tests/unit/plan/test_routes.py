"""Router replay in a plan: where it is on, and options without effect."""

import pytest

from megatron_rft.config.loading import load
from megatron_rft.plan import routes
from megatron_rft.plan.model_shape import ModelShape
from megatron_rft.plan.routes import why_not_replayed
from megatron_rft.utils.errors import ConfigError
from tests.families import FAMILIES


def check(recipe, shape, engine: str) -> list[str]:
    return routes.check(recipe.rollout, recipe.megatron, shape, engine)


def check_balancing(recipe, shape) -> None:
    routes.check_balancing(recipe.megatron, recipe.lora, shape)


DENSE, MIXTURE = (ModelShape(FAMILIES[name].to_dict()) for name in ("mistral", "glm4_moe"))


@pytest.fixture
def recipe(tmp_path):
    def make(*overrides: str):
        (tmp_path / "recipe.yaml").write_text(
            "trainer: rl\nrun: {output_dir: out, steps: 1}\nmodel: {path: m}\n"
            "data: {train: examples/quickstart/arithmetic.py:rows}\n"
            "rollout: {engine: hf}\n"
        )
        return load(tmp_path / "recipe.yaml", list(overrides))

    return make


def test_on_where_the_engine_reports_its_experts(recipe):
    assert check(recipe(), MIXTURE, "hf") == ["experts: those that the engine used for each token"]
    assert check(recipe(), MIXTURE, "vllm") == [
        "experts: chosen by the trainer, the vllm engine does not report its experts"
    ]
    assert check(recipe(), DENSE, "hf") == []
    off = recipe("rollout.replay_routes=off")
    assert check(off, MIXTURE, "hf") == ["experts: chosen by the trainer, rollout.replay_routes is off"]
    assert why_not_replayed(off.rollout, MIXTURE, "hf")


@pytest.mark.parametrize(("shape", "engine"), [(DENSE, "hf"), (MIXTURE, "vllm")])
def test_off_without_effect_is_refused(recipe, shape, engine):
    with pytest.raises(ConfigError, match=r"rollout.replay_routes: off does nothing: the .*\. Leave it out"):
        check(recipe("rollout.replay_routes=off"), shape, engine)


def test_a_kernel_that_chooses_itself_is_refused(recipe):
    fused = "megatron.moe_router_fusion=true"
    with pytest.raises(ConfigError, match="megatron.moe_router_fusion: this kernel chooses the experts itself"):
        check(recipe(fused), MIXTURE, "hf")
    assert check(recipe(fused, "rollout.replay_routes=off"), MIXTURE, "hf")


def test_vllms_own_option_is_refused(recipe):
    with pytest.raises(ConfigError, match="vllm.enable_return_routed_experts.*second model runner"):
        recipe("vllm.enable_return_routed_experts=true", "rollout.engine=vllm")


def test_balancing_without_effect_is_refused(recipe):
    rate = "megatron.moe_router_bias_update_rate=0.001"
    check_balancing(recipe(rate), MIXTURE)
    with pytest.raises(ConfigError, match="does nothing: the routers of this model have no expert bias. Leave it out"):
        check_balancing(recipe(rate), ModelShape(FAMILIES["gpt_oss"].to_dict()))
    with pytest.raises(ConfigError, match="does nothing: the biases belong to the frozen model beside `lora`"):
        check_balancing(recipe(rate, "lora.rank=4"), MIXTURE)
    with pytest.raises(ConfigError, match="does nothing: megatron.moe_router_fusion counts no loads"):
        check_balancing(recipe(rate, "megatron.moe_router_fusion=true"), MIXTURE)

"""Recipes of the trainers generate and offline: resolved values, and refusals with their messages."""

import pytest
import yaml

from megatron_rft.config import difference, dump, load
from megatron_rft.plan import check, check_store_is_there
from megatron_rft.utils.errors import DataError, UserError
from tests.shapes import write_model
from tests.unit.config.test_config import EXAMPLES, SHAPE


@pytest.fixture
def recipe(tmp_path):
    """Writes a recipe of one trainer, in a folder with a model and a complete store."""
    write_model(tmp_path / "model", SHAPE)
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "index.json").touch()

    def write(trainer, **sections):
        own = {"offline": {"data": {"train": str(tmp_path / "store")}, "run": {"epochs": 3}}}
        own["generate"] = {"data": {"train": "examples/quickstart/arithmetic.py:rows"}, "run": {"seed": 42}}
        whole = {"trainer": trainer, "model": {"path": str(tmp_path / "model")}} | own[trainer] | sections
        whole["run"] = whole["run"] | {"output_dir": str(tmp_path / "out")}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(whole))
        return tmp_path / "recipe.yaml"

    return write


def refusal(path, *overrides):
    with pytest.raises(UserError) as caught:
        check(load(path, list(overrides)))
    return str(caught.value)


def test_a_plan(recipe):
    text = str(check(load(recipe("offline", algorithm={"name": "dpo"}, evaluation={"every": 50, "patience": 3}))))
    assert "64 sequences = 32 pairs" in text and "every 50 steps, until 3 in a row" in text and "3 epochs" in text
    text = str(check(load(recipe("generate", rollout={"temperature": 0.7}))))
    assert "8 responses" in text and "temperature 0.7, seed 42" in text and "5% held out" in text


@pytest.mark.parametrize("trainer", ["offline", "generate"])
def test_what_is_written_is_read_again(recipe, trainer, tmp_path):
    loaded = load(recipe(trainer))
    (tmp_path / "again.yaml").write_text(dump(loaded))
    assert load(tmp_path / "again.yaml") == loaded
    assert loaded.algorithm.name == "fpa" or trainer == "generate"


def test_what_chooses_the_best_model_stays_on_resume(recipe):
    """Else pass@1 of other problems, or of other answers to them, would be compared."""
    begun = load(recipe("offline", evaluation={"every": 5}))
    for name, value in (("samples", 4), ("temperature", 0.0), ("limit", 5), ("max_response_tokens", 9)):
        (line,) = difference(begun, load(recipe("offline", evaluation={"every": 5, name: value})))
        assert line.startswith(f"evaluation.{name}: ")
    assert difference(begun, load(recipe("offline", evaluation={"every": 3, "patience": 2, "batch": 8}))) == []
    own = {"train": begun.data.train.path, "validation": "examples/quickstart/arithmetic.py:rows"}
    assert difference(begun, load(recipe("offline", data=own, evaluation={"every": 5})))


def test_refused(recipe):
    offline = recipe("offline")
    assert "is not at least 0" in refusal(offline, "algorithm.extrapolation=-1")
    assert "does not belong to trainer offline" in refusal(offline, "algorithm.name=grpo")
    assert "must be even: a pair has two" in refusal(offline, "algorithm.name=dpo", "algorithm.batch_sequences=7")
    assert "needs no distribution" in refusal(offline, "algorithm.name=off_rl", "algorithm.reference=cached_hidden")
    assert "while kl_coefficient is 0" in refusal(offline, "algorithm.kl_aggregation=token_mean")
    assert "while extrapolation is 0" in refusal(offline, "algorithm.extrapolation=0", "algorithm.fpa_on=correct")
    assert "evaluation.every is 0" in refusal(offline, "evaluation.patience=2")
    assert "data.validation: does nothing while" in refusal(offline, "data.validation=math500", "evaluation.every=0")
    assert "does nothing with trainer offline" in refusal(offline, "rollout.temperature=0.7")
    assert "fpq" in refusal(offline, "algorithm.name=fpq")
    for option in ("data.train.split=test", "data.train.limit=2", "data.train.prompt_field=text", "data.limit=2"):
        assert f"{option.partition('=')[0]}: does nothing with a store" in refusal(offline, option)
    assert "does nothing with trainer offline" in refusal(offline, "batching.skip_zero_advantages=off")
    generate = recipe("generate")
    for option in ("algorithm.name=fpa", "optimizer.lr=1e-5", "evaluation.every=3"):
        assert "does nothing with trainer generate" in refusal(generate, option)


def test_how_to_ask_is_for_what_is_evaluated(recipe):
    asks = ["data.prompt_template=boxed"]
    assert "without data.test, data.validation or evaluation.benchmarks" in refusal(recipe("offline"), *asks)
    assert load(recipe("offline"), [*asks, "evaluation.benchmarks={math500: math500}"]).data.prompt_template == "boxed"


def test_a_store_is_whole_or_not_there_yet(recipe, tmp_path):
    offline = recipe("offline")
    assert "no trajectories yet" in str(check(load(offline, [f"data.train={tmp_path}/nowhere"])))
    with pytest.raises(DataError, match="no trajectories yet"):  # a run that begins now
        check_store_is_there(load(offline, [f"data.train={tmp_path}/nowhere"]))
    (tmp_path / "store" / "index.json").unlink()
    assert "not a complete trajectory store" in refusal(offline)


LEFT_OUT = ("common.yaml", "grpo.yaml")  # part of a recipe; an online baseline
RECIPES = [path for path in sorted((EXAMPLES / "fpa").rglob("*.yaml")) if path.name not in LEFT_OUT]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_papers_recipes_pass_a_dry_run(path, tmp_path):
    if made := "miniature" in path.parts:  # whose model is made by its script
        write_model(tmp_path / "model", SHAPE)
    given = [f"model.path={tmp_path / 'model'}"] if made else []
    text = str(check(load(path, given), 1 if made else 8))  # a node
    assert "sampling: " in text or "validation: the held-out problems" in text


def test_every_row_of_the_papers_tables_has_a_recipe():
    table_1 = {"generate", "sft", "dpo", "rpo", "kto", "a_star_po", "off_rl", "fpa"}
    for folder in ("qwen3_4b_base", "qwen2.5_math_7b", "llama3.2_3b_instruct"):
        assert table_1 <= {path.stem for path in RECIPES if path.parent.name == folder}
    default = {path.stem for path in RECIPES if path.parent.name == "qwen3_4b_base"}
    assert {"off_rl_low_lr", "off_rl_kl", "fpa_correct", "fpa_incorrect"} <= default
    assert {f"fpa_lambda_{value}" for value in ("0.5", "1", "5", "10", "20")} <= default


def test_an_evaluation_that_nothing_grades_is_refused(recipe):
    offline = recipe("offline")
    assert "evaluation.every: does nothing with reward.kind none: nothing grades" in refusal(
        offline, "reward.kind=none", "evaluation.every=3"
    )
    assert "data.test: does nothing with reward.kind none" in refusal(
        offline, "trainer=sft", "reward.kind=none", "data.test=math500"
    )

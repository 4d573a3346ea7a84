"""Where engines run and how far ahead they sample: what cannot work, or would do nothing, is refused in words."""

import pytest

from megatron_rft.config import check, load
from megatron_rft.config.plan import engine_processes
from tests.unit.test_config_online import recipe, refusal  # noqa: F401  a fixture

PROCESS, CORRECTED = "rollout.placement=process", "algorithm.importance=truncated"


def test_one_step_off_needs_an_engine_of_its_own_and_a_correction(recipe):  # noqa: F811
    assert "cannot generate while that trains" in refusal(recipe, "rollout.staleness=1", CORRECTED)
    assert "algorithm.old_logprobs to rollout" in refusal(recipe, "rollout.staleness=1", PROCESS)
    for correction in (CORRECTED, "algorithm.importance=masked", "algorithm.old_logprobs=rollout"):
        assert check(load(recipe, ["rollout.staleness=2", PROCESS, correction])).layout


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["rollout.processes=2"], "rollout.processes: does nothing with placement colocated"),
        (["rollout.servers=[http://a:1]"], "rollout.servers: does nothing with placement colocated"),
        (["faults.engine_silence_s=5"], "faults.engine_silence_s: does nothing with rollout.placement colocated"),
        ([PROCESS, "rollout.servers=[http://a:1]"], "does nothing with placement process"),
        (["rollout.placement=server", "rollout.engine=hf"], "hf has no server"),
        (["rollout.placement=server", "rollout.servers=[a:1]"], "'a:1' is no URL of a server, such as http://node7"),
        (["rollout.placement=server", "rollout.servers=[http://a, http://a]"], "names a server twice"),
        (["rollout.placement=server", "rollout.servers=[http://a]", "rollout.processes=1"], "nothing beside servers"),
    ],
)
def test_refused(recipe, overrides, message):  # noqa: F811
    assert message in refusal(recipe, *overrides)


@pytest.mark.parametrize("option", ["rollout.staleness=1", "rollout.placement=process"])
def test_other_trainers_have_no_use_for_them(recipe, option):  # noqa: F811
    sft = ["trainer=sft", "algorithm=null", "rollout.prompts_per_step=null", "rollout.group_size=null"]
    assert "does nothing with trainer sft" in refusal(recipe, *sft, option)


def test_how_many(recipe):  # noqa: F811
    two = load(recipe, [PROCESS, "rollout.processes=2"])
    assert engine_processes(two, 4) == 2 and "2 of their own" in str(check(two, 4))
    assert engine_processes(load(recipe, [PROCESS]), 4) == 4
    assert engine_processes(load(recipe, [PROCESS]), 4, spare_gpus=3) == 3
    with pytest.raises(ValueError, match="3 engines cannot be shared evenly by 4 ranks"):
        check(load(recipe, [PROCESS, "rollout.processes=3"]), 4)
    servers = load(recipe, ["rollout.placement=server", "rollout.servers=[http://a:1, http://b:2]"])
    assert engine_processes(servers, 4) == 2 and "http://a:1, http://b:2" in str(check(servers, 4))

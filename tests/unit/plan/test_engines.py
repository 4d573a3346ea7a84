"""Placement of engines and sampling ahead: impossible recipes and options without effect are refused with a message."""

import pytest

from megatron_rft.config import load, vllm
from megatron_rft.plan import check
from megatron_rft.plan.engines import engine_processes
from megatron_rft.plan.vllm import unusable
from tests.unit.config.test_online import recipe, refusal  # noqa: F401  a fixture

PROCESS, CORRECTED = "rollout.placement=process", "algorithm.importance=truncated"
IN_FLIGHT = [PROCESS, CORRECTED, "rollout.staleness=2"]


def processes_of(loaded, world, spare_gpus=0):
    return engine_processes(loaded.rollout, loaded.vllm, world, spare_gpus)


def test_one_step_off_needs_an_engine_of_its_own_and_a_correction(recipe):  # noqa: F811
    assert "cannot generate while the rank trains" in refusal(recipe, "rollout.staleness=1", CORRECTED)
    assert "algorithm.old_logprobs to rollout" in refusal(recipe, "rollout.staleness=1", PROCESS)
    for correction in (CORRECTED, "algorithm.importance=masked", "algorithm.old_logprobs=rollout"):
        assert check(load(recipe, ["rollout.staleness=2", PROCESS, correction])).layout


def test_a_loss_without_a_ratio_needs_no_correction_but_its_verification_does(recipe):  # noqa: F811
    sdpo = [PROCESS, "rollout.staleness=1", "algorithm={name: sdpo}"]
    assert check(load(recipe, sdpo)).layout
    assert "algorithm.old_logprobs to rollout" in refusal(recipe, *sdpo, "pipo.window=4")
    assert check(load(recipe, [*sdpo, "pipo.window=4", "algorithm.old_logprobs=rollout"])).layout


@pytest.mark.parametrize(
    "overrides, message",
    [
        ([PROCESS, "rollout.reserve_gib=3"], "rollout.reserve_gib: does nothing with placement process"),
        (["rollout.engine=hf", "rollout.reserve_gib=3"], "rollout.reserve_gib: does nothing with rollout.engine hf"),
        (["rollout.processes=2"], "rollout.processes: does nothing with placement colocated"),
        (["rollout.servers=[http://a:1]"], "rollout.servers: does nothing with placement colocated"),
        (["faults.engine_silence_s=5"], "faults.engine_silence_s: does nothing with rollout.placement colocated"),
        ([PROCESS, "rollout.servers=[http://a:1]"], "does nothing with placement process"),
        (["rollout.placement=server", "rollout.engine=hf"], "hf has no server"),
        (["algorithm.old_logprobs=rollout", "faults.mismatch_kl=1"], "the trainer computes no log-probs to comp"),
        ([PROCESS, CORRECTED, "rollout.staleness=1", "faults.on_mismatch=stop"], "responses come from older weights"),
        ([PROCESS, CORRECTED, "rollout.staleness=1", "rollout.cache_after_sync=keep"], "no response is unfinished"),
        ([*IN_FLIGHT, "rollout.engine=hf", "rollout.cache_after_sync=recompute"], "hf, which keeps them"),
        (["rollout.placement=server", "rollout.servers=[a:1]"], "'a:1' is no URL of a server, such as http://node7"),
        (["rollout.placement=server", "rollout.servers=[http://a, http://a]"], "names a server twice"),
        (["rollout.placement=server", "rollout.servers=[http://a]", "rollout.processes=1"], "together with servers"),
    ],
)
def test_refused(recipe, overrides, message):  # noqa: F811
    assert message in refusal(recipe, *overrides)


@pytest.mark.skipif(unusable() is not None, reason="needs vLLM's names")
def test_new_responses_do_not_get_keys_of_old_weights(recipe):  # noqa: F811
    keep = [*IN_FLIGHT, "rollout.cache_after_sync=keep"]
    assert check(load(recipe, keep)).layout
    told = refusal(recipe, *keep, "rollout.engine=vllm", "vllm.enable_prefix_caching=true")
    assert "would give new responses the keys and values of old weights" in told


@pytest.mark.parametrize("option", ["rollout.staleness=1", "rollout.placement=process"])
def test_other_trainers_have_no_use_for_them(recipe, option):  # noqa: F811
    sft = ["trainer=sft", "algorithm=null", "rollout.prompts_per_step=null", "rollout.group_size=null"]
    assert "does nothing with trainer sft" in refusal(recipe, *sft, option)


def test_how_many(recipe):  # noqa: F811
    two = load(recipe, [PROCESS, "rollout.processes=2"])
    assert processes_of(two, 4) == 2 and "2 of their own" in str(check(two, 4))
    assert processes_of(load(recipe, [PROCESS]), 4) == 4
    assert processes_of(load(recipe, [PROCESS]), 4, spare_gpus=3) == 3
    with pytest.raises(ValueError, match="3 engines cannot be shared evenly by 4 ranks"):
        check(load(recipe, [PROCESS, "rollout.processes=3"]), 4)
    servers = load(recipe, ["rollout.placement=server", "rollout.servers=[http://a:1, http://b:2]"])
    assert processes_of(servers, 4) == 2 and "http://a:1, http://b:2" in str(check(servers, 4))


TWO = "vllm.tensor_parallel_size=2"


def test_engines_of_several_devices(monkeypatch, recipe):  # noqa: F811
    monkeypatch.setattr(vllm, "installed", lambda: ("vllm", "0.32.0"))
    monkeypatch.setattr(vllm, "fields", dict)
    assert "generation: 2 engines, each 2 ranks" in check(load(recipe, [TWO]), 4).lines
    served = load(recipe, [TWO, "rollout.placement=server"])
    assert "one on each spare 2 GPUs, else one per 2 ranks of 2 workers each, for 4 ranks" in str(check(served, 4))
    assert [processes_of(served, world, spare) for world, spare in ((4, 0), (1, 0), (4, 5))] == [2, 1, 2]
    assert "an engine process has one device" in refusal(recipe, TWO, PROCESS)
    with pytest.raises(ValueError, match="2 ranks in a row are one engine, and 3 ranks cannot be divided so"):
        check(load(recipe, [TWO]), 3)
    assert check(load(recipe, [TWO]), 4, ranks_per_node=2).layout
    with pytest.raises(ValueError, match="with 3 ranks on a node some of them would lie on two nodes"):
        check(load(recipe, [TWO]), 6, ranks_per_node=3)
    assert check(load(recipe, [TWO, "rollout.placement=server"]), 6, ranks_per_node=3).layout
    with pytest.raises(ValueError, match="the refiner's engine answers each rank at a time of its own"):
        check(load(recipe, [TWO, *REFINES]), 2)
    assert check(load(recipe, [TWO, *REFINES, "rollout.placement=server"]), 2).layout


def test_servers_of_others_have_their_own_options(recipe):  # noqa: F811
    given = ["rollout.placement=server", "rollout.servers=[http://a:1]"]
    assert "engine: vllm (rollout.servers)" in check(load(recipe, given)).lines
    assert "set their --max-num-seqs" in refusal(recipe, *given, "rollout.max_batch_sequences=8")
    told = refusal(recipe, *given, "vllm.max_model_len=2000")
    assert told == "vllm.max_model_len: does nothing with rollout.servers, which have their own options"


@pytest.mark.parametrize("url", ["a:1", "http://a:b", "http://a:99999", "http://:80", "https://a:1"])
def test_server_urls_must_be_valid(recipe, url):  # noqa: F811
    assert "is no URL of a server" in refusal(recipe, "rollout.placement=server", f"rollout.servers=['{url}']")


REFINES = ["constraint={kind: dynamic, eta: 1e-3, template: mathematics}", "algorithm.kl_coefficient=null"]

"""The memory of a plan by hand: bytes per parameter, phases, and the message when it does not fit."""

import json

import pytest

from megatron_rft.commands import main
from megatron_rft.config import load, vllm
from megatron_rft.plan import checks, memory
from megatron_rft.plan.layout import Layout
from megatron_rft.plan.memory import MemoryPlan, lines, state_of
from megatron_rft.plan.model_shape import read_shape
from megatron_rft.plan.parameters import buckets, owned
from megatron_rft.plan.vllm import room_for_cache
from megatron_rft.utils import device
from megatron_rft.utils.errors import ConfigError
from tests.shapes import json_of

CONFIG = json_of(
    2, 8, 4, 2, 16, 10, head_dim=2, model_type="qwen3", max_position_embeddings=4096, tie_word_embeddings=False
)
LAYER = 3 * 64 + 64 + 2 * 2 + 3 * 128 - 64 + 2 * 8  # q, o 64 each, k, v 32 each; two norms of 2; three of 128; two of 8
WHOLE = 2 * 80 + 2 * LAYER + 8


@pytest.fixture
def path(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(CONFIG))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"run: {{output_dir: {tmp_path}/out, steps: 2}}\nmodel: {{path: {tmp_path}/model, initialise: random}}\n"
        "data: {train: examples/quickstart/arithmetic.py:rows}\nalgorithm: {name: grpo}\n"
        "optimizer: {use_distributed_optimizer: false}\n"
    )
    return recipe


def sizes(path):
    return read_shape(path.parent / "model")


def test_parameters_by_hand(path):
    assert sizes(path).whole() == WHOLE


@pytest.mark.parametrize("precision, bytes_", [("fp32", (4, 4, 8)), ("bf16", (2, 4, 12))])
def test_bytes_of_a_parameter(path, precision, bytes_):
    state = state_of(load(path, [f"model.precision={precision}"]), sizes(path), Layout(1, 1, 1, 1, 1, 1), 0)
    assert (state.weights, state.gradients, state.optimizer) == tuple(WHOLE * each for each in bytes_)


def test_a_run_that_does_not_fit_this_machines_gpus_is_refused_before_it_starts(path, monkeypatch):
    monkeypatch.setattr(checks, "check_installed", lambda recipe: None)
    for gib in (80.0, None):  # None: the machine has no GPU, or its driver does not say
        monkeypatch.setattr(device, "gpu_gib", lambda gib=gib: gib)
        assert ("fits 80 GiB" in str(checks.check(load(path), starts=True))) == bool(gib)
    monkeypatch.setattr(device, "gpu_gib", lambda: 5.0)  # of which 5 are kept free beside vLLM
    with pytest.raises(ConfigError, match="generation needs 7.50 GiB on a rank, and there are 5 GiB. What would help"):
        checks.check(load(path, ["rollout.engine=vllm"]), starts=True)


def test_own_moments_of_pipo_are_a_second_set(path):
    layout, options = Layout(1, 1, 1, 1, 1, 1), ["pipo.optimizer_state=own"]
    one, two = (state_of(load(path, each), sizes(path), layout, 0).optimizer for each in ([], options))
    assert two - one == 8 * WHOLE


def test_fp8_copies_stay_beside_an_engine_unless_the_trainer_is_offloaded(path):
    s, layout, plans = sizes(path), Layout(1, 1, 1, 1, 1, 1), {}
    for precision in ("bf16", "fp8"):
        for offloads in ("false", "true"):
            given = [f"model.precision={precision}", f"rollout.offload_trainer={offloads}", "rollout.dtype=bf16"]
            plans[precision, offloads] = MemoryPlan(load(path, given), s, layout).phases
    copies = 2 * 2 * LAYER
    assert plans["fp8", "false"]["generation"] == plans["bf16", "false"]["generation"] + copies
    assert plans["fp8", "true"] == plans["bf16", "true"]
    assert "FP8 copies of weights 0.00 MiB" in lines(MemoryPlan(load(path, ["model.precision=fp8"]), s, layout))[0]


def test_a_references_weights_are_beside_the_policys_while_it_computes(path):
    for coefficient, times in (0.0, 0), (0.1, 1):
        m = MemoryPlan(load(path, [f"algorithm.kl_coefficient={coefficient}"]), sizes(path), Layout(1, 1, 1, 1, 1, 1))
        m.activations = 0  # of this small model they are larger
        assert m.phases["training"] == m.state.total + times * m.state.weights


def test_buckets_and_slices_by_hand():
    from megatron_rft.plan.parameters import Parameter

    buffer = buckets([Parameter(100, alone=True), Parameter(30), Parameter(70)], 2, float("inf"))
    # from the last: 70 at 0, 30 at 128 (70 padded to 64s), 158 padded to 256; the embedding alone, padded to 128
    assert buffer == [(256, [(0, 70), (128, 158)]), (128, [(0, 100)])]
    assert owned(buffer, 2) == 70 + 64  # of the slices 0-128 and 128-256, 0-64 and 64-128


def test_pipeline_stages_share_the_layers(path):
    s, recipe = sizes(path), load(path)
    first, last = (state_of(recipe, s, Layout(2, 1, 2, 1, 1, 1), stage).gradients // 4 for stage in (0, 1))
    assert (first, last) == (80 + LAYER, 80 + LAYER + 8)


def test_the_engine_holds_a_whole_copy(path):
    m = MemoryPlan(load(path), sizes(path), Layout(2, 2, 1, 1, 1, 2))
    assert m.engine == 2 * WHOLE and m.phases["generation"] == m.state.total + m.engine + m.cache
    tokens = 128 * (512 + 512)  # of 256 responses half on each rank
    assert m.cache == tokens * 2 * 4 * 2 * 2


REFINER = [
    "constraint.kind=dynamic",
    "constraint.eta=0.1",
    "constraint.template=code",
    "rollout.max_response_tokens=64",
]


def test_a_refiner_is_a_second_engine_and_a_reference(path):
    layout = Layout(2, 2, 1, 1, 1, 2)
    recipe = load(path, REFINER)
    m, s = MemoryPlan(recipe, sizes(path), layout), sizes(path)
    assert (
        m.engine == m.awake == 2 * WHOLE and m.host == m.state.weights
    )  # in bf16; the reference, as large as the policy
    assert m.cache == 128 * recipe.longest_refinement * 2 * 4 * 2 * 2
    assert recipe.longest_refinement > 512 + 64 + 64
    outside = load(path, [*REFINER, "rollout.placement=process"])
    away = MemoryPlan(outside, s, layout)
    assert away.awake == 2 * WHOLE and away.engine == 0  # the policy's is outside, the refiner's here
    closed = MemoryPlan(load(path, [*REFINER, "rollout.placement=process", "pipo.window=8"]), s, layout)
    assert closed.phases["training"] - away.phases["training"] == away.cache > 0  # verified while others are refined
    assert MemoryPlan(load(path, ["rollout.placement=server", "rollout.servers=[http://n:1]"]), s, layout).engine == 0


def test_what_engines_outside_take_of_a_ranks_device(path):
    from megatron_rft.inference.transport.buckets import BUCKET_BYTES

    s, layout, device = sizes(path), Layout(2, 1, 1, 1, 1, 1), float(80 << 30)

    def of(*options, device=device):
        return MemoryPlan(load(path, list(options)), s, layout, device)

    process, server = "rollout.placement=process", "rollout.placement=server"
    buckets = 2 * BUCKET_BYTES
    assert of().links == 0 and of(process, device=None).links == buckets
    assert of(process).links == of(process, "rollout.processes=1").links == buckets + (1 << 29)  # and a CUDA context
    assert of(process, "rollout.processes=4").links == 2 * (buckets + (1 << 29))
    assert of(server, "rollout.servers=[http://a:1, http://b:1, http://c:1, http://d:1]").links == 2 * buckets
    outside = of(process)
    assert outside.phases == {"training": outside.state.total + outside.activations + outside.links}
    told = "\n".join(lines(MemoryPlan(load(path, [process]), s, layout, device)))
    assert "links to engines outside 0.62 GiB" in told and "MiB of weights each and a cache: not counted" in told


def test_fp8_weights_are_half_of_the_layers_matrices(path, monkeypatch):
    monkeypatch.setattr(vllm, "installed", lambda: ("vllm", "0.32.0"))
    fp8 = ["vllm.quantization=fp8", "algorithm.importance=truncated"]
    engines = [MemoryPlan(load(path, each), sizes(path), Layout(1, 1, 1, 1, 1, 1)).engine for each in ([], fp8)]
    matrices = 2 * (3 * 64 + 3 * 128)  # of two layers: q, k and v together, o; the feed-forward's three
    assert engines == [2 * WHOLE, 2 * WHOLE - matrices]


def test_a_reward_model_is_named_as_not_counted(path):
    recipe = load(path, ["reward.kind=model", "reward.model=org/judge"])
    assert "memory of the reward's org/judge" in "\n".join(
        lines(MemoryPlan(recipe, sizes(path), Layout(1, 1, 1, 1, 1, 1)))
    )


def test_vllm_keeps_its_share_of_a_device(path, monkeypatch):
    monkeypatch.setattr(vllm, "installed", lambda: ("vllm", "0.32.0"))
    s, layout, device = sizes(path), Layout(1, 1, 1, 1, 1, 1), float(1 << 30)
    assert MemoryPlan(load(path), s, layout, device).engine == device / 2
    both = MemoryPlan(load(path, REFINER), s, layout, device)
    assert both.engine == both.awake == device / 4
    assert "memory of vLLM's cache: not counted" in "\n".join(lines(MemoryPlan(load(path), s, layout)))


def test_plan_says_what_fits_and_what_would_help(path, capsys):
    assert main.main(["plan", str(path), "--gpus", "2", "--gpu-gib", "80"]) == 0
    told = capsys.readouterr().out
    assert "memory of a rank: weights" in told and "fits 80 GiB" in told
    assert main.main(["plan", str(path), "--gpus", "2", "--gpu-gib", "0.01", "rollout.reserve_gib=1e-6"]) == 2
    error = capsys.readouterr().err
    assert "needs" in error and "and there are 0.01 GiB" in error
    helps = [line.strip() for line in error.splitlines()[1:]]
    assert any(line.startswith("megatron.tensor_model_parallel_size=2") for line in helps)
    assert any(line.startswith("batching.micro_batch_tokens=2048") for line in helps)
    assert any(line.startswith("megatron.recompute_granularity=full") for line in helps)


@pytest.mark.parametrize("size", ["0", "much", "inf"])
def test_an_invalid_memory_size_is_refused(path, size, capsys):
    with pytest.raises(SystemExit):
        main.main(["plan", str(path), "--gpu-gib", size])
    assert "is not a number of GiB" in capsys.readouterr().err


def test_the_policys_engine_sleeps_while_the_trainer_works_and_the_refiners_does_not(path, monkeypatch):
    monkeypatch.setattr(vllm, "installed", lambda: ("vllm", "0.32.0"))
    s, layout, device = sizes(path), Layout(1, 1, 1, 1, 1, 1), float(1 << 30)
    m = MemoryPlan(load(path), s, layout, device)
    reserve = 5 << 30
    assert m.phases == {"training": m.state.total + m.activations, "generation": m.state.total + m.engine + reserve}
    assert MemoryPlan(load(path, ["rollout.reserve_gib=3"]), s, layout, device).reserve == 3 << 30
    m = MemoryPlan(load(path, REFINER), s, layout, device)
    always = m.state.total + m.awake
    assert m.phases == {"training": always + m.activations, "generation": always + m.engine + reserve}


def test_a_precision_aware_optimizer_stores_fewer_bytes(path):
    s, layout, aware = sizes(path), Layout(1, 1, 1, 1, 1, 1), "optimizer.use_precision_aware_optimizer=true"
    rounded = [f"optimizer.{name}_dtype=bfloat16" for name in ("exp_avg", "exp_avg_sq")]
    found = [state_of(load(path, [aware, *rounded[:n]]), s, layout, 0).optimizer for n in range(3)]
    assert found[0] == state_of(load(path), s, layout, 0).optimizer
    assert [6 * size for size in found] == [found[0] * each for each in (6, 5, 4)]
    given = [aware, "optimizer.optimizer_cpu_offload=true", "optimizer.optimizer_offload_fraction=0.75"]
    for split in ("true", "false"):
        options = [f"optimizer.use_distributed_optimizer={split}"]
        whole, quarter = (state_of(load(path, [*options, *more]), s, layout, 0) for more in ([], given))
        assert (whole.weights, whole.gradients, whole.optimizer) == (
            quarter.weights,
            quarter.gradients,
            4 * quarter.optimizer,
        )


def test_an_engine_takes_less_beside_a_critic(path, monkeypatch):
    monkeypatch.setattr(vllm, "installed", lambda: ("vllm", "0.32.0"))
    recipe = load(path, ["algorithm.name=ppo", "critic.lr=1e-5"])
    assert MemoryPlan(recipe, sizes(path), Layout(1, 1, 1, 1, 1, 1), 100.0 * (1 << 30)).engine == 33 * (1 << 30)


def test_each_rank_copies_its_part_for_a_checkpoint(path):
    """Also without `checkpoint.every`, because the last step saves one."""
    layout = Layout(2, 1, 1, 1, 1, 1)
    recipe = load(path, ["optimizer.use_distributed_optimizer=true", "checkpoint.every=0"])
    planned = MemoryPlan(recipe, sizes(path), layout).checkpoint
    weights = 2 * WHOLE // 2  # of which each rank copies its share
    assert planned == 12 * WHOLE // 2 + weights
    both = load(path, ["optimizer.use_distributed_optimizer=true", "pipo.optimizer_state=own"])
    assert MemoryPlan(both, sizes(path), layout).checkpoint == 2 * 12 * WHOLE // 2 + weights
    told = "\n".join(lines(MemoryPlan(recipe, sizes(path), layout)))
    assert f"memory of the host for a checkpoint: {planned / 2**20:.2f} MiB on each rank" in told


def test_vllms_cache_is_what_its_share_leaves():
    gib = 1 << 30
    assert room_for_cache(0.5, 80 * gib, 16 * gib, 1 * gib) == 22 * gib  # half, less weights and 2 GiB of workspace
    with pytest.raises(ConfigError, match="gpu_memory_utilization: 0.5 of 4.0 GiB, less 0.5 of .* does not hold"):
        room_for_cache(0.5, 4 * gib, gib / 2, gib)


def test_an_engine_has_room_for_the_longest_sequence_of_an_evaluation(path, monkeypatch):
    monkeypatch.setattr(vllm, "installed", lambda: ("vllm", "0.32.0"))
    rooms = []
    monkeypatch.setattr(memory, "room_for_cache", lambda *given: rooms.append(given[-1]))
    tokens, given = 512 + 2048, ["evaluation.max_response_tokens=2048", "vllm.tensor_parallel_size=4"]
    for options in (given, [*given, "vllm.max_model_len=4096"]):
        m = MemoryPlan(load(path, options), sizes(path), Layout(4, 1, 1, 1, 1, 1), float(80 << 30))
        assert m.engines.lengths == [tokens]
        memory.check_fits(m)
    assert rooms == [tokens * 32 / 2, 4096 * 32 / 2]  # one of two heads on each of four workers


def test_a_share_without_room_for_a_sequence_does_not_fit(path, capsys):
    given = ["plan", str(path), "--gpus", "2", "--gpu-gib", "30", "vllm.gpu_memory_utilization=0.05"]
    assert main.main(given) == 2
    assert "does not hold the keys and values of one sequence" in capsys.readouterr().err

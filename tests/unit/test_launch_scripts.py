"""The scripts in launch/ on the login node, with a fake sbatch and python; tests/slurm has real ones."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "options, nodes, gpus",
    [
        (["--nodes=2", "--gpus-per-node=8"], 2, 8),
        (["--nodes", "2", "--gpus-per-node", "h100:4"], 2, 4),
        (["-N2", "--gres=gpu:4"], 2, 4),
        (["-N", "3", "--gres=gpu:h100:2"], 3, 2),
        (["--gpus-per-node=8"], 1, 8),
        (["--gres=gpu:v100x:4,lscratch:400"], 1, 4),
        (["--gres", "lscratch:400,gpu:2"], 1, 2),
    ],
)
def test_the_plan_is_for_as_many_ranks_as_are_asked_for(tmp_path, options, nodes, gpus):
    lines = submit(tmp_path, options)
    asked = f"--gpu-gib 80 --nproc {nodes * gpus} --gpus-per-node {gpus} run.seed=1"
    assert asked in next(line for line in lines if " plan " in line)
    assert lines[-1].startswith(f"sbatch {' '.join(options)} ") and lines[-1].endswith("pipo_8b.sh run.seed=1")


@pytest.mark.parametrize("header, nodes", [("", 1), ("#SBATCH -N 2", 2), ("#SBATCH --exclusive --nodes=3", 3)])
def test_a_script_of_ones_own_need_not_say_its_nodes(tmp_path, header, nodes):
    script = own_script(tmp_path, {" --nodes=1": "", "# GRPO": f"{header}\n# GRPO"})
    lines = submit(tmp_path, ["--gpus-per-node=8"], script=script)
    assert f"--nproc {8 * nodes} --gpus-per-node 8 " in next(line for line in lines if " plan " in line)


def test_each_stage_is_planned_as_the_command_that_runs_it(tmp_path):
    plans = [line for line in submit(tmp_path, ["--gpus-per-node=8"], script="launch/fpa_4b.sh") if " plan " in line]
    assert [plan.partition("qwen3_4b_base/")[2].split(" --gpu-gib")[0] for plan in plans] == [
        "generate.yaml --for generate",
        "fpa.yaml --for train",
    ]
    script = own_script(tmp_path, {"train examples": "trian examples"})
    (line,) = submit(tmp_path, ["--gpus-per-node=8"], script=script, status=2)
    assert line.startswith('error: stages: "trian examples/') and 'is "train RECIPE" or "generate RECIPE"' in line


def test_whole_sections_and_names_in_capitals_are_keys_of_the_recipe(tmp_path):
    keys = ["pipo=null", "lora={rank: 8}", "train:vllm=null", "evaluation.benchmarks.MATH-500.limit=5"]
    lines = submit(tmp_path, ["-G", "8", *keys, "--export", "ALL,A=b", "--comment", "a=b"])
    assert lines[-1] == f"sbatch -G 8 --export ALL,A=b --comment a=b launch/pipo_8b.sh {' '.join(keys)} run.seed=1"


def test_the_plan_knows_the_gpus_memory(tmp_path):
    (plan,) = [line for line in submit(tmp_path, ["--gpus-per-node=8"], LAUNCH_GPU_GIB="141") if " plan " in line]
    assert "--gpu-gib 141 " in plan
    (plan,) = [line for line in submit(tmp_path, [], LAUNCH_NPROC="2") if " plan " in line]
    assert "--gpu-gib" not in plan


def test_a_recipe_that_cannot_be_checked_is_submitted_with_a_word_why(tmp_path):
    setup = "python() { echo 'Traceback'; echo 'ImportError: libfoo.so' >&2; return 1; }"
    lines = submit(tmp_path, ["--gpus-per-node=8"], LAUNCH_SETUP=setup)
    why = "train examples/pipo/qwen3_8b_base/grpo_pipo.yaml, for lack of an environment here (ImportError: libfoo.so)"
    assert lines[0] == f"not checked: {why}" and len(lines) == 2 and lines[1].startswith("sbatch ")


@pytest.mark.parametrize("whose", ["--account=me --time=60", "--account me -t 60", "-Ame -t60"])
def test_the_server_s_nodes_are_asked_for_in_the_same_name(tmp_path, whose):
    lines = submit(tmp_path, ["--gpus-per-node=8", *whose.split()], LAUNCH_SERVER="serve")
    assert f"--gpus-per-node=8 {whose} : {whose} --nodes=1 launch/" in lines[-1]


def test_a_recipe_is_planned_with_vllm_elsewhere(tmp_path):
    """A key for the servers alone is not part of the training's plan."""
    lines = submit(tmp_path, ["--gpus-per-node=8", "serve:vllm.block_size=16"], LAUNCH_SERVER="vllm")
    (plan,) = [line for line in lines if " plan " in line]
    assert plan.endswith("run.seed=1 rollout.placement=server rollout.servers=[http://SERVER_HOST:8000]")
    assert " : --nodes=1 launch/" in lines[-1] and lines[-1].endswith("pipo_8b.sh serve:vllm.block_size=16 run.seed=1")


@pytest.mark.parametrize(
    "limit, signal", [("--time=10", 150), ("-t 10:00", 150), ("-t00:20:00", 300), ("--time 60", None), ("", None)]
)
def test_a_short_limit_brings_its_signal_later(tmp_path, limit, signal):
    last = submit(tmp_path, ["--gpus-per-node=8", *limit.split()])[-1]
    assert last.startswith(f"sbatch --signal=B:USR1@{signal} " if signal else "sbatch --gpus-per-node=8 ")


def test_help_says_what_can_be_given(tmp_path):
    lines = submit(tmp_path, ["--help"])
    assert any("LAUNCH_SETUP    shell code" in line for line in lines) and not lines[-1].startswith(("#", "sbatch"))


@pytest.mark.parametrize(
    "folder, mounts, warned",
    [
        ("/lustre/me/run", "", True),
        ("/lustre/me/run", "/home/me,/lustre/me:/lustre/me:rw", False),
        ("/lustre/me/run", "/lustre/me:/data", True),
        ("/lustre/menu/run", "/lustre/me:/lustre/me", True),
        ("runs/mine", "", False),
        (f"{ROOT}/runs/mine", "", False),
    ],
)
def test_a_run_that_would_be_lost_with_its_container(tmp_path, folder, mounts, warned):
    options = ["--gpus-per-node=8", f"run.output_dir={folder}"]
    lines = submit(tmp_path, options, LAUNCH_IMAGE="image.sqsh", **({"LAUNCH_MOUNTS": mounts} if mounts else {}))
    assert lines[0].startswith(f"warning: {folder} is in none of LAUNCH_MOUNTS") is warned
    assert lines[-1].startswith("sbatch ")


@pytest.mark.parametrize(
    "state, requeued", [("RUNNING", True), ("SIGNALING", True), ("COMPLETING", False), ("CANCELLED", False)]
)
def test_a_job_is_requeued_unless_slurm_has_ended_it(tmp_path, state, requeued):
    """The controller leaves every other request unanswered. Of a heterogeneous job the first part counts."""
    fake = tmp_path / "scontrol"
    fake.write_text(
        f'#!/bin/sh\ncd {tmp_path}; echo "$*" >>asked\n[ -e busy ] && rm busy || {{ touch busy; exit 1; }}\n'
        f"echo 'JobId=7 JobState={state} Restarts=0'; echo 'JobId=8 JobState=RUNNING Restarts=0'\n"
    )
    fake.chmod(0o755)
    code = f"set -uo pipefail; sleep() {{ :; }}; job={tmp_path}; . launch/requeue.sh; requeue_if_due 75; echo ended"
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", "-c", code], cwd=ROOT, env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("ended\n"), done
    told = ["show job -o 7"] * 2 + ["requeue 7"] * 2 * requeued
    assert (tmp_path / "asked").read_text().splitlines() == told


@pytest.mark.parametrize("statuses", [(0, 0), (0, 75), (0,), ()])
def test_a_stage_has_finished_when_all_nodes_say_so(tmp_path, statuses):
    """An srun that is terminated may return 0. The job has then not finished and is requeued."""
    start, finished = tmp_path / "runs/slurm/7/stage_0/start_0", statuses == (0, 0)
    told = [f"echo '{{\"status\": {status}}}' >{start}/node_{node}.json" for node, status in enumerate(statuses)]
    asked = f"echo JobState=RUNNING; echo $1 >>{tmp_path}/asked"
    commands = {"srun": "; ".join([f"mkdir {start}", *told]), "scontrol": asked, "sleep": ":"}
    assert run_job(tmp_path, commands) == (0 if finished else 143)
    assert (start.parent / "finished").exists() is finished
    assert (tmp_path / "asked").exists() is not finished


@pytest.mark.parametrize("state, requeued", [("RUNNING", True), ("CANCELLED", False)])
def test_a_job_is_requeued_while_its_servers_start(tmp_path, state, requeued):
    """The signal of a preemption comes while the script waits for vLLM."""
    commands = {
        "srun": "exec /bin/sleep 600",
        "sleep": 'if [ "$1" = 1 ]; then kill -USR1 $PPID; fi',
        "scontrol": f"echo $1 >>{tmp_path}/asked; [ $1 != hostnames ] && echo JobState={state} || echo node7",
    }
    variables = {"SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_1": "node7", "LAUNCH_SERVER": "vllm"}
    assert run_job(tmp_path, commands, **variables) == 75
    assert (tmp_path / "asked").read_text().split() == ["show", "show", "requeue"][: 2 + requeued]


def run_job(folder: Path, commands: dict[str, str], **variables: str) -> int:
    """The exit status of a script in its job. `commands`: name -> code of the fake ones."""
    for name, code in commands.items():
        (folder / name).write_text(f"#!/bin/sh\n{code}\n")
        (folder / name).chmod(0o755)
    (folder / "launch").symlink_to(ROOT / "launch")
    variables |= {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(folder)}
    variables |= {"LAUNCH_NPROC": "1", "LAUNCH_SETUP": ":", "SLURM_NNODES": "2"}
    script = (ROOT / "launch/pipo_8b.sh").read_text()  # Slurm runs a copy elsewhere
    return subprocess.run(["bash", "-c", script], cwd="/", env=os.environ | variables).returncode


def own_script(folder: Path, changes: dict[str, str]) -> Path:
    """A script of the user's: one of launch/ with other words."""
    script = (ROOT / "launch/pipo_8b.sh").read_text()
    for old, new in changes.items():
        script = script.replace(old, new)
    (folder / "launch").mkdir()
    (folder / "launch/mine.sh").write_text(script)
    (folder / "launch/common.sh").symlink_to(ROOT / "launch/common.sh")
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder / "launch/mine.sh"


def submit(
    tmp_path: Path, options: list[str], script: str | Path = "launch/pipo_8b.sh", status: int = 0, **variables: str
) -> list[str]:
    for name in ("sbatch", "python"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@"\n')
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SBATCH_ACCOUNT": "me",
        "SBATCH_PARTITION": "gpu",
        "LAUNCH_SETUP": ":",
        **variables,
    }
    command = ["bash", script, *options, "run.seed=1"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == status, done.stdout
    return done.stdout.splitlines()

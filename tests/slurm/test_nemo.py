"""launch/nemo.py with real NeMo-Run: on a real Slurm, with and without a container, through ssh, and on this machine.

NeMo-Run has an environment of its own, .venv-nemo (tests/run.sh makes it) or $NEMO_PYTHON; without it this is skipped.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.tiny import metrics
from tests.slurm.cluster import ROOT, SlurmJob, free_ports, tiny_keys

RECIPE = "examples/pipo/qwen3_4b_base/grpo_pipo.yaml"
LAYOUT = {"megatron__tensor_model_parallel_size": 1, "megatron__sequence_parallel": "false"}


@pytest.fixture(scope="module")
def nemo():
    python = Path(os.environ.get("NEMO_PYTHON", ROOT / ".venv-nemo" / "bin" / "python"))
    if not python.exists():
        pytest.skip(f"no NeMo-Run: {python} is not there (pip install -r launch/nemo.lock)")
    return [python, ROOT / "launch" / "nemo.py", RECIPE]


@pytest.fixture
def slurm(tmp_path):
    """The cluster, the user and the Python of every node."""
    found = ["--account", "tests", "--partition", "batch", "--workspace", tmp_path / "shared", "--time", "01:00:00"]
    return [*found, "--setup", f"export PATH={Path(sys.executable).parent}:$PATH"]


@pytest.mark.slow
def test_a_dry_run_prints_the_scripts_and_submits_nothing(cluster, nemo, slurm, tmp_path):
    """With a container, from this login node."""
    before = cluster.jobs
    container = ["--image", "/images/rft.sqsh", "--mounts", "/data:/data"]
    command = [*nemo, *slurm, *container, "--gpus-per-node", 8, "--sweep", "run.seed=1,2", "--dry-run"]
    status, output = cluster.run(*command)
    assert status == 0, output
    flags = f"--container-image/images/rft.sqsh--container-mounts{tmp_path}/shared:{tmp_path}/shared,/data:/data,"
    assert "".join(output.split()).count(flags) == 2, output  # NeMo-Run breaks its long lines
    for line in ("#SBATCH --account=tests", "#SBATCH --gpus-per-node=8", "#SBATCH --signal=B:USR1@600"):
        assert output.count(line) == 2
    for seed in (1, 2):
        keys = f"run.seed={seed} run.output_dir=runs/pipo/qwen3_4b_base/grpo_pipo/seed_{seed}"
        assert f"exec python -m megatron_rft train {RECIPE} --nproc 8 {keys} --job" in output
    assert cluster.jobs <= before


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--account", ""], "no account: --account"),
        (["--partition", ""], "no partition: --partition"),
        (["--workspace", "/proc/me"], "--workspace /proc/me cannot be written"),
        (["--workspace", "here"], "--workspace here: give the whole path"),
        (["--sweep", "run.seed"], "--sweep run.seed: write section.option=A,B,C"),
        (["rum.steps=3"], "grpo_pipo: the command line: rum: "),
    ],
)
@pytest.mark.slow
def test_mistakes_are_answered_before_the_queue(cluster, nemo, slurm, arguments, words):
    before = cluster.jobs
    status, output = cluster.run(*nemo, *slurm, "--nproc", 8, *arguments)
    assert status == 2 and output.startswith(f"error: {words}") and len(output.splitlines()) == 1, output
    assert cluster.jobs <= before


@pytest.mark.slow
def test_an_unknown_recipe(cluster, nemo):
    status, output = cluster.run(*nemo[:2], "examples/nothing.yaml", "--local")
    assert (status, output) == (2, "error: there is no recipe examples/nothing.yaml\n")


@pytest.mark.slow
def test_two_nodes_without_a_container_told_to_stop_on_the_way(cluster, nemo, slurm, tmp_path):
    """The script that NeMo-Run generates requeues the job like those in launch/."""
    keys = tiny_keys(tmp_path, run__steps=60, checkpoint__every=10, run__output_dir=tmp_path / "run", **LAYOUT)
    before = cluster.jobs
    process = cluster.start(*nemo, *slurm, "--nodes", 2, "--nproc", 1, *keys)
    try:
        job = submitted(cluster, before, tmp_path / "shared")
        log = tmp_path / "run/metrics.jsonl"
        job.wait_for(lambda: log.exists() and log.read_text().count("\n") >= 2, "step 2")
        job.pause()
        job.set_time_left(9)
        job.wait_for(lambda: job.told_to_stop(0), "word of the time limit")
        job.set_time_left(60)  # before the next start, which would be told to stop as well
        job.go_on()
        job.wait_for(lambda: job.shown("Restarts") == "1", "requeue")
        assert job.wait() == "COMPLETED"
        output, _ = process.communicate(timeout=900)
    finally:
        process.kill()
    assert process.returncode == 0 and "grpo_pipo: SUCCEEDED" in output, output[-3000:]
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 61))
    assert len(list(job.folder.glob("start_*"))) == 2


@pytest.mark.slow
def test_the_runs_of_a_papers_figure(cluster, nemo, slurm, tmp_path):
    keys = [key for key in tiny_keys(tmp_path, run__steps=2, **LAYOUT) if not key.startswith("run.output_dir=")]
    command = [nemo[0], ROOT / "examples/papers.py", "pipo", "figure3b", *keys, "--stage", "train"]
    status, output = cluster.run(*command, "--runs", tmp_path / "runs", "--submit", *slurm, "--nproc", 1)
    assert status == 0 and output.count(": SUCCEEDED; its log") == 2, output[-3000:]
    found = [path.parent.name for path in (tmp_path / "runs/pipo/qwen3_4b_base/seed_42").glob("*/export")]
    assert sorted(found) == ["grpo", "grpo_pipo"]


def submitted(cluster, before: set[int], workspace: Path) -> SlurmJob:
    """The one new job. NeMo-Run's imports take 5 to 15 seconds before it submits."""
    deadline = time.monotonic() + 900
    while time.monotonic() < deadline:
        for number in cluster.jobs - before:
            return SlurmJob(cluster, number, workspace / "slurm" / str(number))
        time.sleep(0.2)
    raise AssertionError("no job was submitted")


def test_on_this_machine(cluster, nemo, tmp_path):
    keys = tiny_keys(tmp_path, run__steps=2, **LAYOUT)
    setup = f"export PATH={Path(sys.executable).parent}:$PATH"
    command = [*nemo, "--local", "--nproc", 1, "--setup", setup, *keys]
    status, output = cluster.run(*command, NEMORUN_HOME=str(tmp_path / "nemo"))
    assert status == 0 and "grpo_pipo: SUCCEEDED" in output, output[-3000:]
    assert (tmp_path / "run/export/model.safetensors").exists()
    status, output = cluster.run(*command[:-1], "--setup", "exit 5", NEMORUN_HOME=str(tmp_path / "nemo"))
    assert status == 1 and "grpo_pipo: FAILED" in output


@pytest.fixture(scope="module")
def ssh(cluster, tmp_path_factory):
    """A login node behind ssh: an sshd with its own keys, whose sessions find Slurm. Returns the command-line
    arguments, and the variables of a laptop that has no Slurm and knows the host."""
    missing = [name for name in ("sshd", "ssh", "ssh-keygen", "rsync") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)} here: tools/one_machine_slurm/install.sh installs them (Debian, Ubuntu)")
    folder, port = tmp_path_factory.mktemp("ssh"), free_ports(1)
    for name in ("host", "user", "stranger"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd wants it, and Debian makes it when a system starts
    sessions = f"SetEnv SLURM_CONF={cluster.folder}/slurm.conf PATH={cluster.folder}/bin:/usr/bin:/bin"
    own = f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\nPidFile {folder}/pid\nStrictModes no\n"
    own += "PermitRootLogin yes\nPasswordAuthentication no\nUsePAM no\n"
    (folder / "config").write_text(f"ListenAddress 127.0.0.1:{port}\n{own}{sessions}\n")
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {(folder / 'host.pub').read_text()}")
    client = folder / "bin" / "ssh"  # NeMo-Run's rsync calls `ssh`, whose files are not to be found by HOME
    client.parent.mkdir()
    client.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -o UserKnownHostsFile={folder}/known_hosts "$@"\n')
    client.chmod(0o755)
    daemon = subprocess.Popen([shutil.which("sshd"), "-D", "-f", folder / "config", "-E", folder / "log"])
    try:
        told = log_in(client, port, folder / "user")
        if told is not None:
            pytest.skip(f"nobody can log in at an sshd of this machine: {told} {(folder / 'log').read_text()[-500:]}")
        path = f"{client.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        home = {"NEMORUN_HOME": str(folder / "nemo"), "SLURM_CONF": "", "PATH": path}
        yield ["--host", f"root@127.0.0.1:{port}", "--identity", folder / "user"], home
    finally:
        daemon.terminate()
        daemon.wait(timeout=300)


def log_in(client: Path, port: int, key: Path) -> str | None:
    """Wait until the daemon listens. Returns None if a login works, else ssh's message: a locked root account accepts
    no key."""
    command = [client, "-o", "BatchMode=yes", "-p", str(port), "-i", key, "root@127.0.0.1", "true"]
    for _ in range(300):
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
        if "refused" not in done.stderr:
            break
        time.sleep(0.2)
    return done.stderr if done.returncode else None


@pytest.mark.slow
class TestThroughSsh:
    def test_a_sweep_in_containers_of_which_one_job_fails(self, cluster, nemo, slurm, ssh, tmp_path):
        """The code is copied to the cluster, the jobs are submitted and watched from here, and their exit status is
        returned. In their containers both jobs see the workspace and write their runs there."""
        image = tmp_path / "image.sqsh"
        image.touch()
        setup = slurm[-1] + "\ncase $SLURM_JOB_NAME in *seed_2*) exit 7 ;; esac"
        keys = [key for key in tiny_keys(tmp_path, run__steps=2, **LAYOUT) if not key.startswith("run.output_dir")]
        command = [*nemo, *slurm[:-1], setup, *ssh[0], "--nproc", 1, "--image", image, "--sweep", "run.seed=1,2", *keys]
        status, output = cluster.run(*command, **ssh[1])
        assert status == 1, output[-3000:]
        assert "grpo_pipo-seed_1: SUCCEEDED" in output and "grpo_pipo-seed_2: FAILED" in output
        assert "1 of 2 jobs did not succeed: grpo_pipo-seed_2" in output
        assert f"its log is in {tmp_path}/shared/nemo/" in output
        runs = tmp_path / "shared/runs/pipo/qwen3_4b_base/grpo_pipo"
        assert (runs / "seed_1/export/model.safetensors").exists() and not (runs / "seed_2").exists()

    def test_a_dry_run(self, cluster, nemo, slurm, ssh):
        before = cluster.jobs
        status, output = cluster.run(*nemo, *slurm, *ssh[0], "--gpus-per-node", 8, "--dry-run", **ssh[1])
        assert status == 0 and "#SBATCH --gpus-per-node=8" in output, output
        assert cluster.jobs <= before

    @pytest.mark.parametrize(
        "arguments, words",
        [
            (["--host", "root@127.0.0.1:1"], "--host: ssh: connect to host 127.0.0.1 port 1: Connection refused"),
            (["--host", "root@no.such.host"], "--host: ssh: Could not resolve hostname no.such.host"),
            (["--identity", "stranger"], "--host: root@127.0.0.1: Permission denied (publickey"),
            (["--workspace", "/proc/me"], "--workspace /proc/me cannot be written on 127.0.0.1"),
            (["rum.steps=3"], "grpo_pipo: the command line: rum: "),
            (["megatron.tensor_model_parallel_size=3"], "grpo_pipo: megatron: 8 ranks are not a multiple of TP 3"),
        ],
    )
    def test_mistakes_are_answered_before_the_queue(self, cluster, nemo, slurm, ssh, arguments, words):
        if arguments[0] == "--identity":
            arguments = ["--identity", ssh[0][-1].with_name("stranger")]
        status, output = cluster.run(*nemo, *slurm, *ssh[0], "--nproc", 8, *arguments, **ssh[1])
        assert status == 2 and output.startswith(f"error: {words}") and output.count("error") == 1, output

"""The command line: messages, exit statuses, signals, and ranks that die."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors import SafetensorError

from megatron_rft.commands import doctor, main, train
from megatron_rft.config import dump, load, vllm
from megatron_rft.launching import ranks
from megatron_rft.rewards.sandbox import launch
from megatron_rft.tracking import loggers
from megatron_rft.utils.errors import ConfigError, DataError, RunFailed
from tests.shapes import json_of

PRELUDE = """
import os, signal, sys, time
from megatron_rft.launching import ranks
ranks.die_with_launcher()
rank, out = int(os.environ["RANK"]), sys.argv[1]
def stop(*_):
    ranks.write_exit(out, 75)
    os._exit(75)
signal.signal(signal.SIGTERM, stop); signal.signal(signal.SIGUSR1, stop)
open(f"{out}/pid_{rank}", "w").write(str(os.getpid()))
"""
LAUNCHER = "import sys; from megatron_rft.launching.ranks import launch; sys.exit(launch(sys.argv[2:], 2, sys.argv[1]))"


@pytest.fixture(autouse=True)
def no_rank(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", ranks.PARENT):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def recipe(tmp_path):
    config = json_of(2, 64, 4, 4, 128, 64, head_dim=16, max_position_embeddings=2048)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    path = tmp_path / "recipe.yaml"
    model = f"model: {{path: {tmp_path}/model, initialise: random}}"
    path.write_text(
        f"run: {{output_dir: {tmp_path}/out, steps: 2}}\n{model}\n"
        "data: {train: examples/quickstart/arithmetic.py:rows}\n"
    )
    return path


def rank_command(code: str, out: Path) -> list[str]:
    return [sys.executable, "-c", PRELUDE + code, str(out)]


def start_launcher(code: str, out: Path) -> subprocess.Popen:
    """A launcher of two ranks in its own process; returns once both ranks have written their pids."""
    process = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(out), *rank_command(code, out)])
    wait_until(lambda: all((out / f"pid_{rank}").exists() and (out / f"pid_{rank}").read_text() for rank in (0, 1)))
    return process


def wait_until(condition, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:  # gone, maybe while it was read
        return False


class TestWords:
    def test_plan_prints_the_arithmetic(self, recipe, capsys):
        assert main.main(["plan", str(recipe), "--nproc", "2", "rollout.group_size=4"]) == 0
        assert "global batch: 128 responses = 32 prompts x 4" in capsys.readouterr().out

    def test_a_plan_is_not_for_the_step_of_slurm_that_it_is_made_in(self, recipe, monkeypatch, capsys):
        step = {"STEP_ID": "0", "PROCID": "0", "STEP_TASKS_PER_NODE": "1", "GPUS_ON_NODE": "1"}
        for name, value in step.items():
            monkeypatch.setenv(f"SLURM_{name}", value)
        assert main.main(["plan", str(recipe), "--nproc", "8"]) == 0
        assert "DP 8 = 8 ranks" in capsys.readouterr().out
        assert main.main(["train", str(recipe), "--nproc", "8"]) == 2
        assert "--nproc 8: node None has 1 GPUs in this job" in capsys.readouterr().err

    def test_a_plan_for_the_other_command_is_refused(self, recipe, capsys):
        assert main.main(["plan", str(recipe), "--for", "train"]) == 0
        assert main.main(["plan", str(recipe), "--for", "generate"]) == 2
        assert "a recipe of trainer rl: run it with `megatron-rft train`" in capsys.readouterr().err

    def test_a_plan_knows_the_nodes(self, recipe, capsys, monkeypatch):
        monkeypatch.setattr(vllm, "installed", lambda: None)
        command = ["plan", str(recipe), "--gpus", "4", "vllm.tensor_parallel_size=4", "--engine", "vllm"]
        assert main.main(command) == main.main([*command, "--gpus-per-node", "8"]) == 0
        assert main.main([*command, "--gpus-per-node", "2"]) == 2
        assert "some of them would lie on two nodes" in capsys.readouterr().err

    def test_a_folder_with_another_run_is_refused_before_any_rank_starts(self, recipe, monkeypatch, capsys):
        (out := recipe.parent / "out").mkdir()
        (out / "recipe.yaml").write_text(dump(load(recipe)))
        (out / "metrics.jsonl").write_text("{}\n")
        monkeypatch.setattr(ranks, "launch", lambda *_: 0)
        assert main.main(["train", str(recipe), "--nproc", "2", "run.steps=9"]) == 0, "it goes on"
        for command in (["train", "--dry-run"], ["train", "--nproc", "2"], ["plan"]):
            assert main.main([*command, str(recipe), "optimizer.lr=0.5"]) == (0 if command == ["plan"] else 2)
            said = capsys.readouterr().err
            assert "holds another run; this one differs in optimizer.lr: 1e-06 there, 0.5 now" in said
            assert said.startswith("warning: " if command == ["plan"] else "error: ")

    def test_dry_run_writes_nothing(self, recipe):
        assert main.main(["train", str(recipe), "--dry-run"]) == 0
        assert not (recipe.parent / "out").exists()

    def test_engine_is_an_override(self, recipe, capsys, monkeypatch):
        monkeypatch.setattr(vllm, "installed", lambda: None)
        assert main.main(["plan", str(recipe), "--engine", "vllm"]) == 0, "a plan needs no engine"
        assert "engine: vllm" in capsys.readouterr().out
        assert main.main(["train", str(recipe), "--engine", "vllm"]) == 2
        assert "rollout.engine: vLLM is not installed" in capsys.readouterr().err

    def test_user_errors_are_one_line_without_traceback(self, recipe):
        command = [sys.executable, "-m", "megatron_rft", "train", str(recipe), "rolout.x=1"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: the command line: rolout: ") and len(done.stderr.splitlines()) == 1

    @pytest.mark.parametrize("command", ["plan RECIPE", "convert SOURCE OUT"])
    def test_a_package_that_is_missing_is_named(self, recipe, tmp_path, command):
        arguments = command.replace("RECIPE", str(recipe)).replace("SOURCE", str(tmp_path / "model")).split()
        code = (
            "import sys; sys.modules['megatron'] = None; from megatron_rft.commands.main import main; sys.exit(main())"
        )
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: megatron-core is not installed: pip install megatron-core")
        assert len(done.stderr.splitlines()) == 1

    @pytest.mark.parametrize(
        "arguments", [["train"], ["train", "r.yaml", "--nproc", "0"], ["plan", "r.yaml", "--nproq", "2"]]
    )
    def test_wrong_arguments(self, arguments):
        with pytest.raises(SystemExit) as caught:
            main.main(arguments)
        assert caught.value.code == 2

    @pytest.mark.parametrize(
        "given, gpus, local, seen",
        [(None, 8, 3, "3"), ("4,5", 8, 1, "5"), ("GPU-a", 8, 5, "GPU-a"), (None, 2, 3, "1"), (None, 0, 1, None)],
    )
    def test_a_worker_sees_one_gpu(self, tmp_path, monkeypatch, given, gpus, local, seen):
        for number in range(gpus):
            (tmp_path / str(number)).mkdir()
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given or "")
        if given is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        monkeypatch.setenv("LOCAL_RANK", str(local))
        ranks.use_one_gpu(tmp_path)
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == seen

    def test_a_full_disk(self, capsys, monkeypatch):
        """/dev/full stands for a full disk, for every command."""
        monkeypatch.setattr(doctor, "run", lambda _args: Path("/dev/full").write_text("x" * 10))
        assert main.main(["doctor"]) == 3
        assert capsys.readouterr().err.startswith("error: the disk is full. Free some space")

    def test_ctrl_c_while_the_command_line_is_imported(self, tmp_path):
        (tmp_path / "pydantic.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
        path = f"{tmp_path}:{Path(main.__file__).parents[2]}"
        command, environment = [sys.executable, "-m", "megatron_rft", "doctor"], os.environ | {"PYTHONPATH": path}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert (done.returncode, done.stderr) == (130, "interrupted\n")

    def test_report_wants_a_run(self, tmp_path, capsys):
        assert main.main(["report", str(tmp_path)]) == 2
        assert "no metrics.jsonl" in capsys.readouterr().err

    def test_doctor_names_versions_and_what_is_used(self, capsys):
        assert main.main(["doctor"]) == 0
        told = capsys.readouterr().out
        assert "megatron-core" in told and "a run here uses" in told

    def test_doctor_says_what_is_in_the_way_and_the_fix(self, capsys, monkeypatch, tmp_path):
        import torch

        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.version, "cuda", None)
        assert "tools/setup_env.sh gpu" in doctor.cuda_problem()
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setenv("PATH", str(tmp_path))
        assert "no NVIDIA driver" in doctor.cuda_problem()
        monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
        assert "--no-build-isolation transformer-engine-torch==" in doctor.transformer_engine_problem(cuda=True)
        assert set(doctor.checks(False)) == {
            "CUDA",
            "Transformer Engine",
            "vLLM",
            "sandbox",
        }

    def test_doctor_imports_transformer_engine(self, tmp_path, monkeypatch):
        """Only its core package is found, and importing it fails."""
        from megatron_rft.commands import doctor

        for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
            monkeypatch.delitem(sys.modules, name)
        (tmp_path / "transformer_engine").mkdir()
        (tmp_path / "transformer_engine" / "__init__.py").touch()
        (tmp_path / "transformer_engine" / "pytorch.py").write_text("raise RuntimeError('no extension for torch')\n")
        monkeypatch.syspath_prepend(tmp_path)
        told = doctor.transformer_engine_problem(cuda=True)
        sys.modules.pop("transformer_engine")  # the one of this test, which later tests would find
        assert told.startswith("installed, but cannot be imported (no extension for torch): ")
        assert "--no-build-isolation" in told


def test_evaluate_measures_a_folder(tmp_path, capsys):
    from transformers import AutoConfig, AutoModelForCausalLM

    from examples.quickstart.arithmetic import write_model_folder

    model = write_model_folder(tmp_path / "model", num_hidden_layers=1)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"run: {{output_dir: {tmp_path}/run, steps: 1}}\nmodel: {{path: nowhere}}\n"
        "data:\n  train: examples/quickstart/arithmetic.py:rows\n  test: examples/quickstart/arithmetic.py:rows\n"
        "  max_prompt_tokens: 64\n"
        "rollout: {engine: hf, max_response_tokens: 8}\nevaluation: {limit: 3, samples: 2}\n"
    )
    assert main.main(["evaluate", str(path), "--model", str(model)]) == 0
    assert "| test | 3 | 2 |" in capsys.readouterr().out
    lines = (tmp_path / "run" / "evaluation" / "model" / "test.jsonl").read_text().splitlines()
    assert len(lines) == 6 and len(json.loads(lines[0])["text"]) > 0
    refused = ["--out", "/proc/out"]  # which access(2) calls writable
    assert main.main(["evaluate", str(path), "--model", str(model), *refused]) == 2
    assert "error: out: /proc/out cannot be made" in capsys.readouterr().err


SWALLOWED = """
import os, signal, sys, time
from megatron_rft.commands import train
number = int(sys.argv[1])
signal.signal(number, train.stop_at_once)
try:
    os.kill(os.getpid(), number)
except BaseException:
    time.sleep(600)
"""


class TestOneProcess:
    @pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGUSR1, 75)])
    def test_a_signal_counts_where_an_import_swallows_it(self, number, status):
        assert subprocess.run([sys.executable, "-c", SWALLOWED, str(int(number))], timeout=500).returncode == status

    @pytest.mark.parametrize(
        "error, status",
        [
            (None, 0),
            (DataError("no field"), 2),
            (RunFailed("NaN"), 3),
            (ZeroDivisionError("x"), 3),
            (OSError(errno.EROFS, "Read-only file system", "run/metrics.jsonl"), 3),
            (SafetensorError("Error while serializing: I/O error: Read-only file system (os error 30)"), 3),
        ],
    )
    def test_the_exit_status_and_message_are_written(self, tmp_path, monkeypatch, capsys, error, status):
        monkeypatch.setattr(signal, "signal", lambda *_: None)

        def run():
            if error:
                raise error
            return 0

        assert train.work(str(tmp_path), run) == status
        words = json.loads((tmp_path / "launch" / "rank_0.json").read_text())
        assert words["status"] == status
        assert ("Traceback" in capsys.readouterr().err) == isinstance(error, ZeroDivisionError)
        if isinstance(error, OSError | SafetensorError):
            where = " where run/metrics.jsonl is" if isinstance(error, OSError) else ""
            assert words["message"].startswith(f"Read-only file system: the disk{where} refuses writes")


@pytest.fixture
def patient(monkeypatch):
    """A limit for ranks that all end by themselves, however slowly they start."""
    monkeypatch.setattr(ranks, "EXIT_TIMEOUT_S", 300)


class TestRanks:
    def test_all_finish(self, tmp_path):
        assert ranks.launch(rank_command("assert os.environ['WORLD_SIZE'] == '3'", tmp_path), 3, str(tmp_path)) == 0

    def test_ranks_have_one_thread_by_default(self, tmp_path, monkeypatch):
        code = "sys.exit(os.environ.get('OMP_NUM_THREADS') != wanted)"
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        assert ranks.launch(rank_command(f"wanted = '1'; {code}", tmp_path), 2, str(tmp_path)) == 0
        monkeypatch.setenv("OMP_NUM_THREADS", "5")
        assert ranks.launch(rank_command(f"wanted = '5'; {code}", tmp_path), 2, str(tmp_path)) == 0

    def test_ranks_with_gpus_share_the_processors(self, tmp_path, monkeypatch):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setattr(ranks, "has_cuda_device", lambda: True)
        code = "sys.exit(os.environ.get('OMP_NUM_THREADS') != wanted)"
        for processors, wanted in ((6, 3), (64, 8), (1, 1)):
            monkeypatch.setattr(ranks.os, "sched_getaffinity", lambda pid, n=processors: set(range(n)))
            assert ranks.launch(rank_command(f"wanted = '{wanted}'; {code}", tmp_path), 2, str(tmp_path)) == 0

    def test_the_killed_rank_is_named_and_the_others_end(self, tmp_path, capsys, monkeypatch):
        monkeypatch.setattr(ranks, "EXIT_TIMEOUT_S", 0.5)
        code = "pids = [f'{out}/pid_{r}' for r in range(3)]\n"
        code += "while not all(os.path.exists(p) and os.path.getsize(p) for p in pids): time.sleep(0.01)\n"
        code += "os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(600)"
        assert ranks.launch(rank_command(code, tmp_path), 3, str(tmp_path)) == ranks.FAILED
        told = capsys.readouterr().err
        assert "\nerror: rank 1 was killed by SIGKILL; the other ranks were stopped." in "\n" + told
        assert not any(running(int((tmp_path / f"pid_{rank}").read_text())) for rank in range(3))

    def test_a_peers_abort_does_not_hide_the_cause(self, tmp_path, capsys, patient):
        code = "os.kill(os.getpid(), signal.SIGKILL if rank == 1 else signal.SIGABRT)"
        assert ranks.launch(rank_command(code, tmp_path), 2, str(tmp_path)) == ranks.FAILED
        assert capsys.readouterr().err.startswith("error: rank 1 was killed by SIGKILL;")

    def test_a_mistake_of_the_users_is_said_once(self, tmp_path, capsys, patient):
        code = "ranks.write_exit(out, 2, 'no such field'); sys.exit(2)"
        assert ranks.launch(rank_command(code, tmp_path), 2, str(tmp_path)) == ranks.USER_ERROR
        assert capsys.readouterr().err == "error: no such field\n"

    def test_the_first_failure_is_named(self, tmp_path, capsys, patient):
        code = "while rank == 0 and not os.path.exists(f'{out}/launch/rank_1.json'): time.sleep(0.01)\n"
        code += "ranks.write_exit(out, 3, f'I am {rank}'); sys.exit(3)"
        assert ranks.launch(rank_command(code, tmp_path), 2, str(tmp_path)) == ranks.FAILED
        assert capsys.readouterr().err == "error: rank 1 failed: I am 1\n"

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
    def test_signals_reach_the_ranks_and_the_status_says_stopped(self, tmp_path, number):
        process = start_launcher("time.sleep(600)", tmp_path)
        process.send_signal(number)
        assert process.wait(timeout=300) == ranks.STOPPED

    def test_a_signal_between_two_starts_reaches_those_that_start_later(self, tmp_path, monkeypatch):
        """Otherwise they would wait for ranks that have stopped."""
        start = ranks._start

        def start_and_signal(command, environment, rank, local):
            process = start(command, environment, rank, local)
            if rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            return process

        monkeypatch.setattr(ranks, "_start", start_and_signal)
        assert ranks.launch(rank_command("time.sleep(600)", tmp_path), 3, str(tmp_path)) == ranks.STOPPED

    def test_no_rank_outlives_the_launcher(self, tmp_path):
        process = start_launcher("time.sleep(600)", tmp_path)
        process.kill()
        process.wait()
        wait_until(lambda: not any(running(int((tmp_path / f"pid_{rank}").read_text())) for rank in (0, 1)))

    def test_under_another_launcher_nproc_must_agree(self, monkeypatch):
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "4")
        assert ranks.check_environment(None)[0] == ranks.check_environment(4)[0] == 4
        with pytest.raises(ConfigError, match="a launcher has started 4 ranks"):
            ranks.check_environment(2)


@pytest.mark.parametrize("options", [["--nproc", "1"], ["faults.hang_s=60"]])
def test_one_rank_is_watched_where_the_user_asks_for_it(recipe, monkeypatch, options):
    seen = []
    monkeypatch.setattr(ranks, "launch", lambda command, nproc, *_: seen.append(nproc) or 0)
    assert main.main(["train", str(recipe), *options]) == 0 and seen == [1]


def test_a_machine_without_containers_is_found_before_ranks_start(recipe, monkeypatch, capsys):
    """A plan, and a dry run, may be made on another machine."""
    monkeypatch.setattr(launch, "command", lambda *_: [sys.executable, "-c", "raise SystemExit('not allowed')"])
    monkeypatch.setattr(ranks, "launch", lambda *_: 0)
    for keys in (["reward.kind=code"], ["environment.kind=python", "data.chat=true"]):
        assert main.main(["plan", str(recipe), *keys]) == main.main(["train", str(recipe), *keys, "--dry-run"]) == 0
        assert main.main(["train", str(recipe), *keys, "--nproc", "2"]) == 2
        assert "no container for untrusted programs works here (not allowed)" in capsys.readouterr().err


def test_wandb_without_a_key_is_refused_before_ranks_start(recipe, tmp_path, monkeypatch, capsys):
    """Whatever else keeps the check from an answer passes, and so does a terminal, where wandb asks for a key."""
    pytest.importorskip("wandb", reason="the wandb extra is not installed")
    for name in [name for name in os.environ if name.startswith(("WANDB_", "NETRC"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_BASE_URL", "http://wandb.test:1")
    monkeypatch.setattr(ranks, "launch", lambda *_: 0)
    monkeypatch.setattr(loggers.os, "isatty", lambda _: False)
    command = [str(recipe), "--nproc", "2", "tracking.wandb={}"]
    assert main.main(["plan", *command]) == 0
    assert main.main(["train", *command]) == 2 and "wandb has no key here. Run `wandb login`" in capsys.readouterr().err
    (tmp_path / ".netrc").write_text(f"machine wandb.test:1 login user password {'0' * 40}\n")
    assert main.main(["train", *command]) == 0
    (tmp_path / ".netrc").unlink()
    monkeypatch.setattr(loggers, "LOG_IN", "raise TypeError('login() got an unexpected argument')")
    assert main.main(["train", *command]) == 0


def test_nobody_watches_ranks_that_torchrun_started(recipe, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    assert main.main(["train", str(recipe), "faults.hang_s=60"]) == 2
    assert "faults.hang_s: RANK is set, so no launcher of ours watches the ranks" in capsys.readouterr().err


def test_ranks_are_started_with_the_same_recipe(recipe, monkeypatch):
    seen = {}
    monkeypatch.setattr(ranks, "launch", lambda command, nproc, *_: seen.update(command=command, nproc=nproc) or 0)
    assert main.main(["train", str(recipe), "run.seed=3", "--nproc", "2", "--engine", "hf"]) == 0
    assert seen["command"][1:] == ["-m", "megatron_rft", "train", str(recipe), "run.seed=3", "rollout.engine=hf"]
    assert seen["nproc"] == 2 and "RANK" not in os.environ


def test_a_function_of_the_package_shows_no_warning_that_users_cannot_fix():
    """It runs a command in the user's process, which `main` has not prepared."""
    code = "from megatron_rft.commands import convert; import megatron.core.optimizer; assert convert"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "Apex" not in done.stderr, done.stderr

import http.server
import json
import os
import subprocess
import sys
import threading
from contextlib import closing

import pytest
import torch

from megatron_rft.config.sections import Tracking, Wandb
from megatron_rft.tracking import loggers
from megatron_rft.tracking.metrics import read_metrics
from megatron_rft.tracking.tracker import Tracker

PLAIN = Tracking(progress="plain")


def test_the_main_rank_writes_and_prints(tmp_path, capsys):
    with closing(Tracker(tmp_path, PLAIN, total_steps=2)) as tracker:
        tracker.log(1, {"reward/mean": torch.tensor(0.5), "tokens/generated": 64})
        tracker.sync()
        tracker.note("half way")
    tracker.close()
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (record["step"], record["reward/mean"], record["tokens/generated"]) == (1, 0.5, 64)
    assert capsys.readouterr().out == "step 1/2  reward 0.500\nhalf way\n"


def test_other_ranks_are_silent(tmp_path, capsys):
    with closing(Tracker(tmp_path, PLAIN, total_steps=2, is_main=False)) as tracker:
        tracker.log(1, {"reward/mean": 0.5})
        tracker.note("unseen")
        tracker.sync()
    assert capsys.readouterr().out == "" and list(tmp_path.iterdir()) == []


def test_a_resume_does_steps_again(tmp_path):
    quiet = Tracking(progress="none")
    for first, last in ((0, 5), (3, 7)):
        with closing(Tracker(tmp_path, quiet, 7, resume_step=first)) as tracker:
            for step in range(first, last):
                tracker.log(step, {"begun at": first})
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(7))
    assert [record["begun at"] for record in records] == [0, 0, 0, 3, 3, 3, 3]


def test_wandb_offline_goes_on_in_the_same_run(tmp_path):
    pytest.importorskip("wandb", reason="the wandb extra is not installed")
    config = Tracking(progress="none", wandb=Wandb(project="test", mode="offline"))
    for first in (1, 2):
        with closing(Tracker(tmp_path, config, 3, resume_step=first, resolved={"run": {"seed": 3}})) as tracker:
            tracker.log(first, {"reward/mean": 0.5})
    run_id = (tmp_path / "wandb_id").read_text()
    folders = [folder for folder in (tmp_path / "wandb").glob("offline-run-*") if folder.is_dir()]
    # offline-run-<second>-<id>: of two in one second, one has another number
    assert len(run_id) > 4 and len(folders) == 2 and all(f"-{run_id}" in folder.name for folder in folders)


LOSES_WANDB = """
import os, signal, sys, time
from contextlib import closing
from pathlib import Path
from megatron_rft.config.sections import Tracking, Wandb
from megatron_rft.tracking.tracker import Tracker
from megatron_rft.utils.end_with_parent import children
from megatron_rft.utils.processes import process_state

config = Tracking(progress="plain", wandb=Wandb(project="test", mode="offline"))
with closing(Tracker(Path("."), config, 9)) as tracker:
    tracker.log(1, {"reward/mean": 0.5})
    services = children(os.getpid())
    for pid in services:
        os.kill(pid, signal.SIGTERM)
    while any(process_state(pid) not in ("", "Z") for pid in services):
        time.sleep(0.02)
    for step in range(2, 10):
        tracker.log(step, {"reward/mean": 0.5})
        time.sleep(0.1)
print("services", len(services))
sys.exit(75)
"""


def test_a_run_goes_on_without_wandb_when_its_service_is_lost(tmp_path):
    """Slurm's signals reach it: unlike other helpers it unblocks them."""
    pytest.importorskip("wandb", reason="the wandb extra is not installed")
    environment = {key: value for key, value in os.environ.items() if key != "WANDB_SERVICE"}  # that of other tests
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", LOSES_WANDB]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 75 and "services 1" in done.stdout, done.stdout + done.stderr[-3000:]
    assert done.stdout.count("Wandb gets no more steps of this run, because it failed (") == 1
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, 10))


@pytest.mark.parametrize("answer", ["none", "nonsense"])
def test_wandb_without_network_is_logged_offline(tmp_path, capsys, monkeypatch, answer):
    """If nobody listens, or something other than wandb answers."""
    pytest.importorskip("wandb", reason="the wandb extra is not installed").teardown()  # of what other tests have set
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr(loggers, "INIT_TIMEOUT", 3.0)
    config = Tracking(progress="none", wandb=Wandb(project="test"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as server:
        if answer == "nonsense":
            threading.Thread(target=server.serve_forever, daemon=True).start()
        else:
            server.server_close()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
        with closing(Tracker(tmp_path, config, 3)) as tracker:
            tracker.log(1, {"reward/mean": 0.5})
        if answer == "nonsense":
            server.shutdown()
    said, (folder,) = capsys.readouterr().out, (tmp_path / "wandb").glob("offline-run-*-*")
    assert "wandb cannot be reached (" in said and f"send it later: wandb sync {folder}\n" in said
    assert folder.name.endswith((tmp_path / "wandb_id").read_text())
    assert list(folder.glob("run-*.wandb"))[0].stat().st_size > 0

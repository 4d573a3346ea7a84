"""The file for Prometheus: names, labels, numbers that are not finite; and the dashboard that reads it."""

import json
import math
import re
from contextlib import closing
from pathlib import Path

import pytest

from megatron_rft.config.sections import Tracking
from megatron_rft.tracking.loggers import metric_name
from megatron_rft.tracking.tracker import Tracker
from megatron_rft.utils.errors import DataError

ROOT = Path(__file__).resolve().parents[3]


def test_a_step_by_its_lines(tmp_path):
    config = Tracking(progress="none", prometheus=str(tmp_path))
    with closing(Tracker(tmp_path / "out", config, total_steps=2, name='a "b"/1')) as tracker:
        tracker.log(1, {"reward/mean": 0.25, "only/once": 1.0})
        tracker.log(2, {"reward/mean": 0.5, "evaluation/pass@1": math.nan, "policy/loss": -math.inf})
    (file,) = tmp_path.glob("*.prom")
    assert file.name == "megatron_rft_a__b__1.prom" and file.stat().st_mode & 0o777 == 0o644
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    found = dict(re.fullmatch(r'(\w+)\{run="a \\"b\\"/1"\} (\S+)', line).groups() for line in lines)
    assert float(found.pop("megatron_rft_last_step_timestamp_seconds")) > 1.7e9
    assert found == {
        "megatron_rft_reward_mean": "0.5",
        "megatron_rft_evaluation_pass_at_1": "NaN",
        "megatron_rft_policy_loss": "-Inf",
        "megatron_rft_step": "2.0",
    }


def test_a_folder_that_is_none(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="tracking.prometheus: .*/file is no folder to write to"):
        Tracker(tmp_path, Tracking(progress="none", prometheus=str(tmp_path / "file")), total_steps=1)


def test_the_dashboard_reads_documented_metrics():
    documented = set(re.findall(r"^\| `([\w/@]+)`", (ROOT / "docs/metrics.md").read_text(), re.M))
    known = {metric_name(name) for name in (*documented, "step", "last_step_timestamp_seconds")}
    dashboard = json.loads((ROOT / "launch/grafana.json").read_text())
    used = {
        name
        for panel in dashboard["panels"]
        for t in panel["targets"]
        for name in re.findall(r"megatron_\w+", t["expr"])
    }
    assert used and used <= known, used - known

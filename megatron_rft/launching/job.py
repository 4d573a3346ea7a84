"""Decides whether a queued job restarts after a time limit, a preemption or a crash. Its nodes share these files:

    JOB/start_3/before.json   the checkpoints that existed when the job started for the fourth time
    JOB/start_3/stop          written by the batch script: save and end, because the queue needs the nodes
    JOB/start_3/node_1.json   the exit status of node 1: {"status": 3}
    JOB/start_3/hang          the host whose rank made this start hang
    JOB/exclude               hosts that did so twice, which the batch script excludes (--exclude)

The batch script (launch/requeue.sh) reads the decision from the job's exit status: 0 finished, if all nodes have
written that, 2 user error, 3 failed, do not restart, 75 restart. A crash restarts as long as there are new
checkpoints, and `RETRIES` times without new ones.
"""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from megatron_rft.launching.slurm import Node
from megatron_rft.utils.errors import FAILED, FINISHED, STOPPED, USER_ERROR, RunFailed
from megatron_rft.utils.files import read_json, write_atomically

RETRIES = 2  # extra starts allowed without a new checkpoint
STATUS_TIMEOUT_S = 20.0  # wait for the other nodes' statuses; Slurm kills a step 30 s after its first failure


@dataclass(frozen=True)
class Job:
    """One start of a job on one of its nodes. All nodes and all starts share `folder`."""

    folder: Path
    output_dir: Path
    node: Node = Node()

    @property
    def start(self) -> Path:
        return self._start(int(os.environ.get("SLURM_RESTART_COUNT", "0")))

    def begin(self) -> None:
        """Record the checkpoints that exist before this start. Raises RunFailed if the last starts saved nothing
        new."""
        self.start.mkdir(parents=True, exist_ok=True)
        if self.node.index:
            return
        write_atomically(self.start / "before.json", json.dumps(self._saved()))
        if self._starts_without_progress() > RETRIES + 1:
            raise RunFailed(self._no_progress_message())

    def note_hang(self, host: str) -> None:
        """This start hung because of a rank on `host`. Excludes a host that this has happened to twice."""
        write_atomically(self.start / "hang", host)
        before = [path.read_text() for path in self.folder.glob("start_*/hang")]
        twice = sorted({each for each in before if before.count(each) > 1})
        if twice:
            write_atomically(self.folder / "exclude", ",".join(twice) + "\n")

    def failed_elsewhere(self) -> str | None:
        """Return a message about another node whose ranks have failed, or None."""
        others = {node: status for node, status in self._statuses().items() if node != self.node.index}
        failed = [node for node, status in others.items() if status not in (FINISHED, STOPPED)]
        return f"node {failed[0]} of this job failed" if failed else None

    def conclude(self, status: int) -> tuple[int, str]:
        """Return the exit status of the whole job and a message. Waits for the other nodes, because Slurm ends the
        whole step soon after the first status that is not 0."""
        write_atomically(self.start / f"node_{self.node.index}.json", json.dumps({"status": status}))
        if status == FINISHED:
            return FINISHED, ""
        deadline = time.monotonic() + STATUS_TIMEOUT_S
        while len(self._statuses()) < self.node.count and time.monotonic() < deadline:
            time.sleep(0.2)
        if USER_ERROR in self._statuses().values():
            return USER_ERROR, ""
        if self._starts_without_progress() > RETRIES:
            return FAILED, self._no_progress_message()
        return STOPPED, ""

    def _starts_without_progress(self) -> int:
        """Return the number of consecutive starts, up to this one, that have saved nothing new."""
        saved, count = self._saved(), 0
        for number in range(int(self.start.name.removeprefix("start_")), -1, -1):
            if read_json(self._start(number) / "before.json") != saved:
                break
            count += 1
        return count

    def _saved(self) -> list[str]:
        """Return the names of complete checkpoints and shards of trajectories."""
        found = (path for kind in ("checkpoints", "shards") for path in (self.output_dir / kind).glob("*"))
        return sorted(path.name for path in found if path.suffix in ("", ".parquet"))  # others are incomplete

    def _statuses(self) -> dict[int, int]:
        """The statuses of nodes that have ended. One listing of the folder: most of the time none has, and opening a
        file for each node would be a million requests a second to the file system of 1,024 nodes."""
        files = {int(path.stem.removeprefix("node_")): read_json(path) for path in self.start.glob("node_*.json")}
        return {node: content["status"] for node, content in sorted(files.items()) if content is not None}

    def _no_progress_message(self) -> str:
        return (
            f"{RETRIES + 1} starts of this job in a row have saved nothing new in {self.output_dir}: it is not started "
            "again. The lines above say why each ended"
        )

    def _start(self, number: int) -> Path:
        return self.folder / f"start_{number}"

"""A job of a queue, which is started again after a time limit, a preemption or a crash: what its nodes tell each other,
and whether another start is worth it.

    JOB/start_3/before.json   what the run had saved when the job was started for the fourth time
    JOB/start_3/stop          the batch script: save and end (the queue wants the nodes back)
    JOB/start_3/node_1.json   how node 1 ended: {"status": 3}

The job's exit status says it to the batch script (launch/requeue.sh): 0 finished, 2 a mistake in what was given, 3
failed and not worth another start, 75 start again. A crash is tried again as long as there are new checkpoints, and
`RETRIES` times without.
"""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from megatron_rft.utils.errors import RunFailed
from megatron_rft.utils.exit_codes import FAILED, FINISHED, STOPPED, USER_ERROR
from megatron_rft.utils.files import write_atomically

RETRIES = 2  # extra starts allowed without a new checkpoint
PATIENCE = 20.0  # seconds that a node waits for the others' statuses; Slurm kills a step 30 s after its first failure


@dataclass(frozen=True)
class Job:
    """One start of a job, as one of its nodes sees it. All nodes and all starts share `folder`."""

    folder: Path
    output_dir: Path
    node: int = 0
    nodes: int = 1

    @property
    def start(self) -> Path:
        return self._start(int(os.environ.get("SLURM_RESTART_COUNT", "0")))

    def begin(self) -> None:
        """Note what is saved before this start. Raises RunFailed where the last starts have saved nothing new."""
        self.start.mkdir(parents=True, exist_ok=True)
        if self.node:
            return
        _write(self.start / "before.json", self._saved())
        if self._in_vain() > RETRIES + 1:
            raise RunFailed(self._gave_up())

    def wants_stop(self) -> bool:
        return (self.start / "stop").exists()

    def failed_elsewhere(self) -> str | None:
        """A message about another node whose ranks have failed, or None."""
        failed = [
            node for node, status in self._statuses().items() if node != self.node and status not in (FINISHED, STOPPED)
        ]
        return f"node {failed[0]} of this job failed" if failed else None

    def conclude(self, status: int) -> tuple[int, str]:
        """The exit status of the whole job, as far as this node knows, with a message. Waits for the other nodes,
        because Slurm ends the whole step soon after the first status that is not 0."""
        _write(self.start / f"node_{self.node}.json", {"status": status})
        if status == FINISHED:
            return FINISHED, ""
        deadline = time.monotonic() + PATIENCE
        while len(self._statuses()) < self.nodes and time.monotonic() < deadline:
            time.sleep(0.2)
        if USER_ERROR in self._statuses().values():
            return USER_ERROR, ""
        return (FAILED, self._gave_up()) if self._in_vain() > RETRIES else (STOPPED, "")

    def _in_vain(self) -> int:
        """The number of starts in a row, this one included, that have saved nothing new."""
        saved, count = self._saved(), 0
        for number in range(int(self.start.name.removeprefix("start_")), -1, -1):
            if _read(self._start(number) / "before.json") != saved:
                break
            count += 1
        return count

    def _saved(self) -> list[str]:
        """Names of checkpoints and of shards of trajectories."""
        found = (path for kind in ("checkpoints", "shards") for path in (self.output_dir / kind).glob("*"))
        return sorted(path.name for path in found if path.suffix in ("", ".parquet"))  # the others are half-written

    def _statuses(self) -> dict[int, int]:
        words = {node: _read(self.start / f"node_{node}.json") for node in range(self.nodes)}
        return {node: each["status"] for node, each in words.items() if each is not None}

    def _gave_up(self) -> str:
        return (
            f"{RETRIES + 1} starts of this job in a row have saved nothing new in {self.output_dir}: it is not started "
            "again. The lines above say why each ended"
        )

    def _start(self, number: int) -> Path:
        return self.folder / f"start_{number}"


def _write(path: Path, content: object) -> None:
    write_atomically(path, json.dumps(content) + "\n")


def _read(path: Path):
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None

"""Keeps the episodes that have ended since the last checkpoint: the run that resumes a killed one has them. Of those of
programs it keeps each call as well, and names a program that calls otherwise when it is played again."""

import json
import shutil
import time
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import Any

from pydantic import TypeAdapter

from megatron_rft.data.images import ALBUM
from megatron_rft.inference.engine import request_seed
from megatron_rft.inference.weight_sync import EngineWeights
from megatron_rft.records import Response
from megatron_rft.utils.checkpoint_files import complete
from megatron_rft.utils.files import read_json_lines

OTHERWISE = """problem {index}, answer {sample}: the program does not repeat itself: before the run was killed, call \
{call} was one that it does not make now. What is trained is the episode that is played now, so this run is valid, but \
it does not continue the killed one bit for bit. Usual causes are the time, random numbers (take MEGATRON_RFT_SEED), \
what others change, the order of sets and files, and parallel calls that ask the same; `megatron-rft environment \
check` shows what differs"""


class Kept:
    """A rank's files in RUN/environment/kept, one for each step's weights, named by their bits: a resumed run has an
    episode only if it was played with the weights that the run has there again. `tell` gets a message. `lag`: the most
    versions by which weights that played an episode of a checkpoint's batches are older than the checkpoint's."""

    def __init__(self, run: Path, rank: int, weights: EngineWeights, tell: Callable[[str], None], lag: int = 1):
        self.run, self.folder, self.rank, self.weights = run, run / "environment/kept", rank, weights
        self.tell, self.lag, weights.named = tell, lag, True
        self.name, self.before, self.lock = "", {}, Lock()
        self.file, self.told, self.began = None, False, time.time_ns()

    def begin(self, episodes: list[Any]) -> None:
        """End those that the engine's weights have played, and remove files that are older than the last checkpoint."""
        with self.lock:
            if self.name != self.weights.name:
                self.close()
                self.name, self.before, saved = self.weights.name, {}, complete(self.run / "checkpoints")
                for path in self.folder.glob("*.jsonl"):
                    if path.name.startswith(f"{self.name}."):
                        self.before |= {key: each for line in read_json_lines(path) for key, each in line.items()}
                    elif saved and path.name < saved[-1].name.removeprefix("step_"):
                        path.unlink(missing_ok=True)
                oldest = int(saved[0].name.removeprefix("step_")) - self.lag if saved else 0
                for path in (self.run / ALBUM).glob("*"):
                    if int(path.name) < oldest:
                        shutil.rmtree(path, ignore_errors=True)
        for episode in episodes:
            episode.key = str(request_seed(episode.request.seed, episode.sample, *episode.request.prompt_ids))
            if response := self.before.get(episode.key):
                episode.response = TypeAdapter(Response).validate_python(response)

    def put(self, episodes: list[Any]) -> None:
        """Keep all that were in waves together, but for failed ones, unless the engine has other weights by now."""
        fine = [each for each in episodes if each.response.finish_reason != "abort"]
        with self.lock:
            self._write({each.key: asdict(each.response) for each in fine if each.key not in self.before})

    def call(self, episode: Any, number: int, asked: int, sampled: Sequence[int] = ()) -> None:
        """Keep a call of a program's episode: a hash of what it asked, and a checksum of what was sampled."""
        episode.calls[asked] = zlib.crc32(array("q", sampled))
        with self.lock:
            self._write({f"{episode.key}.{number}": [self.began, asked, episode.calls[asked]]})

    def finish(self, episode: Any) -> None:
        """Name a program that has not made a call of the killed run again. Calls in another order are the same. Where
        other tokens were sampled, what follows differs rightly."""
        self.call(episode, episode.numbers, request_seed("the end", episode.numbers))
        before: list[list[int]] = []
        while (each := self.before.get(f"{episode.key}.{len(before)}")) and each[0] == (before or [each])[0][0]:
            before.append(each)  # of the same run
        missing = [number for number, (_, asked, _) in enumerate(before, 1) if asked not in episode.calls]
        sampled = all(episode.calls.get(asked, sampled) == sampled for _, asked, sampled in before)
        if missing and sampled and not self.told:
            self.told, index = True, episode.request.problem.index
            self.tell(OTHERWISE.format(index=index, sample=episode.sample, call=missing[0]))

    def _write(self, new: dict[str, Any]) -> None:
        """A line, unless the engine has other weights by now. The lock is held."""
        if new and self.name == self.weights.name != "":
            if self.file is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                self.file = (self.folder / f"{self.name}.{self.rank}.jsonl").open("a")
            self.file.write(f"\n{json.dumps(new)}")  # a kill may have left an incomplete line
            self.file.flush()

    def close(self) -> None:
        if self.file is not None:
            self.file = self.file.close()

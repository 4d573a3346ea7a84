"""Keeps the episodes that have ended since the last checkpoint: the run that resumes a killed one has them."""

import json
import shutil
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


class Kept:
    """A rank's files in RUN/environment/kept, one for each step's weights, named by their bits: a resumed run has an
    episode only if it was played with the weights that the run has there again. `lag`: the most versions by which
    weights that played an episode of a checkpoint's batches are older than the checkpoint's."""

    def __init__(self, run: Path, rank: int, weights: EngineWeights, lag: int = 1):
        self.run, self.folder, self.rank, self.weights, self.lag = run, run / "environment/kept", rank, weights, lag
        self.name, self.ended, self.lock, weights.named = "", {}, Lock(), True

    def begin(self, episodes: list[Any]) -> None:
        """End those that the engine's weights have played, and remove files that are older than the last checkpoint."""
        with self.lock:
            if self.name != self.weights.name:
                self.name, self.ended, saved = self.weights.name, {}, complete(self.run / "checkpoints")
                for path in self.folder.glob("*.jsonl"):
                    if path.name.startswith(f"{self.name}."):
                        self.ended |= {k: response for line in read_json_lines(path) for k, response in line.items()}
                    elif saved and path.name < saved[-1].name.removeprefix("step_"):
                        path.unlink(missing_ok=True)
                oldest = int(saved[0].name.removeprefix("step_")) - self.lag if saved else 0
                for path in (self.run / ALBUM).glob("*"):
                    if int(path.name) < oldest:
                        shutil.rmtree(path, ignore_errors=True)
        for episode in episodes:
            if response := self.ended.get(key(episode)):
                episode.response = TypeAdapter(Response).validate_python(response)

    def put(self, episodes: list[Any]) -> None:
        """Keep all that were in waves together, but for failed ones, unless the engine has other weights by now."""
        fine = [each for each in episodes if each.response.finish_reason != "abort"]
        new = {key(each): asdict(each.response) for each in fine if key(each) not in self.ended}
        with self.lock:
            if new and self.name == self.weights.name != "":
                self.folder.mkdir(parents=True, exist_ok=True)
                with (self.folder / f"{self.name}.{self.rank}.jsonl").open("a") as file:
                    file.write(f"\n{json.dumps(new)}")  # a kill may have left an incomplete line


def key(episode: Any) -> str:
    return str(request_seed(episode.request.seed, episode.sample, *episode.request.prompt_ids))

"""Writes and reads checkpoints: megatron's distributed format, and a JSON and a safetensors file for the rest.

    checkpoints/step_000040/          atomic: written as step_000040.*.partial, then renamed
        weights                       torch_dist, reshardable to any TP x PP x DP
        optimizer_00017.safetensors   rank 17's part of the distributed optimizer's state (optimizer_shards.py)
        run.json                      step, data position and the trainer's other values
        state.safetensors             the objective's state (PIPO's window and previous batch)
        digests.json                  size and SHA-256 of each file, checked before a run resumes from it

Saving is asynchronous by default: a forked writer uses a copy-on-write image of the memory while training continues.
The writer also computes the digests of its shards.
"""

import errno
import functools
import json
import os
import pickle
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection, dummy
from pathlib import Path
from queue import Empty
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import filesystem_async, fully_parallel
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import checkpoint as torch_checkpoint

from megatron_rft.megatron import optimizer_shards, parallel
from megatron_rft.megatron.actor import Actor
from megatron_rft.megatron.ema import MovingAverage
from megatron_rft.megatron.lora import sharded_state
from megatron_rft.utils import checkpoint_files
from megatron_rft.utils.checkpoint_files import PARTIAL, latest
from megatron_rft.utils.end_with_parent import die_with
from megatron_rft.utils.errors import DataError, RunFailed, disk_is_full, folder_is_lost
from megatron_rft.utils.files import flush
from megatron_rft.utils.processes import without_stop_signals

BEGINS_WITHIN = 10.0  # seconds until a writer that has not begun is replaced
METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}  # only this format can change TP and PP


class Checkpointer:
    """Writes and reads the checkpoints of `models` (name -> Actor), and of `averages` of their weights, under `folder`.

    All methods are collective. At most one save is in progress: a second one waits for the first.
    """

    def __init__(
        self,
        folder: Path,
        models: dict[str, Actor],
        keep: int = 2,
        asynchronous: bool = True,
        averages: dict[str, MovingAverage] | None = None,
    ):
        self.folder, self.models, self.keep, self.asynchronous = folder, models, keep, asynchronous
        self.averages = averages or {}
        for actor in models.values():
            optimizer_shards.gather_nothing(actor.optimizer.megatron)
        self.queue = AsyncCallsQueue(persistent=False)
        self.failed = self.saving = False
        attempt = [uuid.uuid4().hex[:8]]
        dist.broadcast_object_list(attempt, group=parallel.host_group("checkpoint"))
        self.partial = f".{attempt[0]}{PARTIAL}"  # unique, because the writer of a killed start may still be running
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for torn in folder.glob(f"*{PARTIAL}"):
                shutil.rmtree(torn, ignore_errors=True)  # a surviving writer may still create files there
        parallel.barrier("checkpoint")

    def save(self, step: int, run: dict[str, Any], state: dict[str, Tensor]) -> None:
        """Saves everything a run needs to resume after `step`."""
        self.wait()
        final = self.folder / f"step_{step:06d}"
        partial = self.writing = final.with_name(final.name + self.partial)
        with self._disk_may_fail():
            self._save(partial, final, {"step": step, **run}, state)

    def _save(self, partial: Path, final: Path, run: dict[str, Any], state: dict[str, Tensor]) -> None:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
        parallel.barrier("checkpoint")
        shards = optimizer_shards.Shards()
        prepare_writer()
        request = dist_checkpointing.save(
            self._sharded(shards),
            str(partial),
            # data-parallel ranks have the same weights: each writes a part
            fully_parallel.FullyParallelSaveStrategyWrapper(
                serialization.get_default_save_sharded_strategy(), parallel.dp_with_cp_group()
            ),
            async_sharded_save=self.asynchronous,
            content_metadata=METADATA,
        )
        if dist.get_rank() == 0:
            save_file({name: value.contiguous() for name, value in state.items()}, partial / "state.safetensors")
            (partial / "run.json").write_text(json.dumps(run, indent=1))
        own = functools.partial(shards.write, optimizer_shards.file_of(partial, dist.get_rank()))
        if request is None:
            own()
            checkpoint_files.write_own_digests(partial, dist.get_rank())
            parallel.barrier("checkpoint")
            self._publish(partial, final)
        else:
            request.add_finalize_fn(lambda: self._publish(partial, final))
            self._fork(request, own, partial)
            self.saving = True

    def _fork(self, request: AsyncRequest, own: Callable[[], None], partial: Path) -> None:
        """Start the writer. One that neither begins nor ends is replaced: before Python 3.11.10 a fork hangs in the
        interpreter if another library's thread has just locked its list of threads (CPython's issue 112275)."""
        read, begun = os.pipe()
        write = functools.partial(_write, request.async_fn, own, partial)
        request = request._replace(async_fn=functools.partial(_begin, begun, os.getpid(), write))
        with without_stop_signals():
            self.queue.schedule_async_request(request)
            caller = self.queue.async_calls[-1].async_caller
            while not connection.wait([read, caller.process.sentinel], BEGINS_WITHIN):
                caller.close(abort=True)
                caller.schedule_async_call(request)
        os.close(read), os.close(begun)

    def poll(self) -> None:
        """Finish a save whose writer has ended. Call it in each step while one is `saving`."""
        with self._disk_may_fail():
            self.queue.maybe_finalize_async_calls(blocking=False)

    def wait(self) -> None:
        """Wait until all saves are finished."""
        with self._disk_may_fail():
            while self.queue.get_num_unfinalized_calls():
                self.queue.async_calls[0].async_caller.is_current_async_call_done(blocking=True, no_dist=True)
                parallel.barrier("checkpoint")  # megatron-core waits for the other ranks' writers in a step's group
                self.queue.maybe_finalize_async_calls(blocking=True)

    @contextmanager
    def _disk_may_fail(self) -> Iterator[None]:
        """Remove a checkpoint that cannot be written and end the run, because later steps could not be saved."""
        try:
            yield
        except (Exception, torch_checkpoint.CheckpointException) as error:
            name = self.writing.name.removesuffix(self.partial)
            if disk_is_full(error):
                why = f"the disk is full: {name} did not fit into"
                fix = "Free some space (checkpoint.keep says how many checkpoints stay)"
            elif lost := folder_is_lost(error, self.folder):
                why, fix = f"{lost}: {name} could not be written into", "Make it exist and writable (is it mounted?)"
            else:
                raise
            shutil.rmtree(self.writing, ignore_errors=True)
            self.failed = True
            newest = latest(self.folder)
            left = f"{newest.name} stays the newest" if newest else "no checkpoint is there now"
            raise RunFailed(f"{why} {self.folder}; {left}. {fix} and run the same command again") from error

    def close(self, failing: bool = False) -> None:
        """`failing`: an error ends this rank. It then finishes a save only if the others fail too."""
        try:
            if failing and self.saving:
                parallel.barrier("failure")
        except RuntimeError:  # the others wait elsewhere, or have ended
            self.failed = True
        if not self.failed:
            self.wait()
            self.queue.close()

    def newest_intact(self) -> tuple[Path | None, list[str]]:
        """The newest checkpoint whose files have their digests, and a sentence about each newer one, which is renamed.

        Each rank reads a share of the files. None: there is no checkpoint. Raises DataError if none is intact.
        """
        told: list[str] = []
        for path in reversed(checkpoint_files.complete(self.folder)):
            own = checkpoint_files.damage(path, dist.get_rank(), dist.get_world_size())
            found = parallel.from_all_ranks(own, "checkpoint")
            if not any(found):
                return path, told
            told.append(f"{path.name} is damaged ({max(found)}) and is passed over; it is now {path.name}.damaged")
            if dist.get_rank() == 0:
                checkpoint_files.set_aside(path)
            parallel.barrier("checkpoint")
        if told:
            raise DataError(
                f"no checkpoint in {self.folder} is intact: {'; '.join(told)}. Remove {self.folder.parent} to start "
                "again from step 1, or restore a checkpoint from a copy"
            )
        return None, told

    def load(self, path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Load weights, moments and schedule into the models. Returns the content of run.json and the objective's
        state. Raises DataError if the checkpoint does not fit the models."""
        try:
            read, group = serialization.get_default_load_sharded_strategy(str(path)), parallel.dp_with_cp_group()
            shared = fully_parallel.FullyParallelLoadStrategyWrapper(read, group)  # each reads a part for all
            shards = optimizer_shards.ShardReader(parallel.on_main(lambda: optimizer_shards.index(path)))
            loaded = dist_checkpointing.load(self._sharded(), str(path), shared)
            self._load_into_models(loaded, shards)
        except (Exception, torch_checkpoint.CheckpointException) as error:  # the second one's text is a traceback
            cause = next((each for each, _ in getattr(error, "failures", {}).values()), error)  # a rank's
            beside = isinstance(cause, OSError | MemoryError | torch.OutOfMemoryError)  # it says nothing of the model
            if beside and not isinstance(cause, FileNotFoundError):
                raise cause from None
            reason = str(error).strip().rpartition("\n")[2]
            raise DataError(
                f"the checkpoint {path} cannot be loaded into this model: {reason}. Was the model or the optimizer "
                "changed? Start in another run.output_dir, or remove the folder to continue from an earlier checkpoint"
            ) from error
        for name, average in self.averages.items():
            average.load(name, loaded)
        parallel.barrier("checkpoint")
        return json.loads((path / "run.json").read_text()), load_file(path / "state.safetensors")

    def _load_into_models(self, loaded: dict[str, Any], shards: optimizer_shards.ShardReader) -> None:
        for name, actor in self.models.items():
            for index, chunk in enumerate(actor.models):
                state = {k.removeprefix(f"{name}."): v for k, v in loaded[f"{name}.{index}"].items()}
                chunk.load_state_dict(state, strict=actor.lora is None)
            for moments in actor.optimizer.every_moments:
                optimizer = actor.optimizer.megatron
                with actor.optimizer.using(moments):
                    optimizer.load_state_dict(loaded[f"{name}.optimizer.{moments}"])
                    shards.load(f"{name}.{moments}", optimizer, self._chunks(name, actor)[1])
            actor.optimizer.schedule.load_state_dict(loaded[f"{name}.schedule"])

    def _chunks(self, name: str, actor: Actor) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the sharded state of the model's chunks, by the names of the checkpoint and by those in which
        megatron's optimizer looks up its parameters: "model", or "model0", "model1" with virtual stages."""
        metadata = ensure_metadata_has_dp_cp_group(dict(METADATA))
        model = {f"{name}.{i}": sharded_state(chunk, f"{name}.", metadata) for i, chunk in enumerate(actor.models)}
        keys = ["model"] if len(actor.models) == 1 else [f"model{i}" for i in range(len(actor.models))]
        return model, dict(zip(keys, model.values(), strict=True))

    def _sharded(self, shards: optimizer_shards.Shards | None = None) -> dict[str, Any]:
        """`shards`: gets the optimizers' states; None: this is for loading."""
        metadata = ensure_metadata_has_dp_cp_group(dict(METADATA))
        whole: dict[str, Any] = {}
        for name, actor in self.models.items():
            actor.finish_param_gather()
            model, chunks = self._chunks(name, actor)
            if shards:
                actor.optimizer.fill_in()
            for moments in actor.optimizer.every_moments:
                optimizer = actor.optimizer.megatron
                with actor.optimizer.using(moments):
                    if shards:
                        shards.add(f"{name}.{moments}", optimizer, chunks)
                    part = optimizer.sharded_state_dict(chunks, is_loading=shards is None, metadata=metadata)
                if moments != "own":
                    add_prefix_for_sharding(part, f"{moments}.")
                whole[f"{name}.optimizer.{moments}"] = part
            whole |= model | {f"{name}.schedule": actor.optimizer.schedule.state_dict()}
        for name, average in self.averages.items():
            whole |= average.sharded(name, metadata)
        return whole

    def _publish(self, partial: Path, final: Path) -> None:
        """Renames a finished checkpoint to its final name, then removes old ones."""
        written = optimizer_shards.file_of(partial, dist.get_rank()).is_file()
        if not all(parallel.from_all_ranks(written, "checkpoint")):
            raise OSError(errno.ENOSPC, f"a rank could not write its part of the optimizer's state into {partial}")
        if dist.get_rank() == 0:
            checkpoint_files.join_digests(partial)
            for path in [*partial.rglob("*"), partial]:
                flush(path)
            os.replace(partial, final)
            for old in checkpoint_files.complete(self.folder)[: -self.keep]:
                # a kill in between leaves nothing that looks complete; a file that another process reads may stay (NFS)
                shutil.rmtree(old.rename(f"{old}{PARTIAL}"), ignore_errors=True)
        parallel.barrier("checkpoint")
        self.saving = False


def _begin(begun: int, parent: int, write: Callable[..., None], *arguments: Any) -> None:
    """Runs in the forked writer, and says so to the file `begun`."""
    die_with(parent)
    os.write(begun, b"!")
    write(*arguments)


def _write(write: Callable[..., None] | None, own: Callable[[], None], folder: Path, *arguments: Any) -> None:
    """The rank's own part of the optimizer's state, megatron's function, then the digests of what they have written."""
    with suppress(Exception):  # `_publish` sees that the file is missing
        own()
    if write:
        write(*arguments)  # puts an error into the queue of results
    with suppress(OSError):  # the same error; digests.json gets what is missing from the files themselves
        checkpoint_files.write_own_digests(folder, dist.get_rank())


class Results:
    """The queue of megatron's writer, for one result at a time: a file in memory, which a forked writer shares.

    Megatron's own is a process with a new interpreter, which takes seconds and never ends if this process is killed.
    """

    def __init__(self) -> None:
        self.file = os.fdopen(os.memfd_create("results"), "r+b", buffering=0)

    def put(self, results: object) -> None:
        pickle.dump(results, self.file)

    def get_nowait(self) -> object:
        """The result. Raises Empty if the writer ended without one."""
        self.file.seek(0)
        try:
            return pickle.load(self.file)
        except (EOFError, pickle.UnpicklingError):
            raise Empty from None
        finally:
            self.file.seek(0), self.file.truncate()


def prepare_writer() -> None:
    """Have megatron's writer use threads, where it forks a process for each file, and `Results`."""
    filesystem_async._results_queue = filesystem_async._results_queue or Results()
    filesystem_async.mp = SimpleNamespace(get_context=lambda _method: dummy)

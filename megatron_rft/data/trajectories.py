"""The trajectory store: a model's graded responses to each problem of a data set, written once and read many times.

    STORE/shards/000000.parquet   a row per response: complete or absent (written to a temporary file, then renamed)
    STORE/index.json              written last, when all shards exist: facts, checksums, the use of each problem

A shard has a fixed range of problems and depends only on them and the seed, so that a restart, or another number of
workers, gives the same files. Shards keep every response. The index lists the problems that are used, those with a
right and a wrong response (fpa.txt B.1), of which a share is held out. A folder without its index is not a store. The
shards are plain parquet: `datasets.load_dataset("parquet", data_files="STORE/shards/*.parquet")` reads them too.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from megatron_rft.records import Batch, Prompt, concatenate
from megatron_rft.utils.errors import DataError
from megatron_rft.utils.files import digest, read_json, replacing, write_atomically

INDEX = "index.json"
INPUTS = "shards/inputs.json"  # digests of what the shards are made from
IDS = pa.list_(pa.int32())


@dataclass(frozen=True)
class Trajectory:
    """One response to one problem. The fields are a shard's columns, with their types in parquet."""

    problem: Annotated[int, pa.int64()]
    sample: Annotated[int, pa.int32()]
    prompt: Annotated[str, pa.string()]
    answer: Annotated[str, pa.string()]
    prompt_ids: Annotated[tuple[int, ...], IDS]
    response_ids: Annotated[tuple[int, ...], IDS]
    text: Annotated[str, pa.string()]
    reward: Annotated[int | None, pa.int8()]  # +1 right, -1 wrong, null where the grader failed
    error: Annotated[str | None, pa.string()]
    logprobs: Annotated[tuple[float, ...], pa.list_(pa.float32())]  # of the sampling distribution
    finish_reason: Annotated[str, pa.string()]
    # first, end, first, end ... of the policy's tokens; null: all
    turns: Annotated[list[int] | None, IDS] = None
    # of an episode with segments: the segment of each token, -s in the prompt of segment s > 0
    segment_of: Annotated[tuple[int, ...] | None, IDS] = None
    # the problem's prompt, if an environment's first messages follow it
    problem_ids: Annotated[tuple[int, ...] | None, IDS] = None
    images: Annotated[str | None, pa.string()] = None  # digest of the problem's images, which stay in the data set
    shown: Annotated[int | None, pa.int64()] = None  # key of an episode's images, which are files beside the shards
    # JSON of the problem's other fields (tests, tools, level), with its first response
    fields: Annotated[str | None, pa.string()] = None


COLUMNS = get_type_hints(Trajectory, include_extras=True)
SCHEMA = pa.schema([(name, column.__metadata__[0]) for name, column in COLUMNS.items()])
TRAINED = [name for name in SCHEMA.names if name not in ("text", "error", "logprobs", "finish_reason")]  # read


@dataclass(frozen=True)
class Stored:
    """The content of a store for training: the trajectories of its training problems, of which each is a group, and the
    held-out problems."""

    train: Batch
    held_out: list[Prompt]
    index: dict[str, Any]
    digest: str  # of the index, and so of all data
    images: dict[int, str]  # problem with images -> their digest
    fields: dict[int, dict[str, Any]]  # training problem -> its other fields; empty unless `read` is asked for them


# ---- writing


def shard_path(folder: Path, number: int) -> Path:
    return folder / "shards" / f"{number:06d}.parquet"


def missing(folder: Path, shards: int) -> list[int]:
    return [number for number in range(shards) if not shard_path(folder, number).is_file()]


def check_inputs(folder: Path, inputs: dict[str, str]) -> None:
    """Raises DataError if the shards were made from other `inputs` (digests by option), which have changed since."""
    made_from = read_json(folder / INPUTS) or {}
    if changed := [option for option, its in made_from.items() if its != inputs[option]]:
        raise DataError(
            f"{changed[0]}: it has changed since the shards in {folder} were made, and a store is of one data set and "
            "one model. Choose another run.output_dir, or remove the folder shards and begin again"
        )


def write_shard(folder: Path, number: int, trajectories: list[Trajectory]) -> None:
    """Writes trajectories sorted by problem and sample."""
    path = shard_path(folder, number)
    ordered = sorted(trajectories, key=lambda each: (each.problem, each.sample))
    table = pa.Table.from_pylist([asdict(each) for each in ordered], schema=SCHEMA)
    with replacing(path, sync=True) as new:
        pq.write_table(table, new)


def finish(folder: Path, shards: int, held_out: float, seed: int, facts: dict[str, Any]) -> dict[str, Any] | None:
    """Writes and returns the index over complete shards; None while a shard is missing. The index has no times or
    paths, so two workers that finish together write the same."""
    if missing(folder, shards):
        return None
    problems: dict[int, list[int | None]] = {}
    lengths = []
    for number in range(shards):
        for row in _rows(shard_path(folder, number), ["problem", "reward", "response_ids"]):
            problems.setdefault(row["problem"], []).append(row["reward"])
            lengths.append(len(row["response_ids"]))
    outcomes = {problem: outcome(rewards) for problem, rewards in problems.items()}
    kept = sorted(problem for problem, what in outcomes.items() if what == "kept")
    apart = hold_out(kept, held_out, seed)
    names = [shard_path(folder, number).name for number in range(shards)]
    index = {
        "facts": facts,
        "summary": summary(problems, outcomes, lengths) | {"held_out": len(apart)},
        "train": sorted(set(kept) - set(apart)),
        "held_out": apart,
        "shards": {name: digest(folder / "shards" / name)["sha256"] for name in names},
    }
    write_atomically(folder / INDEX, json.dumps(index, indent=1) + "\n")
    return index


def outcome(rewards: list[int | None]) -> str:
    """Whether a problem is used: its graded responses include a right and a wrong one."""
    graded = {reward for reward in rewards if reward is not None}
    if not graded:
        return "not graded"
    return "kept" if len(graded) == 2 else "all right" if graded == {1} else "all wrong"


def hold_out(problems: list[int], share: float, seed: int) -> list[int]:
    """A share of the problems, never all, by the order of their hashes: it changes little when some come or go."""
    order = sorted(problems, key=lambda problem: hashlib.sha256(f"{seed}/hold-out/{problem}".encode()).digest())
    return sorted(order[: min(round(share * len(problems)), len(problems) - 1)])


def summary(problems: dict[int, list[int | None]], outcomes: dict[int, str], lengths: list[int]) -> dict[str, Any]:
    graded = [reward for rewards in problems.values() for reward in rewards if reward is not None]
    return {
        "problems": len(problems),
        "responses": len(lengths),
        "ungraded": len(lengths) - len(graded),
        **{what.replace(" ", "_"): count for what, count in sorted(Counter(outcomes.values()).items())},
        "share_right": sum(reward > 0 for reward in graded) / len(graded) if graded else 0.0,
        "mean_tokens": sum(lengths) / len(lengths),
        "most_tokens": max(lengths),
    }


def describe(facts: dict[str, Any]) -> str:
    """A readable summary."""
    dropped = {name: facts.get(name.replace(" ", "_"), 0) for name in ("all right", "all wrong", "not graded")}
    return (
        f"{facts['responses']} responses to {facts['problems']} problems, {facts['share_right']:.1%} right\n"
        f"{facts.get('kept', 0)} problems kept, {facts['held_out']} of them held out; dropped: "
        f"{', '.join(f'{count} {name}' for name, count in dropped.items())}\n"
        f"response tokens: {facts['mean_tokens']:.0f} in the mean, {facts['most_tokens']} at most"
    )


# ---- reading


def read(folder: str | Path, with_fields: bool = False) -> Stored:
    """Reads a store and checks every shard against the index.

    Raises:
        DataError: it is incomplete, a shard is corrupt or changed, a reward is not +1 or -1, or a response is empty.
    """
    folder = Path(folder).expanduser()
    index = read_json(folder / INDEX)
    if not isinstance(index, dict) or not {"facts", "summary", "train", "held_out", "shards"} <= index.keys():
        raise DataError(f"{folder / INDEX} is missing or torn, or no index of a trajectory store")
    for name, expected in index["shards"].items():
        path = folder / "shards" / name
        if not path.is_file():
            raise DataError(f"{folder}: the shard {name} is missing. Run `megatron-rft generate` again: it is remade")
        if digest(path)["sha256"] != expected:
            raise DataError(f"{path}: torn or changed since it was written. Remove it and run `megatron-rft generate`")
    train, held_out = set(index["train"]), set(index["held_out"])
    batches, prompts, fields, images = [], {}, {}, {}
    for name in index["shards"]:
        rows = []
        for row in _rows(folder / "shards" / name, TRAINED):
            _check(row, folder / "shards" / name)
            problem = row["problem"]
            if row.get("images") and (problem in train or problem in held_out):
                images[problem] = row["images"]
            if with_fields and problem in train and problem not in fields:
                fields[problem] = json.loads(row["fields"] or "{}")
            if problem in train and row["reward"] is not None:
                rows.append(row)
            elif problem in held_out and problem not in prompts:
                about = json.loads(row.get("fields") or "{}")
                ids = tuple(row.get("problem_ids") or row["prompt_ids"])
                prompts[problem] = Prompt(problem, ids, row["prompt"], row["answer"], about)
        if rows:
            batches.append(_to_batch(rows, index["facts"]))
    if not batches:
        raise DataError(f"{folder}: no problem has a right and a wrong response: there is nothing to learn from")
    held_out = [prompts[problem] for problem in index["held_out"]]
    return Stored(concatenate(batches), held_out, index, digest(folder / INDEX)["sha256"], images, fields)


def _mask(row: dict[str, Any]) -> torch.Tensor:
    """1 on the tokens that the policy wrote."""
    spans = row["turns"] or [0, len(row["response_ids"])]
    mask = torch.zeros(len(row["response_ids"]))
    for first, end in zip(spans[::2], spans[1::2], strict=True):
        mask[first:end] = 1.0
    return mask


def _to_batch(rows: list[dict[str, Any]], facts: dict[str, Any]) -> Batch:
    """Tensors instead of the rows' lists, which take twenty times the memory."""
    masks = {"response_mask": torch.cat([_mask(row) for row in rows])} if facts.get("environment") else {}
    keys = torch.tensor([row.get("shown") or (row["problem"] if row.get("images") else -1) for row in rows])
    segments = [row.get("segment_of") or () for row in rows]
    batch = Batch.of(
        [row["prompt_ids"] for row in rows],
        [row["response_ids"] for row in rows],
        tokens=masks,
        sequences={
            "group": torch.tensor([row["problem"] for row in rows]),
            "rewards": torch.tensor([float(row["reward"]) for row in rows]),
        }
        | ({"images": keys} if facts.get("images") else {}),
    )
    return batch.with_segments(segments) if any(segments) else batch


def _rows(path: Path, columns: list[str]) -> Iterator[dict[str, Any]]:
    try:
        for batch in pq.ParquetFile(path).iter_batches(columns=columns):
            yield from batch.to_pylist()
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: no parquet file of trajectories ({error}). Remove it and generate it again") from None


def _check(row: dict[str, Any], path: Path) -> None:
    place = f"{path}: problem {row['problem']}, response {row['sample']}"
    if row["reward"] not in (1, -1, None):
        raise DataError(f"{place} has the reward {row['reward']}: trajectories are right (+1) or wrong (-1)")
    if not row["response_ids"]:
        raise DataError(f"{place} is empty: a response has one token at least, its end")

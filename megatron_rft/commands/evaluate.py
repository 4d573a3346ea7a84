"""`megatron-rft evaluate`: evaluates a model on a recipe's problems and benchmarks, in one process.

The weights come from a Hugging Face folder or a Megatron checkpoint, which is read into the engine without conversion.
The same command resumes a killed evaluation and reuses completions that were made under the same conditions. Results on
other benchmarks stay in the folder.
"""

import argparse
import hashlib
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron_rft import __version__
from megatron_rft.commands.convert import find_source
from megatron_rft.config import Data, Evaluation, Megatron, Recipe, RewardOptions
from megatron_rft.config.datasets import DATASETS
from megatron_rft.config.evaluation import Benchmark
from megatron_rft.config.rewards import SECTIONS, OwnOptions
from megatron_rft.conversion.convert import SourceCheckpoint
from megatron_rft.data.prompts import PromptSet
from megatron_rft.evaluation.evaluate import EvalResult, EvaluationCache, conditions, reread, table, unjudged, write
from megatron_rft.inference import weight_sync
from megatron_rft.inference.engine import Engine
from megatron_rft.plan import check, check_writable, make_folder
from megatron_rft.rewards import registry
from megatron_rft.training import build
from megatron_rft.training.engines import EngineBuilder
from megatron_rft.training.episodes import around
from megatron_rft.training.evaluator import Evaluator
from megatron_rft.training.problems import Problems
from megatron_rft.utils import user_code
from megatron_rft.utils.errors import FINISHED, ConfigError
from megatron_rft.utils.files import digest

Weights = list[list[str | int]]


def run(args: argparse.Namespace) -> int:
    results, out = evaluate(args.loaded, args.model, args.like, args.out)
    print("\n".join([table(results), *(unjudged(each.summary()) for each in results if each.errors)]))
    print(f"results and completions: {out}")
    return FINISHED


def evaluate(
    recipe: Recipe, name: str | None = None, like: str | None = None, out: Path | None = None
) -> tuple[list[EvalResult], Path]:
    """Evaluate a model on data.validation, data.test and the benchmarks, with the recipe's tokenizer. Returns the
    results, and the folder with them and the completions."""
    name = name or str(Path(recipe.run.output_dir) / "export")
    source = find_source(name, like, "model")
    if (devices := recipe.vllm.tensor_parallel_size) > 1:
        raise ConfigError(
            f"vllm.tensor_parallel_size: {devices}, but the command evaluate has one process on one device. Set it to 1"
        )
    # `check` requires *.safetensors, which a Megatron checkpoint does not have, unless weights are random.
    initialise = "pretrained" if source.format == "hf" and source.path == source.companions else "random"
    given = recipe.model.model_copy(update={"path": str(source.companions), "initialise": initialise})
    recipe = recipe.model_copy(update={"model": given, "megatron": Megatron()})  # this process is no rank of a layout
    check(recipe, must_fit=False, starts=True)  # nothing is trained, and the engine checks its own share
    named = Path(name).name if source.format == "hf" else source.path.name
    folder = out or Path(recipe.run.output_dir) / "evaluation" / named
    check_writable(folder, "out")
    tokenizer = build.load_tokenizer(recipe.model)
    problems = Problems(recipe.data, recipe.environment, recipe.evaluation.benchmarks)
    # Load all data sets before the first evaluation, so that errors in any of them show at the start.
    loaded = {part: problems.prompts(part, tokenizer) for part in parts_of(recipe.data, recipe.evaluation)}
    make_folder(folder, "out")
    model = {"weights": weights(source.path), "dtype": recipe.rollout.dtype or recipe.model.precision}
    if environment := recipe.environment:
        model |= {"environment": environment.model_dump(), "its code": digests(environment.code)}
    sampler = build.evaluation_sampler(recipe.evaluation, recipe.rollout, None, tokenizer, None, recipe.run.seed)
    given = {part: read.prompts[: recipe.evaluation.limit] for part, read in loaded.items()}
    evaluator = Evaluator(recipe.evaluation, sampler, folder, given)  # engine and rewards: in `measured`
    asked = {part: Asked.of(part, usable, evaluator, recipe.reward, model) for part, usable in loaded.items()}
    results = measured(asked, evaluator, EngineBuilder(recipe), source, tokenizer)
    write([*results, *others(folder, list(asked), model["weights"])], folder)
    return results, folder


def parts_of(data: Data, evaluation: Evaluation) -> list[str]:
    parts = [part for part in ("validation", "test") if getattr(data, part)] + list(evaluation.benchmarks)
    if not parts:
        raise ConfigError(
            "data.test: there is nothing to evaluate on: give data.test, data.validation or evaluation.benchmarks, for "
            "example evaluation.benchmarks.math500=math500"
        )
    return parts


def measured(
    asked: dict[str, "Asked"], evaluator: Evaluator, builder: EngineBuilder, source: SourceCheckpoint, tokenizer: Any
) -> list[EvalResult]:
    """The result of each part. An engine is built if some completion is missing."""
    results = []
    with ExitStack() as stack:
        player = None
        if not all(question.answered for question in asked.values()):
            player = around(build_engine(builder, source), builder, tokenizer, stack)
        for part, question in asked.items():
            with nullcontext() if question.answered else closing(registry.build(question.reward)) as reward:
                sampler = replace(evaluator.sampler, engine=player, reward=reward)
                result = replace(evaluator, sampler=sampler).measure(part, question.cache)
                results.append(replace(result, left_out=question.left_out))
    return results


@dataclass(frozen=True)
class Asked:
    """The problems of one part, its reward, and the completions that are there already."""

    left_out: dict[str, int]
    reward: RewardOptions
    cache: EvaluationCache
    answered: bool  # all of them

    @classmethod
    def of(cls, part: str, read: PromptSet, evaluator: Evaluator, own: RewardOptions, model: dict[str, Any]) -> "Asked":
        """`own`: the recipe's reward; `model`: what its answers depend on."""
        benchmark, samples = evaluator.options.benchmarks.get(part), evaluator.samples(part)
        prompts, reward = evaluator.given[part], reward_of(own, benchmark) if benchmark else own
        depends_on = {
            "megatron_rft": __version__,
            **model,
            "reward": reward.model_dump(),
            "code": digests([each.function for each in reward.everything() if isinstance(each, OwnOptions)]),
            "problems": hashlib.sha256("".join(map(repr, prompts)).encode()).hexdigest(),
            "sampling": asdict(evaluator.sampler.sampling),
            "samples": samples,
            "seed": evaluator.sampler.seed,
        }

        def note(answered: int, already: str = "") -> None:
            print(f"{part}: {answered} of {len(prompts)} problems are answered{already}", flush=True)

        cache = EvaluationCache(evaluator.folder, part, depends_on, samples, note)
        if cache.completions:
            note(len(cache.completions), " already")
        return cls(read.dropped, reward, cache, len(cache.completions) == len(prompts))


def others(folder: Path, parts: list[str], model: Weights) -> list[EvalResult]:
    """Earlier results in `folder`, of this model, on other benchmarks."""
    same = [name for name, known in conditions(folder).items() if known["weights"] == model and name not in parts]
    return [result for name in same if (result := reread(folder, name))]


def build_engine(engines: EngineBuilder, source: SourceCheckpoint) -> Engine:
    engine = engines.local(source.hf_config)("cuda" if torch.cuda.is_available() else "cpu")
    weight_sync.send(source.tensors(), engine, version=0, verify=True)
    return engine


def reward_of(own: RewardOptions, benchmark: Benchmark) -> RewardOptions:
    """The benchmark's own reward; else the recipe's if it fits its adapter, else the adapter's kind with its
    defaults."""
    known = DATASETS.get(benchmark.adapter)
    if benchmark.reward or known is None or known.reward == "model":
        return benchmark.reward or own
    if own.kind == known.reward and known.rules in (None, getattr(own, "rules", None)):
        return own
    return SECTIONS[known.reward](**({"rules": known.rules} if known.rules else {}))


def weights(folder: Path) -> Weights:
    """Name, size and modification time of each weight file: a cache key of the model's weights."""
    stats = [(file.name, file.stat()) for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.distcp")])]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def digests(named: list[str]) -> dict[str, str]:
    """The user's code by its name in the recipe, or a file -> SHA-256 of its file."""
    files = {name: path if (path := Path(name)).is_file() else user_code.source(name) for name in named}
    return {name: digest(file)["sha256"] for name, file in files.items() if file and file.is_file()}

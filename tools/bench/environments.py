"""Measures what environments add to generation: the seconds in which nothing is generated because they answer, and what
vLLM's prefix cache saves and changes when it lives from turn to turn.

    OMP_NUM_THREADS=1 python tools/bench/environments.py [--episodes 1000 --size 20m --processes 4 16]

Episodes of a model with random weights in vLLM, `--turns` turns of 32 tokens on average, each followed by 16 tokens of
an environment that takes `--answer-ms` for each answer, the first and the score included. The wait is
`environment/wait_seconds` of a run. The last row plays the first row's episodes with an empty cache in each turn.
"""

import argparse
import random
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from rollout_vllm import random_weights
from setups import DTYPES, SIZES, qwen3

from megatron_rft.environments.player import Episodes
from megatron_rft.environments.process import EnvironmentProcesses
from megatron_rft.environments.template import Template
from megatron_rft.inference.engine import Engine, Request, Sampling
from megatron_rft.inference.vllm.engine import VLLMEngine
from megatron_rft.records import Prompt, Response

SMALLEST = "--episodes 8 --size 1m --processes 1 --prompt 32"  # tests/bench
SLOW = """
import time
from megatron_rft.environments import Environment, Turn

class Slow(Environment):
    def reset(self, prompt, seed):
        self.seconds = prompt.fields["seconds"]
        time.sleep(self.seconds)

    def step(self, text):
        time.sleep(self.seconds)
        return Turn("abcdefghijklmnop")

    def score(self):
        time.sleep(self.seconds)
        return 0.0
"""


class Letters:
    """A tokenizer with one token for each letter, without a chat template."""

    chat_template = None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(letter) for letter in text]


class Forgetful:
    """The engine with an empty cache in each turn."""

    def __init__(self, engine: Engine):
        self.engine, self.agree = engine, engine.agree

    def generate(self, requests: list[Request], sampling: Sampling):
        return self.engine.generate(requests, replace(sampling, continues=False))


def played(engine: Engine, requests: list[Request], folder: Path, processes: int, turns: int, vocabulary: int):
    """Returns the responses, the seconds, and those of them in which the engine waited."""
    sampling = Sampling(turns * 512, stop_token_ids=tuple(range(0, vocabulary, 32)))
    options = {"kind": "own", "episode": f"{folder}/slow.py:Slow"}
    environments = EnvironmentProcesses(options, processes, 30.0, folder / "log")
    warm = [environments.submit(environments.new(requests[0].problem, i), started) for i in range(processes)]
    assert all(job.result() is None for job in warm)
    player = Episodes(engine, environments, Template(Letters(), sampling.stop_token_ids), str, "slow", turns)
    start = time.perf_counter()
    groups = sorted(player.generate(requests, sampling), key=lambda group: group.id)
    seconds = time.perf_counter() - start
    waited = player.statistics()["environment/wait_seconds"]
    player.close()
    return [response for group in groups for response in group.responses], seconds, waited


def started(ask) -> None:
    """Starts the process, so that its imports are not measured."""
    ask("reset", prompt={"index": 0, "text": "", "answer": "", "fields": {"seconds": 0.0}}, seed=0)


def difference(first: list[Response], second: list[Response]) -> str:
    """How many of the responses have other tokens, and how much the log-probs of the others differ."""
    same = [pair for pair in zip(first, second, strict=True) if pair[0].token_ids == pair[1].token_ids]
    far = max((abs(a - b) for one, other in same for a, b in zip(one.logprobs, other.logprobs, strict=True)), default=0)
    equal = sum(one.logprobs == other.logprobs for one, other in same)
    return f"{len(first) - len(same)} of {len(first)} other tokens, {equal} bit-equal, others by up to {far:.1g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--answer-ms", type=float, default=10.0)
    parser.add_argument("--processes", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--size", choices=SIZES, default="20m")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    arguments = parser.parse_args()
    config, rng = qwen3(arguments.size), random.Random(0)
    dtype = DTYPES[arguments.dtype]
    engine = VLLMEngine(config, dtype, max_model_len=arguments.prompt + arguments.turns * 512)
    engine.load_weights(random_weights(config, dtype).items(), version=0)
    requests = []
    for number in range(arguments.episodes // 4):
        ids = tuple(rng.randrange(1, config.vocab_size) for _ in range(arguments.prompt))
        problem = Prompt(number, ids, "", "", {"seconds": arguments.answer_ms / 1e3})
        requests.append(Request(number, ids, 4, seed=number, problem=problem))
    list(engine.generate(requests[:4], Sampling(4)))  # the first steps are slow
    print("| processes | cache | seconds | wait, s | share | beside the first row |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "slow.py").write_text(SLOW)
        first: list[Response] = []
        rows = [(count, engine) for count in arguments.processes] + [(arguments.processes[0], Forgetful(engine))]
        for processes, each in rows:
            found, seconds, waited = played(each, requests, folder, processes, arguments.turns, config.vocab_size)
            assert not any(response.score.error for response in found)
            first = first or found
            kind = "kept" if each is engine else "reset each turn"
            print(
                f"| {processes} | {kind} | {seconds:.1f} | {waited:.2f} | {waited / seconds:.1%} | "
                f"{difference(first, found)} |",
                flush=True,
            )
    engine.close()


if __name__ == "__main__":
    main()

"""A run that takes seconds: two layers, four problems per step. All parts are real but small.

The task is to repeat a digit. With a vocabulary of eight and answers of two tokens a model of random weights is right
now and then, so that there are rewards to learn from at once.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from examples.quickstart import arithmetic
from megatron_rft.launching.hangs import descendants
from megatron_rft.plan.vllm import unusable
from megatron_rft.utils.end_with_parent import children
from megatron_rft.utils.processes import process_state
from tests.fork_server import ENVIRONMENT, Forked, ForkedVLLM

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ("-m", "megatron_rft")
RECIPE = {
    "trainer": "rl",
    "run": {"steps": 6, "seed": 3},
    "model": {"precision": "fp32", "initialise": "random"},
    "data": {
        "max_prompt_tokens": 8,
    },
    "batching": {"micro_batch_tokens": 64},
    "rollout": {"engine": "hf", "prompts_per_step": 4, "group_size": 8, "max_response_tokens": 2},
    "algorithm": {"name": "grpo", "kl_coefficient": 0.01, "mini_batch_prompts": 2},
    "optimizer": {"lr": 1e-2},
    "checkpoint": {"every": 2},
}


def write_model(folder: Path) -> None:
    """Configuration and tokenizer of a model with a vocabulary of eight: pad, end, unknown and the digits 0 to 4."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *"01234"])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    arithmetic.qwen3_config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=8, num_attention_heads=4, head_dim=8
    ).save_pretrained(folder)


def make_mixture(folder: Path) -> None:
    """Give the layers of the model in `folder` four experts each."""
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True)
    kind = dict(model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"])
    path = folder / "model/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | experts | kind))


def write_data(path: Path, rows: int) -> None:
    digits = [f"{i % 5}" for i in range(rows)]
    path.write_text(
        "".join(json.dumps({"question": d * (1 + i % 3), "answer": d}) + "\n" for i, d in enumerate(digits))
    )


def write_recipe(folder: Path, **sections: dict) -> Path:
    """Write the tiny recipe and a model folder next to it; keyword arguments are merged into its sections."""
    recipe = {name: dict(value) if isinstance(value, dict) else value for name, value in RECIPE.items()}
    for name, value in sections.items():
        recipe[name] = recipe.get(name, {}) | value if isinstance(value, dict) else value
    recipe["model"].setdefault("path", str(folder / "model"))
    recipe["run"].setdefault("output_dir", str(folder / "run"))
    recipe["data"] = {"train": str(folder / "train.jsonl"), "test": str(folder / "test.jsonl")} | recipe["data"]
    if not (folder / "model").exists():
        write_model(folder / "model")
        write_data(folder / "train.jsonl", 64)
        write_data(folder / "test.jsonl", 10)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def start(
    recipe: Path,
    *arguments: str,
    command: str = "train",
    program: tuple[str, ...] = PROGRAM,
    forked: bool = True,
    stdout: int | IO = subprocess.PIPE,
    **environment: str,
) -> subprocess.Popen:
    """`megatron-rft train` in its own process group, from the fork server or in a new interpreter."""
    asked = " ".join([recipe.read_text() if recipe.is_file() else "", *arguments])
    vllm = unusable() is None and re.search("engine[:=] ?vllm", asked)
    return ((ForkedVLLM if vllm else Forked) if forked else subprocess.Popen)(
        [sys.executable, *program, command, str(recipe), *arguments],
        env=os.environ | ENVIRONMENT | environment,
        stdout=stdout,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def train(recipe: Path, *arguments: str, timeout: float = 3600, **named) -> tuple[int, str]:
    """Exit status and output."""
    process = start(recipe, *arguments, **named)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill(process)
        raise AssertionError(f"not done after {timeout} s\n{process.communicate()[0][-3000:]}") from None
    return process.returncode, output


def kill(process: subprocess.Popen) -> None:
    """Kill the process group with -9; the process may already have ended."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def wait_until(condition: Callable[[], bool], process: subprocess.Popen | None = None, seconds: float = 600) -> bool:
    """Whether `condition` became true before `process` ended."""
    deadline = time.monotonic() + seconds
    while True:
        ended = process is not None and process.poll() is not None  # read before the condition
        if condition():
            return True
        if ended:
            return False
        assert time.monotonic() < deadline, f"waited {seconds} s in vain"
        time.sleep(0.01)


def freeze(process: subprocess.Popen, below: bool = True) -> bool:
    """Stop the process, and with `below` what it started, until `thaw`. Returns False if it has ended."""
    if process.poll() is not None:
        return False
    os.kill(process.pid, signal.SIGSTOP)
    happened = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    if happened.si_code != os.CLD_STOPPED:
        return False
    return not below or wait_until(lambda: stopped_below(process.pid))


def stopped_below(pid: int) -> bool:
    """Stop all that a process started. Whether all have stopped: some may be writing, or starting others, still."""
    signal_below(pid, signal.SIGSTOP)
    return all(process_state(each) in ("T", "t", "Z", "X", "") for each in descendants(pid))


def thaw(process: subprocess.Popen) -> None:
    signal_below(process.pid, signal.SIGCONT)
    process.send_signal(signal.SIGCONT)


def signal_below(pid: int, number: int) -> None:
    """Signal all that a process started, parents first: one that is stopped starts no others."""
    for child in children(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)
        signal_below(child, number)


def metrics(run: Path) -> list[dict]:
    """The whole lines of the log. The run may be writing another one."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().split("\n")[:-1]]

"""What programs (environment.kind=program) cost and leave: processor time, memory, processes, files, threads.

    python tools/bench/programs.py [--episodes 1000] [--at-once 256] [--turns 2]

The program is a Python script that asks by plain chat requests and leaves a process behind; the policy's texts are made
up, so no engine computes. Prints a row for each tenth part of the episodes: processor milliseconds of an episode, with
its program and all that it starts, and what this process has after them. Fails if a folder or an open episode is left.
"""

import argparse
import os
import sys
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path

import psutil
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_rft.config.environment import Program
from megatron_rft.environments.process import EnvironmentProcesses
from megatron_rft.environments.programs import Programs
from megatron_rft.environments.script import Script
from megatron_rft.environments.template import Template
from megatron_rft.inference.engine import Request, Sampling
from megatron_rft.records import Prompt

SMALLEST = "--episodes 20 --at-once 4"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
AGENT = """
import json, os, sys, urllib.request
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
messages = [{"role": "user", "content": json.load(open(os.environ["MEGATRON_RFT_ROW"]))["question"]}]
for turn in range(int(sys.argv[1])):
    request = urllib.request.Request(url, json.dumps({"messages": messages}).encode(), headers)
    message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages += [message, {"role": "user", "content": "and then?"}]
os.system("sleep 600 &")
open("answer.txt", "w").write(message["content"])
"""


def player(tokenizer: PreTrainedTokenizerFast, at_once: int, turns: int, folder: Path) -> Programs:
    (folder / "agent.py").write_text(AGENT)
    command = [sys.executable, str(folder / "agent.py"), str(turns)]
    options = Program(kind="program", command=command, max_turns=turns, programs=at_once, episode_timeout_s=600)
    template = Template(tokenizer, (tokenizer.eos_token_id,))
    processes = EnvironmentProcesses(options.own_options(), 1, 600, folder / "log")
    script = Script(lambda text: [*tokenizer.encode(text), tokenizer.eos_token_id], ["go on"])
    return Programs(script, processes, template, str, options.name, turns, None, options=options)


def byte_tokenizer(chat_template: str, *more: str) -> PreTrainedTokenizerFast:
    """A token for each byte, <|im_start|>, <|im_end|> and `more` control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|im_start|>", "<|im_end|>", *more])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", chat_template=chat_template)


def requests(tokenizer: PreTrainedTokenizerFast, first: int, count: int) -> list[Request]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "problem"}], tokenize=False, add_generation_prompt=True
    )
    ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    return [
        Request(i, ids, 1, seed=first + i, problem=Prompt(first + i, ids, text, "", {}, "problem"))
        for i in range(count)
    ]


def left() -> dict[str, int]:
    """Of this process: what it has."""
    me = psutil.Process()
    return {
        "processes": len(me.children(recursive=True)),
        "files": me.num_fds(),
        "threads": threading.active_count(),
        "MiB": me.memory_info().rss >> 20,
    }


def processor_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def row(*cells: object) -> None:
    print("|", " | ".join(str(cell) for cell in cells), "|", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=256)
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args(arguments)
    tokenizer, part = byte_tokenizer(CHATML), max(1, options.episodes // 10)
    names = ("episodes", "seconds", "CPU ms", *left())
    row(*names)
    row(*["---"] * len(names))
    row(0, "", "", *left().values())
    with tempfile.TemporaryDirectory() as folder:
        programs = player(tokenizer, options.at_once, options.turns, Path(folder))
        with closing(programs):
            for first in range(0, options.episodes, part):
                clock, used = time.perf_counter(), processor_seconds()
                for group in programs.generate(requests(tokenizer, first, part), Sampling(2000)):
                    assert group.responses[0].score is None, group.responses[0].score
                seconds, used = time.perf_counter() - clock, processor_seconds() - used
                row(first + part, f"{seconds:.1f}", f"{1e3 * used / part:.0f}", *left().values())
                assert (
                    not any(programs.folder.iterdir()) and not programs.world.endpoint.episodes and not programs.living
                )
        assert not programs.folder.exists()
    row("closed", "", "", *left().values())


if __name__ == "__main__":
    main()

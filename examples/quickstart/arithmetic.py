r"""The task of the quickstart: chains of arithmetic with worked steps, generated without a download. `rows` is the
function that recipes name: `data.train=examples/quickstart/arithmetic.py:rows`.

    question  "Start with 3 (1) +5 (2) -6 (3) *2"
    answer    "3 (1) +5=8 (2) -6=2 (3) *2=4\n#### 4"           (level 3: three steps)

Rows have GSM8K's fields and are a pure function of (split, size, seed, levels). A hash of its question, independent
of the seed, assigns a problem to one split, so train, validation and test never share one. The split
"demonstrations" has training problems with imperfect work: each step is wrong with probability SLIP, and the work
continues from the wrong number. A model warm-started on them knows the format and makes such slips; training on the
verifier's reward removes them. In "hinted" the work also often leaves out the last step (HASTE); but half of the
problems are preceded by their correct work, and are then worked to the end with few slips (HINTED_SLIP). A model
warm-started on those improves with a hint, as a self-teacher must. In "refining" half of the problems come with
imperfect work of both kinds (a share COPIED of them with correct work) and the word Refine; the answer is then
correct work, with few slips. A model warm-started on those can refine: it copies correct work and corrects mistakes.
"""

import hashlib
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

from megatron_rft.utils.errors import DataError

SPLITS = {name: range(2, 10) for name in ("train", "demonstrations", "hinted", "refining")}
SPLITS |= {"validation": range(1, 2), "test": range(0, 1)}
SIZES = {"train": 8192, "demonstrations": 8192, "hinted": 16384, "refining": 16384, "validation": 256, "test": 500}
LEVELS = (3, 4, 5, 6)  # steps of a problem
LARGEST = 10  # right intermediate values are 0..LARGEST
SLIP = 0.15
HINTED_SLIP = 0.03
HASTE = 0.5
COPIED = 0.3
PROMPT_TEMPLATE = "{question}\n"


def rows(split: str, size: int | None = None, seed: int = 0, levels: tuple[int, ...] = LEVELS) -> list[dict[str, Any]]:
    """`size` different problems of a split as {"question", "answer", "level"}, levels in turn."""
    if split not in SPLITS:
        raise DataError(f"arithmetic has no split {split!r}, but {', '.join(SPLITS)}")
    size = SIZES[split] if size is None else size
    rng = random.Random(f"{split}/{seed}")
    slip = SLIP if split in ("demonstrations", "hinted", "refining") else 0.0
    problems: dict[str, dict[str, Any]] = {}
    tries = 0
    while len(problems) < size:
        tries += 1
        if tries > 100 * (size + 100):
            raise DataError(f"arithmetic has fewer than {size} different {split} problems of levels {list(levels)}")
        level = levels[len(problems) % len(levels)]
        start, steps = _problem(rng, level)
        question = _question(start, steps)
        bucket = int.from_bytes(hashlib.sha256(question.encode()).digest()[:8], "big") % 10
        if bucket in SPLITS[split] and question not in problems:
            done = steps[:-1] if split in ("hinted", "refining") and rng.random() < HASTE else steps
            problems[question] = {"question": question, "answer": _work(start, done, slip, rng), "level": level}
            if split == "hinted" and len(problems) // len(levels) % 2:  # half of each level
                hint, answer = (_work(start, steps, rate, rng) for rate in (0.0, HINTED_SLIP))
                problems[question] |= {"question": f"{hint}\n\n{question}", "answer": answer}
            if split == "refining" and len(problems) // len(levels) % 2:
                work = _work(start, steps, 0.0, rng) if rng.random() < COPIED else problems[question]["answer"]
                answer = _work(start, steps, HINTED_SLIP, rng)
                problems[question] |= {"question": f"{question}\n{work}\nRefine:", "answer": answer}
    return list(problems.values())


def _problem(rng: random.Random, level: int) -> tuple[int, list[tuple[str, int]]]:
    """A start and `level` operations whose correct values stay within 0..LARGEST."""
    start = value = rng.randint(1, LARGEST)
    steps = []
    for _ in range(level):
        operator, operand = rng.choice(_allowed(value))
        steps.append((operator, operand))
        value = apply(value, operator, operand)
    return start, steps


@cache
def _allowed(value: int) -> list[tuple[str, int]]:
    sums = [("+", n) for n in range(1, 10) if value + n <= LARGEST]
    differences = [("-", n) for n in range(1, 10) if value - n >= 0]
    return sums + differences + [("*", n) for n in (2, 3) if 0 < value * n <= LARGEST]


def apply(value: int, operator: str, operand: int) -> int:
    return {"+": value + operand, "-": value - operand, "*": value * operand}[operator]


def _question(start: int, steps: list[tuple[str, int]]) -> str:
    return f"Start with {start}" + "".join(
        f" ({number}) {operator}{operand}" for number, (operator, operand) in enumerate(steps, start=1)
    )


def _work(start: int, steps: list[tuple[str, int]], slip: float, rng: random.Random) -> str:
    text, value = str(start), start
    for number, (operator, operand) in enumerate(steps, start=1):
        value = apply(value, operator, operand)
        if rng.random() < slip:
            value = slipped(value, rng)
        text += f" ({number}) {operator}{operand}={value}"
    return f"{text}\n#### {value}"


def slipped(value: int, rng: random.Random) -> int:
    """A wrong result, off by 1 or 2 and not negative."""
    return value + rng.choice((1, 2) if value < 2 else (-2, -1, 1, 2))


# ------------------------------------------------------------------------------------- tokenizer and model folder

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
PIECES = ("Start with ", *(f" ({number}) " for number in range(1, 10)), "\n#### ")
NUMBERS = tuple(str(number) for number in range(10, 100))
OPERATIONS = tuple(f"{operator}{operand}" for operator in "+-*" for operand in range(1, 10))
CHARACTERS = ("\n", *(chr(code) for code in range(32, 127)))
VOCABULARY_SIZE = 256  # more than there are (227): tensor parallelism divides it
TINY = {
    "vocab_size": VOCABULARY_SIZE, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
    "pad_token_id": 0, "eos_token_id": 1, "architectures": ["Qwen3ForCausalLM"],
}  # fmt: skip


def tokenizer():
    """A tokenizer of the task's phrases and single ASCII characters; text comes back from its ids unchanged."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {piece: i for i, piece in enumerate((PAD, EOS, UNKNOWN, *PIECES, *CHARACTERS, *NUMBERS, *OPERATIONS))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(
        Regex("|".join(re.escape(p) for p in PIECES) + r"|[+*-][1-9](?![0-9])|[1-9][0-9]|[\s\S]"), "isolated"
    )
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN, clean_up_tokenization_spaces=False
    )


def qwen3_config(**sizes):
    """A Qwen3 of about 1 M parameters; `sizes` are other fields of transformers' Qwen3Config."""
    from transformers import Qwen3Config

    return Qwen3Config(**(TINY | sizes))


def write_model_folder(folder: str | Path, **config) -> Path:
    """config.json and tokenizer of the model to train, without weights (`model.initialise: random`)."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    qwen3_config(**config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder

"""The data sets with an adapter: their names on the Hugging Face hub, and the reward that grades each. No torch.

`megatron_rft/data/adapters` has the adapters, which turn raw rows into prompts.
"""

import re
from dataclasses import dataclass
from typing import Literal

RewardKind = Literal["math", "code", "tool", "choice", "model"]

CODE = re.compile(r".+\.py:\w+|session:.+")  # a function that makes rows
HUB = "hub:"
HUB_NAME = re.compile(r"hub:(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
TABLES = (".parquet", ".arrow")
TEXTS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt")  # also compressed, with .gz
SLICE = r"\[(-?\d+%)?:(-?\d+%)?\]|\[(-?\d+)?:(-?\d+)?\]"
PART = re.compile(rf"(?P<name>[^][+]+)(?P<slice>{SLICE})?")  # of a split: train, or train[:80%]
SUFFIXES = (*TABLES, *TEXTS, *(f"{suffix}.gz" for suffix in TEXTS))  # of the files that a data set is read from
READ = f"{', '.join(TABLES + TEXTS)} or (text) .gz"  # the same, in a sentence
SAVED = "state.json"  # in a folder that save_to_disk wrote: names its files


def suffix_of(path: str) -> str | None:
    """The suffix of SUFFIXES that a path has, in any case."""
    return next((suffix for suffix in SUFFIXES if path.lower().endswith(suffix)), None)


def split_parts(split: str) -> list[tuple[str, str | None]]:
    """ "train[:80%]+test" -> [(train, [:80%]), (test, None)]. Raises ValueError."""
    parts = []
    for part in split.split("+"):
        if (match := PART.fullmatch(part.strip())) is None:
            raise ValueError(f"{part!r} is no split; a slice is train[:80%], train[80%:] or train[:1000]")
        parts.append((match["name"], match["slice"]))
    return parts


@dataclass(frozen=True)
class Known:
    """`adapter` is MODULE.FUNCTION under data/adapters; `hub` is the default path; `subset` and `files` select its
    files, as in a recipe."""

    adapter: str
    reward: RewardKind
    hub: str | None = None
    subset: str | None = None
    files: str | None = None
    rules: str | None = None  # the reward's rule set, if it has several

    @property
    def template(self) -> str | None:
        """The default name in TEMPLATES. Questions of other kinds state the answer's format themselves."""
        return "boxed" if self.reward == "math" else None


DATASETS = {
    "gsm8k": Known("mathematics.gsm8k", "math", "openai/gsm8k", subset="main"),
    "math": Known("mathematics.problem", "math", "EleutherAI/hendrycks_math"),
    "math500": Known("mathematics.problem", "math", "HuggingFaceH4/MATH-500"),
    "aime24": Known("mathematics.problem", "math", "HuggingFaceH4/aime_2024"),
    "aime25": Known("mathematics.problem", "math", "math-ai/aime25"),
    "amc23": Known("mathematics.problem", "math", "math-ai/amc23"),
    "minerva": Known("mathematics.problem", "math", "math-ai/minervamath"),
    "olympiadbench": Known("mathematics.problem", "math", "Hothan/OlympiadBench", subset="OE_TO_maths_en_COMP"),
    "gaokao2023en": Known("mathematics.problem", "math", "MARIO-Math-Reasoning/Gaokao2023-Math-En"),
    "math_perturb": Known("mathematics.problem", "math"),
    "apps": Known("code.apps", "code", "codeparrot/apps"),
    "taco": Known("code.apps", "code", "BAAI/TACO"),
    "humaneval": Known("code.humaneval", "code", "openai/openai_humaneval"),
    "humaneval_plus": Known("code.humaneval", "code", "evalplus/humanevalplus"),
    "mbpp": Known("code.mbpp", "code", "google-research-datasets/mbpp", subset="full"),
    "mbpp_plus": Known("code.mbpp", "code", "evalplus/mbppplus"),
    "livecodebench": Known("code.livecodebench", "code", "livecodebench/code_generation_lite", files="test*.jsonl"),
    "rlla": Known("tools.rlla", "tool", "emrecanacikgoz/ToolRL", rules="rlla"),
    "api_bank": Known(
        "tools.api_bank", "tool", "liminghao1630/API-Bank", files="test-data/level-*-api.json", rules="rlla"
    ),
    "sciknoweval": Known("text.sciknoweval", "choice", "hicai-zju/SciKnowEval", subset="v2"),
    "prompt_collection": Known("text.prompt_collection", "model", "OpenRLHF/prompt-collection-v0.1"),
}

TEMPLATES = {
    # The suffix of the rows that PIPO's authors trained on.
    "boxed": "{question} Let's think step by step and output the final answer within \\boxed{{}}.",
    # fpa.txt B.5, figure 7.
    "fpa": "Solve this math problem step by step. At the end, make sure to finish the calculation and state the answer "
    "exactly once in the following format: The final answer is \\boxed{{X}}, where X is your final answer.\n"
    "Q:{question}\nA:",
}

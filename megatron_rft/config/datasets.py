"""The data sets with an adapter: their names on the Hugging Face hub, and the reward that grades each. No torch.

The adapters, which turn raw rows into prompts, have the same names in `megatron_rft/data/adapters`.
"""

import re
from dataclasses import dataclass
from typing import Literal

RewardKind = Literal["math", "code", "tool", "choice", "model"]

ARITHMETIC = "arithmetic"  # generated, nothing to download
HUB = "hub:"
HUB_NAME = re.compile(r"hub:(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
SUFFIXES = (".parquet", ".jsonl", ".json", ".arrow", ".csv")  # of the files that a data set is read from


@dataclass(frozen=True)
class Known:
    """`hub` is the default path; `subset` and `files` select its files, as in a recipe."""

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
    "gsm8k": Known("math", "openai/gsm8k", subset="main"),
    "math": Known("math", "EleutherAI/hendrycks_math"),
    "math500": Known("math", "HuggingFaceH4/MATH-500"),
    "aime24": Known("math", "HuggingFaceH4/aime_2024"),
    "aime25": Known("math", "math-ai/aime25"),
    "amc23": Known("math", "math-ai/amc23"),
    "minerva": Known("math", "math-ai/minervamath"),
    "olympiadbench": Known("math", "Hothan/OlympiadBench", subset="OE_TO_maths_en_COMP"),
    "gaokao2023en": Known("math", "MARIO-Math-Reasoning/Gaokao2023-Math-En"),
    "math_perturb": Known("math"),
    "apps": Known("code", "codeparrot/apps"),
    "taco": Known("code", "BAAI/TACO"),
    "humaneval": Known("code", "openai/openai_humaneval"),
    "humaneval_plus": Known("code", "evalplus/humanevalplus"),
    "mbpp": Known("code", "google-research-datasets/mbpp", subset="full"),
    "mbpp_plus": Known("code", "evalplus/mbppplus"),
    "livecodebench": Known("code", "livecodebench/code_generation_lite", files="test*.jsonl"),
    "leetcode": Known("code", "newfacade/LeetCodeDataset", files="LeetCodeDataset-*.jsonl"),
    "rlla": Known("tool", "emrecanacikgoz/ToolRL", rules="rlla"),
    "bfcl": Known("tool", "gorilla-llm/Berkeley-Function-Calling-Leaderboard", files="BFCL_*.json", rules="bfcl"),
    "bfcl_multi_turn": Known(
        "tool", "gorilla-llm/Berkeley-Function-Calling-Leaderboard", files="BFCL_*_multi_turn_base.json", rules="bfcl"
    ),
    "api_bank": Known("tool", "liminghao1630/API-Bank", files="test-data/level-*-api.json", rules="rlla"),
    "sdpo_tools": Known("tool", rules="exact"),
    "sciknoweval": Known("choice", "hicai-zju/SciKnowEval", subset="v2"),
    "prompt_collection": Known("model", "OpenRLHF/prompt-collection-v0.1"),
}

TEMPLATES = {
    # The suffix of the rows that PIPO's authors trained on.
    "boxed": "{question} Let's think step by step and output the final answer within \\boxed{{}}.",
    # fpa.txt B.5, figure 7.
    "fpa": "Solve this math problem step by step. At the end, make sure to finish the calculation and state the answer "
    "exactly once in the following format: The final answer is \\boxed{{X}}, where X is your final answer.\n"
    "Q:{question}\nA:",
}

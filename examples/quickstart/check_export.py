"""Loads the trained model with transformers, asks it in plain text, and grades its answers.

usage: check_export.py FOLDER
"""

import sys

import arithmetic
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_rft.data.prompts import prompt_set
from megatron_rft.data.rendering import PromptFormat
from megatron_rft.rewards.math import MathReward

PROBLEMS = 100


def main(folder: str) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    form = PromptFormat(prompt_template=arithmetic.PROMPT_TEMPLATE)
    prompts = prompt_set(arithmetic.rows("test", PROBLEMS), tokenizer, form, "arithmetic").prompts
    inputs = tokenizer([p.text for p in prompts], return_tensors="pt", padding=True, padding_side="left")
    with torch.inference_mode():
        ids = model.generate(**inputs, max_new_tokens=64, do_sample=False)
    texts = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    reward = MathReward()
    scores = [score.reward for score in reward(prompts, texts)]
    reward.close()
    print(f"{prompts[0].text}{texts[0]}")
    print(f"{folder} in transformers, greedy: {sum(scores):.0f} of {PROBLEMS} right")


if __name__ == "__main__":
    main(sys.argv[1])

"""Loads the trained model with transformers, asks it through its chat template, and grades its answers.

usage: check_export.py FOLDER PROBLEMS.jsonl
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_rft.records import Prompt
from megatron_rft.rewards.math import MathReward

PROBLEMS = 100
QUESTION = "What is {question}? Answer with the number only."  # as in common.yaml


def main(folder: str, problems: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    rows = [json.loads(line) for line in Path(problems).read_text().splitlines()[:PROBLEMS]]
    chats = [[{"role": "user", "content": QUESTION.format(**row)}] for row in rows]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
    )
    with torch.inference_mode():
        ids = model.generate(**inputs, max_new_tokens=48, do_sample=False)
    texts = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    reward = MathReward()
    prompts = [Prompt(i, (), QUESTION.format(**row), row["answer"]) for i, row in enumerate(rows)]
    right = sum(score.reward for score in reward(prompts, texts))
    reward.close()
    for row, text in list(zip(rows, texts, strict=True))[:3]:
        print(f"{row['question']} -> {text}")
    print(f"{folder} in transformers, greedy: {right:.0f} of {len(rows)} right")


if __name__ == "__main__":
    main(*sys.argv[1:])

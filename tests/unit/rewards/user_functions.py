"""Rewards for tests; their processes import a copy of this file."""

import asyncio
import os
import random
import signal
import sys
import time

import numpy as np

from megatron_rft.responses import Score

calls = []
now, most = 0, 0


def right(prompt, text):
    return prompt.answer in text


def scored(prompt, text):
    return Score(0.5, reason="half", correct=False)


def nothing(prompt, text):
    os._exit(3)


def numpys(prompt, text):
    return Score(np.float32(1), correct=np.bool_(True), details={"parts": np.arange(1.0, 3.0), "n": np.int64(3)})


def numpy_number(prompt, text):
    return np.float16(0.5)


def broken(prompt, text):
    calls.append(text)
    raise ZeroDivisionError(f"tried {len(calls)} times")


def exits(prompt, text):
    sys.exit(4)


def interrupts(prompt, text):
    raise KeyboardInterrupt


def big(prompt, text):
    return len(bytearray(1 << 30)) / (1 << 30)


def alarms(prompt, text):
    """As libraries do that limit their time."""
    signal.alarm(10)
    calls.append(text)
    signal.alarm(0)
    return len(calls)


def dies(prompt, text):
    if text == "d":
        os._exit(7)
    return 1.0


async def dies_later(prompt, text):
    await asyncio.sleep(0.05)
    return dies(prompt, text)


def hangs(prompt, text):
    if text == "h":
        time.sleep(60)
    return 1.0


async def waits(prompt, text):
    await asyncio.sleep(60 if text == "h" else 0)
    return 1.0


async def blocks(prompt, text):
    await asyncio.sleep(0)
    return hangs(prompt, text)


async def most_at_once(prompt, text):
    global now, most
    now += 1
    most = max(most, now)
    await asyncio.sleep(0.3)
    now -= 1
    return most


def many(prompts, texts):
    return [Score(p.answer in text, reason=f"{len(texts)}") for p, text in zip(prompts, texts, strict=True)]


async def dies_with_lists(prompts, texts):
    await asyncio.sleep(0.05)
    if "d" in texts:
        os._exit(7)
    return [1.0] * len(texts)


async def many_later(prompts, texts):
    await asyncio.sleep(0)
    return np.array([p.answer in text for p, text in zip(prompts, texts, strict=True)])


def broken_list(prompts, texts):
    return 1 / 0


def odd(prompt, text):
    return None


def text(prompt, text):
    return "1.0"


def words(prompt, text):
    return Score("1.0")


def surrogate(prompt, text):
    return Score(1.0, reason="\ud800")


def a_set(prompt, text):
    return Score(1.0, details={"seen": {1, 2}})


def few(prompts, texts):
    return [1.0]


def a_dict(prompt, text):
    return {"score": 1.0}


def draws(prompt, text):
    return random.random() + np.random.rand()


def one(text):
    return 1.0


def as_trl(completions, answer, **columns):
    assert columns["level"] == [3, 3] and columns["prompts"] == ["2+2=", "2+2="]
    return [float(a in c) for a, c in zip(answer, completions, strict=True)]


def as_trl_chat(prompts, completions, answer):
    assert prompts[0] == [{"role": "user", "content": "2+2="}]
    return [float(a in c[0]["content"]) for a, c in zip(answer, completions, strict=True)]


async def as_trl_later(completions, answer, **columns):
    return as_trl(completions, answer, **columns)


def as_trl_solution(completions, solution):
    return [1.0] * len(completions)


def as_trl_none(completions, **columns):
    return [None] * len(completions)


def as_verl(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "" and extra_info["level"] == 3
    right = ground_truth in solution_str
    return {"score": float(right), "acc": right, "pred": solution_str}


def as_verl_number(solution_str, ground_truth, **others):
    return ground_truth in solution_str

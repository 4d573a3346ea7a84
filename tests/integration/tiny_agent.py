"""A program for the tiny run, and its score: `python tiny_agent.py [time] [PLAYS]`.

A conversation of two turns, two sub-agents in parallel, and a compacted history: five turns in four segments. With
`time` it does not repeat itself. It appends its seed to the file PLAYS, and then takes its time before its last turn.
What differs is the time, or with PLAYS, for sure, how often its seed is there.
"""

import json
import os
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def ask(messages: list[dict]) -> dict:
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    body = json.dumps({"messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def play(question: str, begun: int) -> list[str]:
    messages = [user(question)]
    for said in "01":
        messages += [ask(messages), user(said)]
    first = f"{begun & 255:08b}" if "time" in sys.argv else "2"
    with ThreadPoolExecutor(2) as threads:
        others = list(threads.map(ask, [[user(first)], [user("3")]]))
    time.sleep(0.2 if sys.argv[1:] else 0.0)
    answers = [messages[1], messages[3], *others, ask([user("44")])]
    return [answer["content"] for answer in answers]


def grade(row: dict, folder: Path, status: int, conversation: list[dict]) -> float:
    """How many answers are a zero."""
    answers = json.loads((folder / "answers.json").read_text())
    return sum(answer == "0" for answer in answers) / len(answers)


if __name__ == "__main__":
    begun = time.time_ns() >> 10
    if sys.argv[1:] and sys.argv[-1] != "time":
        with open(sys.argv[-1], "a+") as plays:
            plays.write(os.environ["MEGATRON_RFT_SEED"] + "\n")
            plays.seek(0)
            begun = plays.read().split().count(os.environ["MEGATRON_RFT_SEED"])
    row = json.loads(Path(os.environ["MEGATRON_RFT_ROW"]).read_text())
    Path("answers.json").write_text(json.dumps(play(row["question"], begun)))

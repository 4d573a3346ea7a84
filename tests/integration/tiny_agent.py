"""A program for the tiny run, and its score: `python tiny_agent.py [time] [PLAYS]`.

A conversation of two turns, two sub-agents in parallel, and a compacted history: five turns in four segments. With
`time` it does not repeat itself. It appends its seed to the file PLAYS, and then takes its time before its last turn.
What differs is the time, or with PLAYS, for sure, how often its seed is there.

It imports little, because each episode starts it. The programs of tests/unit/environments ask with urllib.request.
"""

import http.client
import json
import os
import sys
import threading
import time
from urllib.parse import urlsplit


def ask(messages: list[dict]) -> dict:
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    url = urlsplit(os.environ["OPENAI_BASE_URL"] + "/chat/completions")
    connection = http.client.HTTPConnection(url.netloc)
    connection.request("POST", url.path, json.dumps({"messages": messages}), headers)
    with connection.getresponse() as answer:
        return json.load(answer)["choices"][0]["message"]


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def play(question: str, begun: int) -> list[str]:
    messages = [user(question)]
    for said in "01":
        messages += [ask(messages), user(said)]
    first = f"{begun & 255:08b}" if "time" in sys.argv else "2"
    others: dict[str, dict] = {}
    texts = first, "3"
    threads = [threading.Thread(target=lambda text: others.update({text: ask([user(text)])}), args=[t]) for t in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    time.sleep(0.2 if sys.argv[1:] else 0.0)
    answers = [messages[1], messages[3], *(others[text] for text in texts), ask([user("44")])]
    return [answer["content"] for answer in answers]


def grade(row: dict, folder: os.PathLike, status: int, conversation: list[dict]) -> float:
    """How many answers are a zero."""
    with open(os.path.join(folder, "answers.json")) as file:
        answers = json.load(file)
    return sum(answer == "0" for answer in answers) / len(answers)


if __name__ == "__main__":
    begun = time.time_ns() >> 10
    if sys.argv[1:] and sys.argv[-1] != "time":
        with open(sys.argv[-1], "a+") as plays:
            plays.write(os.environ["MEGATRON_RFT_SEED"] + "\n")
            plays.seek(0)
            begun = plays.read().split().count(os.environ["MEGATRON_RFT_SEED"])
    with open(os.environ["MEGATRON_RFT_ROW"]) as file:
        row = json.load(file)
    answers = play(row["question"], begun)
    with open("answers.json", "w") as file:
        json.dump(answers, file)

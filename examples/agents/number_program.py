"""The number game of number_game.py as a program: the game asks the policy by plain chat requests."""

import json
import os
import urllib.request
from pathlib import Path
from typing import Any


def chat(messages: list[dict[str, str]]) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    body = json.dumps({"model": os.environ["MEGATRON_RFT_MODEL"], "messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]


def play(number: str) -> list[str]:
    """Returns the guesses. A turn that was cut off is none."""
    messages, guesses = [{"role": "user", "content": "?"}], []
    for _ in range(3):
        choice = chat(messages)
        if choice["finish_reason"] != "stop":
            break
        guess = choice["message"]["content"]
        guesses.append(guess)
        if guess == number or guess not in tuple("0123456"):
            break
        messages += [choice["message"], {"role": "user", "content": ">" if number > guess else "<"}]
    return guesses


def grade(row: dict[str, Any], folder: Path, status: int, conversation: list[dict[str, Any]]) -> float:
    return float(row["answer"] in json.loads((folder / "guesses.json").read_text()))


if __name__ == "__main__":
    row = json.loads(Path(os.environ["MEGATRON_RFT_ROW"]).read_text())
    Path("guesses.json").write_text(json.dumps(play(row["answer"])))

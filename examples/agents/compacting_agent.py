"""An agent with a shell that compacts its history: when the conversation is long, the policy writes a summary, and the
agent goes on with the summary alone. Needs the package openai."""

import json
import os
import subprocess
from pathlib import Path

from openai import OpenAI

LONGEST = 4000  # characters of a conversation
RULES = "Solve the task. Write one shell command, between <run> and </run>, or the answer after 'Answer:'."


def shell(text: str) -> str:
    command = text.partition("<run>")[2].partition("</run>")[0]
    try:
        done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return "it took longer than 20 s"
    return (done.stdout + done.stderr)[-2000:]


def main(task: str) -> str:
    client, model = OpenAI(), os.environ["MEGATRON_RFT_MODEL"]

    def ask(messages: list[dict[str, str]]) -> str:
        return client.chat.completions.create(model=model, messages=messages).choices[0].message.content or ""

    start = [{"role": "system", "content": RULES}, {"role": "user", "content": task}]
    messages = list(start)
    while "<run>" in (text := ask(messages)):
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": shell(text)}]
        if sum(len(message["content"]) for message in messages) > LONGEST:
            summary = ask([*messages, {"role": "user", "content": "Summarise what you know, for yourself."}])
            messages = [*start, {"role": "user", "content": f"You have found out: {summary}"}]
    return text.rpartition("Answer:")[2].strip()


def grade(row: dict, folder: Path, status: int, conversation: list[dict]) -> float:
    answer = folder / "answer.txt"
    return float(answer.is_file() and answer.read_text() == row["answer"])


if __name__ == "__main__":
    row = json.loads(Path(os.environ["MEGATRON_RFT_ROW"]).read_text())
    Path("answer.txt").write_text(main(row["question"]))

"""An agent that asks two sub-agents in parallel for an opinion each, and then decides. Needs the package openai."""

import asyncio
import json
import os
from pathlib import Path

from openai import AsyncOpenAI

ROLES = ("You solve the task step by step.", "You look for what could be wrong in an obvious answer to the task.")


async def main(task: str) -> str:
    client, model = AsyncOpenAI(), os.environ["MEGATRON_RFT_MODEL"]

    async def ask(role: str, task: str) -> str:
        messages = [{"role": "system", "content": role}, {"role": "user", "content": task}]
        answer = await client.chat.completions.create(model=model, messages=messages)
        return answer.choices[0].message.content or ""

    opinions = await asyncio.gather(*(ask(role, task) for role in ROLES))
    decision = "\n\n".join([task, *(f"Opinion {number}: {text}" for number, text in enumerate(opinions, start=1))])
    return await ask("You read the opinions, and write the answer alone.", decision)


def grade(row: dict, folder: Path, status: int, conversation: list[dict]) -> float:
    answer = folder / "answer.txt"
    return float(answer.is_file() and answer.read_text().strip() == row["answer"])


if __name__ == "__main__":
    row = json.loads(Path(os.environ["MEGATRON_RFT_ROW"]).read_text())
    Path("answer.txt").write_text(asyncio.run(main(row["question"])))

"""An agent with a calculator, as anyone writes it with openai's client: two worked products, then the one of its row.
The recipe's reward judges its last answer."""

import json
import os
from pathlib import Path
from typing import Any

from calculator import multiply
from make_products import SHOWN, worked
from openai import OpenAI

NUMBERS = {name: {"type": "integer"} for name in ("a", "b")}
PARAMETERS = {"type": "object", "properties": NUMBERS, "required": [*NUMBERS]}
TOOLS = [{"type": "function", "function": {"name": "multiply", "description": "Multiplies.", "parameters": PARAMETERS}}]


def answer(question: str) -> str:
    client, model = OpenAI(), os.environ["MEGATRON_RFT_MODEL"]
    messages: list[Any] = [message for pair in SHOWN for message in worked(*pair)]
    messages.append({"role": "user", "content": question})
    while True:
        message = client.chat.completions.create(model=model, messages=messages, tools=TOOLS).choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message)
        for call in message.tool_calls:
            try:
                result = str(multiply(**json.loads(call.function.arguments)))
            except TypeError as error:
                result = str(error)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


if __name__ == "__main__":
    row = json.loads(Path(os.environ["MEGATRON_RFT_ROW"]).read_text())
    print(answer(row["product"]))

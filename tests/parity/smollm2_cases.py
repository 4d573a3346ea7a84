"""Four optimizer steps of SmolLM2 in fp32, on one rank: prints the loss of each, by megatron-core or transformers.

smollm2_cases.py MODEL megatron|transformers
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

STEPS, RATE = 4, 1e-5
TEXTS = [
    [("What is 17 + 25?", "17 + 25 = 42."), ("Name a colour.", "Blue."), ("What is 90 - 12?", "78")],
    [("Say hello.", "Hello! How can I help you today?"), ("What is 3 * 4?", "3 * 4 = 12.")],
]


def rows(tokenizer, step: int) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, response ids) of a step's batch."""
    end = [tokenizer.eos_token_id]
    chats = [([{"role": "user", "content": asked}], answer) for asked, answer in TEXTS[step % 2]]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat, _ in chats]
    return [(prompt, tokenizer(answer)["input_ids"] + end) for prompt, (_, answer) in zip(prompts, chats, strict=True)]


def by_megatron(folder: Path, tokenizer) -> None:
    import megatron_rft.megatron  # noqa: F401  prepares megatron-core for this host
    from megatron_rft.config import Batching, Megatron
    from megatron_rft.conversion import HFFolder, load_config
    from megatron_rft.megatron import parallel
    from megatron_rft.megatron.actor import Actor
    from megatron_rft.objectives.base import counts
    from megatron_rft.records import Batch
    from tests.made import made

    parallel.initialize(Megatron())
    config = load_config(folder)
    adam = {"lr": RATE, "weight_decay": 0.0, "clip_grad": 1.0, "use_distributed_optimizer": True}
    actor = Actor(config, Megatron(), Batching(), "fp32", optimizer=adam)
    actor.load(HFFolder(folder, config))
    for step in range(STEPS):
        batch = Batch.of(*map(list, zip(*rows(tokenizer, step), strict=True)))
        print("LOSS", actor.step(batch, made("sft").loss, counts(batch), learning_rate=RATE)["loss"], flush=True)
    parallel.shutdown()


def by_transformers(folder: Path, tokenizer) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    adam = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    for step in range(STEPS):
        found = []
        for prompt, response in rows(tokenizer, step):
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            found.append(torch.nn.functional.cross_entropy(logits, torch.tensor(response), reduction="none"))
        loss = torch.cat(found).mean()
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        print("LOSS", loss.item(), flush=True)


if __name__ == "__main__":
    model = Path(sys.argv[1])
    {"megatron": by_megatron, "transformers": by_transformers}[sys.argv[2]](model, AutoTokenizer.from_pretrained(model))

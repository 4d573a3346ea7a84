"""Writes the number game: a model with a vocabulary of thirteen, and problems. FOLDER is the argument."""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

TOKENS = ["<pad>", "<eos>", "<unk>", *"0123456", *"?<>"]


def main(folder: Path) -> None:
    """The tokenizer has one token for each character; the weights are drawn when the run starts."""
    vocabulary = {token: number for number, token in enumerate(TOKENS)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=core, **special).save_pretrained(folder / "model")
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": len(TOKENS)}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
    ends = {"pad_token_id": 0, "eos_token_id": 1, "architectures": ["Qwen3ForCausalLM"]}
    Qwen3Config(**size, **heads, **ends).save_pretrained(folder / "model")
    rows = [json.dumps({"question": "?", "answer": str(number % 7)}) + "\n" for number in range(70)]
    (folder / "numbers.jsonl").write_text("".join(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Writes a tiny Qwen2.5-VL with its tokenizer and image processor, and questions about pictures that it draws.

usage: make.py OUT

A picture has noise and one square of a colour, somewhere. The question is its colour. The rows of `shuffled.jsonl`, for
the warm start, have answers of other rows: they teach the four words, and nothing about pictures. The files `blank_*`
have the same questions about blank pictures.
"""

import base64
import io
import json
import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen2_5_VLConfig, Qwen2TokenizerFast, Qwen2VLImageProcessor

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (40, 70, 220), "yellow": (230, 210, 50)}
QUESTION = "Which colour is the square?"
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
MARKS += ["<|video_pad|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIDE = 56
ROWS = {"shuffled": 512, "train": 512, "validation": 100, "test": 200}


def tokenizer() -> Qwen2TokenizerFast:
    words = Tokenizer(models.BPE())
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    words.train_from_iterator([QUESTION, *COLOURS, "user", "assistant"] * 4, trainer)
    state = json.loads(words.to_str())["model"]
    made = Qwen2TokenizerFast(vocab=state["vocab"], merges=[tuple(merge) for merge in state["merges"]])
    made.add_special_tokens({"additional_special_tokens": MARKS})
    made.eos_token, made.pad_token, made.chat_template = "<|im_end|>", "<|endoftext|>", TEMPLATE
    return made


def write_model(folder: Path) -> None:
    words = tokenizer()
    ids = {name: words.convert_tokens_to_ids(name) for name in MARKS}
    text = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4)
    text |= dict(num_key_value_heads=2, vocab_size=-(-len(words) // 8) * 8, max_position_embeddings=512)
    text |= dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[4, 6, 6]))
    text |= dict(bos_token_id=ids["<|endoftext|>"], eos_token_id=ids["<|im_end|>"], initializer_range=0.05)
    vision = dict(depth=2, hidden_size=64, intermediate_size=128, num_heads=4, out_hidden_size=128, patch_size=14)
    vision |= dict(window_size=56, fullatt_block_indexes=[1], spatial_merge_size=2, temporal_patch_size=2)
    marks = {f"{kind}_token_id": ids[f"<|{kind}_pad|>"] for kind in ("image", "video")}
    marks |= {f"vision_{end}_token_id": ids[f"<|vision_{end}|>"] for end in ("start", "end")}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **marks)
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    for part in (config, words, Qwen2VLImageProcessor(min_pixels=SIDE**2, max_pixels=SIDE**2)):
        part.save_pretrained(folder)


def picture(colour: str, random_: random.Random) -> str:
    """A PNG in base64."""
    image = Image.frombytes("RGB", (SIDE, SIDE), bytes(random_.choices(range(90, 166), k=3 * SIDE**2)))
    x, y, size = random_.randrange(SIDE - 24), random_.randrange(SIDE - 24), random_.randrange(18, 25)
    ImageDraw.Draw(image).rectangle((x, y, x + size, y + size), fill=COLOURS[colour])
    image.save(file := io.BytesIO(), "PNG")
    return base64.b64encode(file.getvalue()).decode()


def blank() -> str:
    Image.new("RGB", (SIDE, SIDE), (127, 127, 127)).save(file := io.BytesIO(), "PNG")
    return base64.b64encode(file.getvalue()).decode()


def write_rows(folder: Path, part: str, seed: int, blanked: bool = False) -> None:
    random_ = random.Random(seed)
    names = [list(COLOURS)[number % 4] for number in range(ROWS[part])]
    answers = random_.sample(names, len(names)) if part == "shuffled" else names
    rows = [
        {"question": QUESTION, "image": blank() if blanked else picture(name, random_), "answer": answer}
        for name, answer in zip(names, answers, strict=True)
    ]
    file = folder / f"{'blank_' if blanked else ''}{part}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    write_model(out / "model")
    for seed, part in enumerate(ROWS):
        write_rows(out, part, seed)
        write_rows(out, part, seed, blanked=True)


if __name__ == "__main__":
    main()

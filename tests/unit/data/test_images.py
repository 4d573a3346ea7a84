"""Images of rows: every form of a column, their places in a prompt, and broken or hostile files."""

import base64
import io
import pickle
import runpy
import struct
import subprocess
import sys
import zlib

import pytest
import torch
from PIL import Image
from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessorPil

from megatron_rft.data.images import ImageReader, PromptImages, decoded, source_of
from megatron_rft.data.prompts import prompt_set
from megatron_rft.data.rendering import PromptFormat
from megatron_rft.utils.errors import DataError
from tests.integration.tiny import ROOT

WORDS = runpy.run_path(str(ROOT / "examples/vision/make.py"))["tokenizer"]
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|image_pad|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}|{% endfor %}"
)


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    image.save(file := io.BytesIO(), kind, **options)
    return file.getvalue()


RED = encoded(Image.new("RGB", (56, 28), "red"))
WIDE = encoded(Image.new("RGB", (84, 28), "blue"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> PreTrainedTokenizerFast:
    folder = tmp_path_factory.mktemp("model")
    made = WORDS()
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)
    Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=280 * 280).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def prompts(tokenizer, *rows, **options):
    form = PromptFormat(chat=True, image_field="image", **options)
    return prompt_set([{"answer": "x"} | row for row in rows], tokenizer, form, "rows").prompts


def image_tokens(tokenizer, prompt) -> int:
    return prompt.token_ids.count(tokenizer.convert_tokens_to_ids("<|image_pad|>"))


def test_the_process_of_a_reward_reads_them_without_torch(tokenizer):
    """Its import takes seconds, and half a gigabyte of each process."""
    (prompt,) = prompts(tokenizer, {"question": "What?", "image": RED})
    code = "import pickle, sys; images = pickle.load(sys.stdin.buffer).images; "
    code += "print(len(images.sources[0]), images.grids, 'torch' in sys.modules, 'transformers' in sys.modules); "
    code += "print(tuple(images.pixels().shape))"
    given = pickle.dumps(prompt)
    told = subprocess.run([sys.executable, "-c", code], input=given, cwd=ROOT, capture_output=True, check=True).stdout
    shape = tuple(prompt.images.pixels().shape)
    assert told.decode().splitlines() == [f"{len(RED)} {prompt.images.grids} False False", str(shape)]


def test_every_form_of_a_column(tokenizer, tmp_path):
    (tmp_path / "red.png").write_bytes(RED)
    text = base64.b64encode(RED).decode()
    path = str(tmp_path / "red.png")
    forms = [RED, path, text, f"data:image/png;base64,{text}", {"bytes": RED, "path": None}, {"path": path}, [RED]]
    forms += [base64.encodebytes(RED).decode(), f"data:image/png;base64,{base64.encodebytes(RED).decode()}"]
    found = prompts(tokenizer, *({"question": "What?", "image": form} for form in forms))
    assert {prompt.images.grids for prompt in found} == {((1, 2, 4),)}
    assert len({prompt.images.digest for prompt in found}) == len({prompt.token_ids for prompt in found}) == 1
    assert image_tokens(tokenizer, found[0]) == 2 and "image" not in found[0].fields
    assert found[0].text == "<|image_pad|>What?|" and found[0].images_key == 0


def test_pixels_are_those_of_the_processor(tokenizer):
    found = prompts(tokenizer, {"question": "a", "image": [RED, WIDE]}, {"question": "b", "image": None})
    processor = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=280 * 280)
    expected = processor(images=[decoded(RED), decoded(WIDE)], return_tensors="pt")
    images = PromptImages(found)
    assert torch.equal(images.pixels(0), expected["pixel_values"]) and images.pixels(0) is images.pixels(0)
    assert torch.equal(torch.tensor(images.grids(0)), expected["image_grid_thw"])
    assert found[1].images_key == -1 and image_tokens(tokenizer, found[1]) == 0


def test_limits_of_pixels(tokenizer):
    (small,) = prompts(tokenizer, {"question": "a", "image": WIDE}, image_pixels=(28 * 28, 28 * 28))
    (large,) = prompts(tokenizer, {"question": "a", "image": WIDE}, image_pixels=(112 * 336, 300 * 300))
    assert image_tokens(tokenizer, small) == 1 and image_tokens(tokenizer, large) >= 48


def test_images_are_where_the_marks_are(tokenizer):
    (marked,) = prompts(tokenizer, {"question": "Is <image> or <image>?", "image": [RED, WIDE]})
    assert marked.text == "Is <|image_pad|> or <|image_pad|>?|" and image_tokens(tokenizer, marked) == 5
    parts = [{"type": "text", "text": "Is "}, {"type": "image"}, {"type": "text", "text": "red?"}]
    turns = [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "Blue."}]
    messages = [*turns, {"role": "user", "content": parts}]
    (found,) = prompts(tokenizer, {"question": messages, "image": [WIDE, RED]})
    assert found.text == "<|image_pad|>|Blue.|Is <|image_pad|>red?|" and image_tokens(tokenizer, found) == 5


def test_a_rows_own_control_token_is_text(tokenizer):
    (found,) = prompts(tokenizer, {"question": "<|image_pad|>?", "image": RED})
    assert image_tokens(tokenizer, found) == 2


def png(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims to be of this size."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


FRAMES = [Image.new("RGB", (28, 28), name) for name in ("red", "blue")]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (png(60_000, 60_000), "has an image that cannot be decoded|more than"),
        (png(10_000, 10_000), "has an image of 10000 x 10000: more than 67108864 pixels"),
        (RED[: len(RED) // 2], "has an image that cannot be decoded: "),
        (encoded(Image.new("CMYK", (28, 28)), "JPEG"), "has an image in mode CMYK: save it as RGB"),
        (encoded(Image.new("RGB", (1, 1))), "has an image of 1 x 1: a side has at least 8 pixels"),
        (encoded(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]), "has an animation of 2 frames"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", "is no image of a known format"),
        (b"", "is no image of a known format"),
        ("no/such.png", "names no file, and is no base64: 'no/such.png'"),
        (7, "has int instead of an image"),
        ({"bytes": None, "path": None}, "has NoneType instead of an image"),
        (encoded(Image.new("RGB", (4000, 9))), "is refused by the model's processor: absolute aspect ratio"),
    ],
)
def test_a_broken_image_is_refused_with_row_and_column(tokenizer, value, words):
    with pytest.raises(DataError, match=f"rows: row 2: (the column 'image' )?({words})") as raised:
        prompts(tokenizer, {"question": "a", "image": RED}, {"question": "b", "image": value})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"hello", "is no image of a known format"), (b"", "is no image"), (RED[:60], "has an image that cannot be dec")],
)
def test_a_broken_file_is_named(tokenizer, tmp_path, content, words):
    file = tmp_path / "red.png"
    file.write_bytes(content)
    for value, which in ((str(file), ""), ([RED, {"path": str(file)}], "image 2 of ")):
        with pytest.raises(DataError, match=rf"rows: row 1: {which}the column 'image' \({file}\) {words}"):
            prompts(tokenizer, {"question": "a", "image": value})


@pytest.mark.parametrize("count", [90, 300, 3000, 30000])
def test_base64_of_any_length_is_no_path(count):
    assert source_of(base64.b64encode(bytes(count)).decode()) == bytes(count)


def test_the_number_of_an_image_in_a_list_is_named(tokenizer):
    with pytest.raises(DataError, match="row 1: image 2 of the column 'image' has int"):
        prompts(tokenizer, {"question": "a", "image": [RED, 7]})


@pytest.mark.parametrize(
    ("question", "images", "words"),
    [
        ("<image>?", [RED, RED], "the prompt has 1 <image>, and its column of images has 2"),
        ("<image>?", None, "the prompt has 1 <image>, and its column of images has 0"),
        ([{"role": "user", "content": [{"type": "video"}]}], RED, "a part of a message is text or an image, not"),
        ([{"role": "user", "content": [{"type": "audio"}]}], RED, "a part of a message is text or an image, not"),
    ],
)
def test_prompts_that_do_not_fit_their_images(tokenizer, question, images, words):
    with pytest.raises(DataError, match=words):
        prompts(tokenizer, {"question": question, "image": images})


def test_transparent_pixels_are_white_and_exif_turns():
    clear = decoded(encoded(Image.new("RGBA", (10, 10), (9, 9, 9, 0))))
    assert clear.mode == "RGB" and clear.getpixel((3, 3)) == (255, 255, 255)
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decoded(encoded(Image.new("RGB", (20, 10)), "JPEG", exif=exif)).size == (10, 20)


def test_a_model_without_an_image_processor(tmp_path):
    WORDS().save_pretrained(tmp_path)
    with pytest.raises(DataError, match="has no preprocessor_config.json: its model reads no images"):
        ImageReader.of(PreTrainedTokenizerFast.from_pretrained(tmp_path), "image", None, None)

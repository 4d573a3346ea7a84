"""Images of prompts, from a row's column to pixels.

A prompt keeps its images as the row has them, encoded, or by path. The model's image processor is the only source of
pixels and of the number of image tokens. PIL decodes; torchvision is not needed.
"""

import base64
import hashlib
import io
import json
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from megatron_rft.config.sections import MOST_PIXELS
from megatron_rft.data.fields import Row
from megatron_rft.responses import SHOWN
from megatron_rft.utils.errors import DataError, first_line
from megatron_rft.utils.files import read_json, write_atomically

MARK = "<image>"  # of an image's place in a text
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # PIL runs programs for some others
MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
LEAST = 8  # pixels of a side
SMALL = 160  # pixels of the longer side in the report

ALBUM = "environment/images"  # in the folder of a run or a store
SEGMENTS = 1 << 12  # more than an episode has

Source = bytes | Path
Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Pictures:
    """The images of a prompt. `grids`: their patches in time, height and width."""

    digests: tuple[str, ...]  # of each file's content
    grids: tuple[Grid, ...]
    sources: tuple[Source, ...] = field(repr=False, compare=False)
    reader: "ImageReader" = field(repr=False, compare=False)

    @property
    def digest(self) -> str:
        return self.digests[0] if len(self.digests) == 1 else hashlib.sha256("".join(self.digests).encode()).hexdigest()

    def pixels(self) -> Any:
        """A tensor [patches, width]."""
        return self.reader.process([decoded(source) for source in self.sources])["pixel_values"]

    def small(self) -> list[str]:
        """Small copies as data URLs, for the report."""
        files = [io.BytesIO() for _ in self.sources]
        for source, file in zip(self.sources, files, strict=True):
            ImageOps.contain(decoded(source), (SMALL, SMALL)).save(file, "JPEG", quality=85)
        return [f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}" for file in files]

    def urls(self) -> list[str]:
        return [f"data:image/*;base64,{base64.b64encode(encoded(source)).decode()}" for source in self.sources]


@dataclass(frozen=True)
class ImageReader:
    """Reads the images of rows. `least`, `most`: limits of the pixels to which the processor scales; None: its own."""

    folder: Path  # of the model
    token: int
    column: str
    least: int | None = None
    most: int | None = None

    @classmethod
    def of(cls, tokenizer: Any, column: str, least: int | None, most: int | None) -> "ImageReader":
        folder = Path(tokenizer.name_or_path)
        if not (folder / "preprocessor_config.json").is_file():
            raise DataError(f"data.image_field: {folder} has no preprocessor_config.json: its model reads no images")
        token = tokenizer.convert_tokens_to_ids(getattr(tokenizer, "image_token", "<|image_pad|>"))
        return cls(folder, token, column, least, most)

    def read(self, row: Row, place: Any) -> Pictures:
        """The images in the row's column. Raises DataError."""
        value = row.get(self.column)
        values = [] if value is None else value if isinstance(value, list) else [value]
        return self.pictures(values, f"{place}: ", f"the column {self.column!r}")

    def pictures(self, values: list[Any], place: str, what: str, now: bool = False) -> Pictures:
        """The images of `values`; `now`: not by path, but as the files are. Messages name `what` has them. Raises
        DataError."""
        sources, images = [], []
        for number, each in enumerate(values, 1):
            source = None
            try:
                source = source_of(each)
                sources.append(encoded(source) if now else source)
                images.append(decoded(sources[-1]))
            except (ValueError, OSError) as error:
                which = f"image {number} of " if len(values) > 1 else ""
                file = f" ({source})" if isinstance(source, Path) else ""
                raise DataError(f"{place}{which}{what}{file} {error}") from None
        try:
            grids = tuple(map(tuple, self.process(images)["image_grid_thw"].tolist())) if images else ()
        except ValueError as error:  # such as an extreme aspect ratio
            raise DataError(f"{place}{what} is refused by the model's processor: {first_line(error)}") from None
        digests = tuple(hashlib.sha256(encoded(each)).hexdigest() for each in sources)
        return Pictures(digests, grids, tuple(sources), self)

    def process(self, images: list[Image.Image]) -> Any:
        processor = image_processor(self.folder)
        least, most = self.least or processor.size["shortest_edge"], self.most or processor.size["longest_edge"]
        return processor(images=images, size={"shortest_edge": least, "longest_edge": most}, return_tensors="pt")


@lru_cache(maxsize=1)
def image_processor(folder: Path) -> Any:
    """Of the model. Imported here, as processes that grade get a prompt's images as well: they load no torch."""
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(folder)


def source_of(value: Any) -> Source:
    """An encoded image, or its path, of a value: bytes, a path, base64, or datasets' {"bytes", "path"}. Raises
    ValueError, whose message continues the name of the column."""
    if isinstance(value, dict) and value.keys() <= {"bytes", "path"}:
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise ValueError(f"has {type(value).__name__} instead of an image: bytes, a path or base64")
    if os.path.isfile(path := os.path.expanduser(value)):  # False for what is too long to be a path
        return Path(path)
    data = "".join(value.split())  # programs break its lines
    try:
        return base64.b64decode(data.partition(",")[2] if data.startswith("data:") else data, validate=True)
    except ValueError:
        raise ValueError(f"names no file, and is no base64: {value[:60]!r}") from None


def filled(ids: Sequence[int], pictures: Pictures | None) -> list[int]:
    """The tokens of a template's text, with as many image tokens for each image as it has features."""
    if pictures is None:
        return list(ids)
    token, merge = pictures.reader.token, image_processor(pictures.reader.folder).merge_size
    if (count := ids.count(token)) != len(pictures.grids):
        raise DataError(f"the chat template writes {count} image tokens for {len(pictures.grids)} images")
    runs = iter([token] * (math.prod(grid) // merge**2) for grid in pictures.grids)
    return [id for each in ids for id in (next(runs) if each == token else [each])]


def joined(first: Pictures | None, then: Pictures | None) -> Pictures | None:
    if first is None or then is None:
        return first or then
    both = first.digests + then.digests, first.grids + then.grids, first.sources + then.sources
    return Pictures(*both, first.reader)


def encoded(source: Source) -> bytes:
    return source if isinstance(source, bytes) else source.read_bytes()


def decoded(source: Source) -> Image.Image:
    """An RGB image, turned as its EXIF says, on white. Raises ValueError, as `source_of`."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of large images, which are refused below
            image = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS)
        if image.width * image.height > MOST_PIXELS:
            raise ValueError(f"has an image of {image.width} x {image.height}: more than {MOST_PIXELS} pixels")
        if min(image.size) < LEAST:
            raise ValueError(f"has an image of {image.width} x {image.height}: a side has at least {LEAST} pixels")
        if getattr(image, "n_frames", 1) > 1:
            raise ValueError(f"has an animation of {image.n_frames} frames: only still images are supported")
        if image.mode not in MODES:
            raise ValueError(f"has an image in mode {image.mode}: save it as RGB")
        whole = ImageOps.exif_transpose(image).convert("RGBA")
    except UnidentifiedImageError:
        raise ValueError(f"is no image of a known format ({', '.join(FORMATS)})") from None
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:  # PIL's for broken files
        raise ValueError(f"has an image that cannot be decoded: {first_line(error)}") from None
    return Image.alpha_composite(Image.new("RGBA", whole.size, "white"), whole).convert("RGB")


def flattened(messages: list[Any], place: Any) -> list[Any]:
    """Messages whose contents are texts, with a mark in the place of each image."""
    return [m | {"content": _text(m.get("content"), place)} if isinstance(m, dict) else m for m in messages]


def _text(content: Any, place: Any) -> Any:
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "image") or not isinstance(part.get("text") or "", str):
            raise DataError(f"{place}: a part of a message is text or an image, not {str(part)[:60]}")
        texts.append(MARK if kind == "image" else part.get("text") or "")
    return "".join(texts)


def with_parts(messages: list[dict[str, str]], count: int, place: Any) -> list[dict[str, Any]]:
    """Messages for a chat template that shows images: one in the place of each mark, or, without marks, all before the
    last text."""
    marks = sum(message["content"].count(MARK) for message in messages)
    if count and not marks:
        messages = [*messages[:-1], messages[-1] | {"content": MARK * count + messages[-1]["content"]}]
    elif marks != count:
        raise DataError(f"{place}: the prompt has {marks} {MARK}, and its column of images has {count}")
    return [message | {"content": _parts(message["content"])} for message in messages]


def _parts(text: str) -> list[dict[str, str]]:
    parts: list[dict[str, str]] = []
    for number, piece in enumerate(text.split(MARK)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts


class PromptImages:
    """The images that the trainer computes, by key: of prompts by their index, and of episodes whose environments have
    shown some from files in `folder`."""

    def __init__(self, prompts: list[Any], folder: Path = Path()):
        self.pictures = {prompt.index: prompt.images for prompt in prompts}
        self.folder, self.reader = folder, prompts[0].images.reader
        self.of = lru_cache(maxsize=4096)(self._of)
        self.pixels = lru_cache(maxsize=64)(lambda key: self.of(key).pixels())

    def grids(self, key: int) -> list[Grid]:
        return list(self.of(key).grids)

    def _of(self, key: int) -> Pictures:
        if key < SHOWN:
            return self.pictures[key]
        for record in self.folder.glob(f"*/{key - key % SEGMENTS}.json"):
            digests, grids = read_json(record)[key % SEGMENTS]
            files = tuple(map(record.with_name, digests))
            return Pictures(tuple(digests), tuple(map(tuple, grids)), files, self.reader)
        raise DataError(f"{self.folder} has no record of the images {key} that an environment has shown")


def keep(folder: Path, version: int, segments: Sequence[Pictures | None]) -> int:
    """Write the images of an episode, by segment, to files that all ranks see. Returns the key of its first segment's;
    the others follow."""
    folder /= f"{version:06d}"
    record = json.dumps([[each.digests, each.grids] if each else [(), ()] for each in segments])
    key = SHOWN + int(hashlib.sha256(record.encode()).hexdigest()[:12], 16) * SEGMENTS
    for each in filter(None, segments):
        for digest, source in zip(each.digests, each.sources, strict=True):
            if not (folder / digest).exists():
                write_atomically(folder / digest, encoded(source))
    write_atomically(folder / f"{key}.json", record)
    return key

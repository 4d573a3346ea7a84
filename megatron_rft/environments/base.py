"""The protocol of an environment, which plays one episode with the policy."""

from base64 import b64encode
from dataclasses import dataclass
from typing import Any

from megatron_rft.responses import Prompt, Score

Message = dict[str, Any]  # {"role": "user", "content": "..."}; for images also a list of parts (`content_of`)
TEXTS, IMAGES = ("text", "input_text", "output_text"), ("image", "image_url", "input_image")  # types of parts


@dataclass(frozen=True)
class Turn:
    """The answer to a turn of the policy. `text` is shown to it as a message of the user, a list of messages with their
    roles; then the policy has another turn, unless `done`. `reward` is added to the episode's score."""

    text: str | list[Message] = ""
    reward: float = 0.0
    done: bool = False


class Environment:
    """One episode. It is made without arguments, in another process. An exception drops the episode.

    What it says must depend on the problem, the seed and the policy's texts alone: a lost environment is made again and
    hears the same texts. Before each call the generators of `random` and, if it is imported, numpy get a seed.
    """

    def reset(self, prompt: Prompt, seed: int) -> str | list[Message] | None:
        """Begin an episode. Returns messages that follow the problem's prompt, if there are any. `prompt` has no
        token ids, and its `images` are bytes and paths. `seed` depends on the run's seed, the step, the problem and the
        number of the response."""

    def step(self, text: str) -> Turn:
        """Answer a turn of the policy: its text without special tokens."""
        raise NotImplementedError

    def score(self) -> Score | float | None:
        """Judge the whole episode; None: the recipe's reward judges the policy's last turn."""
        return None

    def close(self) -> None:
        """Free what the episode holds."""


def content_of(content: Any) -> str | list[dict[str, str]]:
    """A message's content: a text or, with images, parts {"type": "text", "text": ...} and {"type": "image", "image":
    a path or base64}. Raises ValueError."""
    if not isinstance(content, list):
        if not isinstance(content, str | None):
            raise ValueError(f"a content of type {type(content).__name__} is not supported: only text and images")
        return content or ""
    parts = [_part(part if isinstance(part, dict) else {"type": type(part).__name__}) for part in content]
    return parts if any("image" in part for part in parts) else text_of(parts)


def _part(part: dict[str, Any]) -> dict[str, str]:
    kind = part.get("type")
    if kind in TEXTS:
        return {"type": "text", "text": part["text"]}
    if kind not in IMAGES:
        raise ValueError(f"content of type {kind!r} is not supported: only text and images")
    image = part.get("image") or part.get("image_url") or part.get("source")  # the last is Anthropic's
    if isinstance(image, dict):
        image = image.get("url") or f"data:{image.get('media_type')};base64,{image.get('data')}"
    return {"type": "image", "image": b64encode(image).decode() if isinstance(image, bytes) else str(image)}


def text_of(content: str | list[dict[str, str]]) -> str:
    """The text of a content, with a mark for each image."""
    return content if isinstance(content, str) else "".join(part.get("text", "<image>") for part in content)

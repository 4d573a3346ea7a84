import base64
import io
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from megatron_rft.data.images import Pictures
from megatron_rft.objectives.base import Update
from megatron_rft.records import Batch, Prompt, Response, Score
from megatron_rft.rollout.sampler import ScoredResponse, to_batch
from megatron_rft.training.online_batches import shown_rows, shown_samples, token_texts
from tests.made import made


class Bytes:
    """A tokenizer of bytes."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def rollouts(*rewards: tuple[float, ...]) -> list[ScoredResponse]:
    """One group per tuple; the response to problem 7 of group 0 is "0a", "0b" ..."""
    return [
        ScoredResponse(
            place,
            sample,
            Prompt(7 + place, tuple(b"ask"), "ask", answer="42"),
            Response(tuple(f"{place}{chr(97 + sample)}".encode()), (-0.5, -0.25), "stop", 0),
            "",
            Score(reward, reason=f"because {reward}"),
        )
        for place, group in enumerate(rewards)
        for sample, reward in enumerate(group)
    ]


@pytest.mark.parametrize("text", ["plain", "naïve", "数学 🙂 ok", "🙂"])
def test_pieces_are_the_text_and_never_half_a_character(text):
    ids = list(text.encode())
    found = token_texts(Bytes(), ids)
    assert len(found) == len(ids) and "".join(found) == text


def test_what_is_no_character_at_all_stays_visible():
    assert "".join(token_texts(Bytes(), [0xFF, 0xFE, 65])).endswith("A")


def test_best_and_worst_of_groups_that_disagree_come_first():
    batch = to_batch(rollouts((1.0, 1.0), (0.0, 1.0, 0.5), (0.0, 0.0)))
    assert shown_rows(batch) == [3, 2, 0]
    assert shown_rows(to_batch(rollouts((0.0, 0.0), (1.0, 1.0), (0.0, 0.0)))) == [0, 2]


def test_a_sample_has_its_problem_and_all_numbers():
    sampled = rollouts((0.0, 1.0))
    batch = to_batch(sampled).with_tokens(old_logprobs=torch.tensor([-1.0, -2.0, -3.0, -4.0]))
    updates = made("grpo", kl_coefficient=0.0).prepare(batch, {}).updates
    other = Update("verification", Batch.of([[1]], [[2]], tokens={"advantages": torch.ones(1)}), lambda *_: None)
    right, wrong = shown_samples(batch, [other, *updates], sampled, Bytes())
    assert (right.tokens, right.reward, right.problem, right.answer) == (["0", "b"], 1.0, 7, "42")
    assert right.reason == "because 1.0" and wrong.reason == "because 0.0" and wrong.prompt == "ask"
    assert right.values["old_logprobs"] == [-3.0, -4.0] and right.values["rollout_logprobs"] == [-0.5, -0.25]
    assert (
        right.values["advantages"] == pytest.approx([0.7071, 0.7071], abs=0.3) and "response_mask" not in right.values
    )


def test_a_sample_shows_small_copies_of_the_images_and_the_prompts_text():
    Image.new("RGB", (400, 200), "red").save(file := io.BytesIO(), "PNG")
    images = Pictures(("",), ((1, 4, 4),), (file.getvalue(),), None)
    sampled = [replace(each, prompt=replace(each.prompt, images=images)) for each in rollouts((0.0, 1.0))]
    shown = shown_samples(to_batch(sampled), [], sampled, Bytes())[0]
    kind, _, content = shown.images[0].partition(";base64,")
    small = Image.open(io.BytesIO(base64.b64decode(content)))
    assert (kind, small.size, shown.prompt) == ("data:image/jpeg", (160, 80), "ask")
    assert small.getpixel((80, 40))[0] > 240


def test_a_sample_shows_the_images_that_its_turns_showed():
    Image.new("RGB", (40, 20), "blue").save(file := io.BytesIO(), "PNG")
    both = Pictures(("", ""), ((1, 4, 4),) * 2, (file.getvalue(),) * 2, None)
    sampled = [replace(each, response=replace(each.response, images=9)) for each in rollouts((0.0, 1.0))]
    seen = SimpleNamespace(source=SimpleNamespace(of={9: both}.get))
    shown = shown_samples(to_batch(sampled), [], sampled, Bytes(), seen)[0]
    assert len(shown.images) == 2 and shown_samples(to_batch(sampled), [], sampled, Bytes())[0].images == []

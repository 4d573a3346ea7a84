"""Reward models: a sequence-classification checkpoint in this process."""

import math

from megatron_rft.responses import Prompt, Score
from megatron_rft.rewards.base import Reward
from megatron_rft.utils.errors import DataError
from megatron_rft.utils.files import one_of_node
from megatron_rft.utils.plain_text import plain_text


class ModelReward(Reward):
    """Scores "prompt + response" (`template`) by the single output of a checkpoint, in batches of about equal
    length."""

    maximum = math.inf

    def __init__(self, model: str, template: str = "{prompt}{response}", max_tokens: int = 2048, batch: int = 16):
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        try:
            with one_of_node(model) as ask:
                here = {"local_files_only": not ask, "trust_remote_code": False}
                self.tokenizer = AutoTokenizer.from_pretrained(model, **here)
                self.model = AutoModelForSequenceClassification.from_pretrained(model, **here).eval()
        except (OSError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise DataError(f"reward.model: no classifier can be loaded from {model}: {reason}") from None
        if self.model.config.num_labels != 1:
            raise DataError(f"reward.model: {model} has {self.model.config.num_labels} outputs; a reward model has one")
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.model.config.pad_token_id = self.tokenizer.pad_token_id  # by which it finds the last token of a text
        self.model.to("cuda" if torch.cuda.is_available() else "cpu")
        self.template, self.max_tokens, self.batch = template, max_tokens, batch

    def __call__(self, prompts: list[Prompt], texts: list[str]) -> list[Score]:
        inputs = [self._ids(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
        order = sorted(range(len(inputs)), key=lambda place: len(inputs[place]))
        values: dict[int, float] = {}
        for start in range(0, len(order), self.batch):
            places = order[start : start + self.batch]
            values |= zip(places, self._forward([inputs[place] for place in places]), strict=True)
        return [as_score(values[place]) for place in range(len(inputs))]

    def _ids(self, prompt: Prompt, text: str) -> list[int]:
        """Return the last tokens of a text that is too long: the response, and the part of the prompt that fits."""
        plain = plain_text(self.tokenizer)
        whole = self.template.format(prompt=prompt.text, response=plain.hidden(text))
        ids = plain.encode([whole], add_special_tokens=True)[0]
        twice = ids[:2] == [self.tokenizer.bos_token_id] * 2  # by the policy's chat template and by this tokenizer
        return ids[twice:][-self.max_tokens :]

    def _forward(self, inputs: list[list[int]]) -> list[float]:
        import torch

        padded = self.tokenizer.pad({"input_ids": inputs}, padding_side="right", return_tensors="pt")
        with torch.inference_mode():
            return self.model(**padded.to(self.model.device)).logits[:, 0].float().tolist()  # [B]


def as_score(value: float) -> Score:
    if not math.isfinite(value):
        return Score(0.0, error=f"the reward model gives {value}")
    return Score(value, f"{value:.4g} by the reward model")

"""Reward models: a sequence-classification checkpoint in this process, or a server that scores texts."""

import json
import math
import time
import urllib.request
from http.client import HTTPException

from megatron_rft.responses import Prompt, Score
from megatron_rft.rewards.base import Reward
from megatron_rft.utils.errors import DataError
from megatron_rft.utils.files import one_of_node
from megatron_rft.utils.plain_text import plain_text

ATTEMPTS = 3


class ModelReward(Reward):
    """Scores "prompt + response" (`template`) by the single output of a checkpoint, in batches of about equal
    length."""

    maximum = math.inf

    def __init__(self, model: str, template: str = "{prompt}{response}", max_tokens: int = 2048, batch: int = 16):
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        try:
            with one_of_node(model) as ask:
                here = {"local_files_only": not ask}
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
        return plain.encode([whole], add_special_tokens=True)[0][-self.max_tokens :]

    def _forward(self, inputs: list[list[int]]) -> list[float]:
        import torch

        padded = self.tokenizer.pad({"input_ids": inputs}, padding_side="right", return_tensors="pt")
        with torch.inference_mode():
            return self.model(**padded.to(self.model.device)).logits[:, 0].float().tolist()  # [B]


class ServerReward(Reward):
    """Sends POST {"prompts": [...], "responses": [...]} to a URL, which answers {"rewards": [...]} of the same
    length."""

    maximum = math.inf

    def __init__(self, url: str, timeout_s: float = 60.0, batch: int = 64):
        self.url, self.timeout_s, self.batch = url, timeout_s, batch
        # A server of the cluster is not behind the proxy that its nodes have for the internet.
        proxies = None if url.startswith("https:") else {}
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies))

    def __call__(self, prompts: list[Prompt], texts: list[str]) -> list[Score]:
        scores: list[Score] = []
        for start in range(0, len(texts), self.batch):
            part = slice(start, start + self.batch)
            scores += self._ask([prompt.text for prompt in prompts[part]], texts[part])
        return scores

    def _ask(self, prompts: list[str], responses: list[str]) -> list[Score]:
        """Send a batch. A failing server is asked again with doubling pauses; then all responses get an error."""
        body = json.dumps({"prompts": prompts, "responses": responses}).encode()
        for attempt in range(ATTEMPTS):
            try:
                # Made anew for each try: sending a request through a proxy changes it.
                request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
                with self.opener.open(request, timeout=self.timeout_s) as answer:
                    rewards = json.load(answer)["rewards"]
                if len(rewards) != len(responses):
                    raise ValueError(f"{len(rewards)} rewards for {len(responses)} responses")
                return [as_score(float(reward)) for reward in rewards]
            except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
                problem = f"{self.url}: {type(error).__name__}: {error}"
            if attempt + 1 < ATTEMPTS:
                time.sleep(0.1 * 2**attempt)
        return [Score(0.0, error=problem)] * len(responses)


def as_score(value: float) -> Score:
    if not math.isfinite(value):
        return Score(0.0, error=f"the reward model gives {value}")
    return Score(value, f"{value:.4g} by the reward model")

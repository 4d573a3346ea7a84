import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, LlamaConfig, PreTrainedTokenizerFast

from megatron_rft.records import Prompt
from megatron_rft.rewards.model import ModelReward, ServerReward
from megatron_rft.utils.errors import DataError
from tests.shapes import sizes

WORDS = ["<pad>", "<eos>", "<unk>", "a", "b", "c", "d"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    """A tiny classifier with random weights, and a tokenizer of words."""
    folder = str(tmp_path_factory.mktemp("reward_model"))
    vocabulary = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    vocabulary.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(**sizes(2, 16, 2, 2, 32, vocab_size=len(WORDS)), num_labels=1, pad_token_id=0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


def prompts(*texts: str) -> list[Prompt]:
    return [Prompt(i, (1,), text, "") for i, text in enumerate(texts)]


def test_batches_and_padding_change_nothing(checkpoint):
    asked, texts = prompts("a b c d a b", "a", "b c", "d"), [" c d", " a b c d a b c", " d", " a"]
    one, all_at_once = ModelReward(checkpoint, batch=1), ModelReward(checkpoint, batch=4)
    rewards = [score.reward for score in one(asked, texts)]
    assert len(set(rewards)) == 4
    assert [score.reward for score in all_at_once(asked, texts)] == pytest.approx(rewards, abs=1e-6)
    ids = one.tokenizer("a b c d a b c d", return_tensors="pt")
    with torch.no_grad():
        assert one.model(**ids).logits.item() == pytest.approx(rewards[0], abs=1e-6)


def test_the_end_of_a_long_text_counts(checkpoint):
    reward = ModelReward(checkpoint, max_tokens=3)
    long, short = reward(prompts("a a a a a b", "b"), [" c d", " c d"])
    assert long.reward == pytest.approx(short.reward, abs=1e-6)


def test_the_template_is_used(checkpoint):
    plain, framed = ModelReward(checkpoint), ModelReward(checkpoint, template="a {prompt} d {response}")
    assert plain(prompts("a b d"), [" c"])[0].reward == framed(prompts("b"), ["c"])[0].reward


def test_not_a_reward_model(tmp_path):
    with pytest.raises(DataError, match="no classifier can be loaded"):
        ModelReward(str(tmp_path))


class Handler(BaseHTTPRequestHandler):
    """Rewards are the responses' lengths; a prompt can request this many failures."""

    failures: dict[str, int] = {}

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        problem = body["prompts"][0]
        if self.failures.get(problem, 0) > 0:
            self.failures[problem] -= 1
            self.send_error(503)
            return
        rewards = [float("nan") if text == "nan" else len(text) for text in body["responses"]]
        answer = json.dumps({"rewards": rewards[: 1 if problem == "short" else None]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer) + (problem == "torn")))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server(url):
    reward = ServerReward(url, batch=2)
    scores = reward(prompts("x", "x", "x"), ["a", "bbb", "nan"])
    assert [score.reward for score in scores[:2]] == [1.0, 3.0] and scores[2].error == "the reward model gives nan"


def test_a_server_of_the_cluster_is_not_asked_through_the_proxy(url, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    (score,) = ServerReward(url)(prompts("x"), ["abc"])
    assert score.reward == 3.0


def test_a_server_is_asked_again_and_then_it_is_an_error(url):
    Handler.failures = {"twice": 2, "always": 99}
    reward = ServerReward(url, batch=2)
    assert reward(prompts("twice"), ["abc"])[0].reward == 3.0
    failed = reward(prompts("always", "always"), ["a", "b"])
    assert all("503" in score.error for score in failed) and len(failed) == 2
    assert "1 rewards for 2 responses" in reward(prompts("short", "short"), ["a", "b"])[0].error
    assert "IncompleteRead" in reward(prompts("torn"), ["a"])[0].error
    (refused,) = ServerReward("http://127.0.0.1:9", timeout_s=1)(prompts("x"), ["a"])
    assert "refused" in refused.error

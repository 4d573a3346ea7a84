import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForSequenceClassification, LlamaConfig, PreTrainedTokenizerFast

from megatron_rft.records import Prompt
from megatron_rft.rewards.model import ModelReward
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


def test_a_beginning_that_the_chat_template_has_written_is_not_repeated(checkpoint):
    reward = ModelReward(checkpoint)
    first = processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 1)])
    reward.tokenizer.backend_tokenizer.post_processor, reward.tokenizer.bos_token = first, "<eos>"
    plain, written = prompts("a b", "<eos> a b")
    assert reward._ids(written, " c") == reward._ids(plain, " c") == [1, 3, 4, 5]


def test_not_a_reward_model(tmp_path):
    with pytest.raises(DataError, match="no classifier can be loaded"):
        ModelReward(str(tmp_path))

"""Qwen3-shaped models of named sizes with random weights, equal for both sides of a benchmark."""

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

warnings.filterwarnings("ignore")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
from transformers import PretrainedConfig, Qwen3Config, Qwen3ForCausalLM  # noqa: E402
from transformers.utils.logging import set_verbosity_error  # noqa: E402

from examples.quickstart import arithmetic  # noqa: E402, F401  the scripts import it from here
from megatron_rft.config import Batching, Megatron  # noqa: E402
from megatron_rft.config.algorithms.offline import SFT as Options  # noqa: E402
from megatron_rft.megatron import parallel  # noqa: E402
from megatron_rft.megatron.actor import Actor  # noqa: E402
from megatron_rft.objectives.base import counts  # noqa: E402
from megatron_rft.objectives.sft import SFT  # noqa: E402
from megatron_rft.records import Batch  # noqa: E402

set_verbosity_error()
logging.getLogger("megatron").setLevel(logging.ERROR)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
# (vocabulary, hidden, layers, feed-forward, heads, key-value heads, head dimension)
SIZES = {
    "1m": (512, 128, 4, 384, 4, 2, 32),
    "3m": (1024, 192, 6, 512, 6, 3, 32),
    "20m": (8192, 384, 8, 1152, 6, 2, 64),
    "600m": (151936, 1024, 28, 3072, 16, 8, 128),
    "1.7b": (151936, 2048, 28, 6144, 16, 8, 128),
    "8b_12": (151936, 4096, 12, 12288, 32, 8, 128),  # an 8B model's widths, twelve of its layers
    "4b": (151936, 2560, 36, 9728, 32, 8, 128),
}
ADAMW = {"lr": 1e-4, "weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8, "clip_grad": 1.0}


def qwen3(size: str, **changes) -> Qwen3Config:
    vocab, hidden, layers, feed_forward, heads, kv_heads, head_dim = SIZES[size]
    shape = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": feed_forward,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "architectures": ["Qwen3ForCausalLM"],
        "attn_implementation": "sdpa",
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,  # transformers trains no embedding of a padding token
    }
    return Qwen3Config(**{**shape, **changes})


def hf_model(config: Qwen3Config, precision: str, device: torch.device | str = "cpu") -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).to(device, DTYPES[precision])


def actor_like(model: Qwen3ForCausalLM, precision: str, *, micro_batch_tokens: int, **options) -> Actor:
    """Create an actor with the weights of `model`. `options`: as for `actor_of`."""
    return actor_of(model.config, model.state_dict().__getitem__, precision, micro_batch_tokens, **options)


def actor_of(
    config: PretrainedConfig, lookup: Callable[[str], torch.Tensor], precision: str, tokens: int, **options
) -> Actor:
    """Create an actor in a single process, with weights by their HF names and `tokens` in a micro-batch. `options` go
    to Actor, those in `megatron` to the recipe's section."""
    megatron = Megatron(**options.pop("megatron", {}))
    if not torch.distributed.is_initialized():
        parallel.initialize(megatron)
    batching = Batching(micro_batch_tokens=tokens, pack_sequences=options.pop("pack_sequences", True))
    options = {"optimizer": {**ADAMW, "use_distributed_optimizer": True}, **options}
    actor = Actor(config, megatron, batching, precision, **options)
    actor.load(lookup)
    return actor


def update_of(batch: Batch) -> tuple[Batch, Callable, dict[str, float]]:
    """Return the arguments of `Actor.step` for supervised fine-tuning on a batch."""
    return batch, SFT(Options()).loss, counts(batch)


def seconds(work: Callable[[], object]) -> float:
    """Return the processor seconds of a call, which exclude other load; on a GPU the seconds until its kernels end."""

    def clock() -> float:
        if not torch.cuda.is_available():
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    begin = clock()
    work()
    return clock() - begin


def fastest(work: Callable[[], object], repeats: int = 3) -> tuple[float, int]:
    """Return the `seconds` of the fastest of some calls after a warm-up, and a GPU's peak of allocated bytes."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    times = [seconds(work) for _ in range(repeats + 1)]
    return min(times[1:]), torch.cuda.max_memory_allocated()


def set_threads(count: int) -> None:
    os.environ["OMP_NUM_THREADS"] = str(count)
    torch.set_num_threads(count)

"""The processes that tests/gpu_stack/test_vllm.py starts: python vllm_engines.py configurations OPTIONS, or one, two
or draft HOW."""

import ast
import os
import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

import megatron_rft.megatron  # noqa: F401
from megatron_rft.config import Megatron
from megatron_rft.inference.vllm import cpu_patches, draft_models, engine, weights
from megatron_rft.megatron import parallel
from tests.shapes import FOR_KERNELS

CONFIG = Qwen3Config(**FOR_KERNELS, tie_word_embeddings=True)


def configurations(options: dict[str, dict]) -> None:
    """vLLM's own configuration objects, without an engine."""
    from vllm.engine.arg_utils import EngineArgs

    cpu_patches.prepare()
    weights.register()
    draft_models.load_from_their_folder()
    for name, given in options.items():
        unstarted = object.__new__(engine.VLLMEngine)
        unstarted.config, unstarted.device, unstarted.dtype = CONFIG, torch.device("cuda"), torch.bfloat16
        unstarted.ranks, unstarted.max_model_len, unstarted.sleeps = 1, 1024, True
        unstarted.reserve = 0
        unstarted.counting = "speculative_config" in given
        with tempfile.TemporaryDirectory() as folder:
            made = EngineArgs(**unstarted._arguments(folder, 64, given, 0.5)).create_engine_config()
        assert made.model_config.enable_sleep_mode
        print(f"configured: {name}", flush=True)


def start(share: float, sleeps: bool = True, **arguments) -> engine.VLLMEngine:
    arguments |= {"enforce_eager": True}
    return engine.VLLMEngine(CONFIG, torch.bfloat16, "cuda", 1024, 8, arguments, share, sleeps=sleeps)


def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(CONFIG).to(torch.bfloat16)


def tensors() -> dict[str, torch.Tensor]:
    made = model().state_dict()
    return {name: tensor.detach().to("cuda") for name, tensor in made.items() if name != "lm_head.weight"}


def policy_and_weights() -> tuple[engine.VLLMEngine, dict[str, torch.Tensor]]:
    policy, sent = start(0.35), tensors()
    policy.load_weights(iter(sent.items()), version=1)
    return policy, sent


def wake_in_stages(policy: engine.VLLMEngine, sent: dict[str, torch.Tensor]) -> None:
    """Wake like a weight sync: the memory of the weights, the weights, then the cache's memory."""
    policy.wake(cache=False)
    assert policy.asleep == {"kv_cache"}
    policy.load_weights(iter(sent.items()), version=2)
    policy.wake()
    assert not policy.asleep
    assert torch.equal(policy._model().model.embed_tokens.weight.cpu(), sent["model.embed_tokens.weight"].cpu())


def one() -> None:
    policy, sent = policy_and_weights()
    policy.sleep()
    assert policy.asleep
    wake_in_stages(policy, sent)
    policy.close()
    print("done: sleep, wake, weights", flush=True)


def two() -> None:
    """Two engines as with a dynamic constraint: the refiner's keeps its weights while the policy's sleeps."""
    policy, sent = policy_and_weights()
    refiner = start(0.35, sleeps=False)
    refiner.load_weights(iter(sent.items()), version=0)
    policy.sleep(), refiner.sleep()
    assert policy.asleep and not refiner.asleep and refiner.weight_version == 0
    refiner.wake(), wake_in_stages(policy, sent)
    refiner.close(), policy.close()
    print("done: two engines", flush=True)


def draft() -> None:
    """A draft model has the weights of its folder, before and after the engine slept."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = model()
        wanted.save_pretrained(folder)
        given = {"method": "draft_model", "model": folder, "num_speculative_tokens": 2}
        policy = start(0.35, speculative_config=given)

    def found() -> torch.Tensor:
        return policy._runner().get_draft_model().model.embed_tokens.weight.cpu()

    assert torch.equal(found(), wanted.model.embed_tokens.weight)
    policy.sleep(), policy.wake()
    assert torch.equal(found(), wanted.model.embed_tokens.weight)
    policy.close()
    print("done: draft model", flush=True)


if __name__ == "__main__":
    what, how = sys.argv[1:3]
    if how == "external_launcher":
        parallel.initialize(Megatron())
    {"one": one, "two": two, "draft": draft, "configurations": lambda: configurations(ast.literal_eval(how))}[what]()
    sys.stdout.flush()
    os._exit(0)  # without the collection of all that vLLM has imported, which takes longer than the tests

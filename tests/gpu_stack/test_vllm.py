"""vLLM's CUDA build: the configuration for every option; start, weight loading, sleep and wake of one engine and of a
dynamic constraint's two. Each engine runs in its own process. Nothing is generated."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

START = Path(__file__).parent / "vllm_engines.py"
OPTIONS = {
    "plain": {},
    "fp8": {"quantization": "fp8"},
    "fp8_per_tensor": {"quantization": "fp8_per_tensor"},
    "fp8_per_channel": {"quantization": "fp8_per_channel"},
    "fp8_per_block": {"quantization": "fp8_per_block"},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}},
    "prefix cache": {"enable_prefix_caching": True},
}


def run(*arguments: str) -> str:
    """Run a script in 8 GiB, without the mode that computes, because vLLM's allocator and profiler inspect the memory
    itself."""
    environment = {name: value for name, value in os.environ.items() if name != "PRETEND_COMPUTE"}
    environment |= {"PRETEND_GIB": "8", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(
        [sys.executable, str(START), *arguments], env=environment, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


def test_vllm_takes_every_option():
    told = run("configurations", repr(OPTIONS))
    assert [line for line in told.splitlines() if line.startswith("configured: ")] == [
        f"configured: {name}" for name in OPTIONS
    ]


@pytest.mark.parametrize("distributed", ["alone", "external_launcher"])
def test_an_engine_starts_sleeps_and_wakes(distributed):
    assert "done: sleep, wake, weights" in run("one", distributed)


def test_the_refiners_engine_stays_awake_beside_the_policys():
    assert "done: two engines" in run("two", "external_launcher")


def test_a_draft_model_keeps_its_own_weights():
    assert "done: draft model" in run("draft", "alone")

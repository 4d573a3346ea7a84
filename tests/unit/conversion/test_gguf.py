"""`megatron-rft convert MODEL.gguf FOLDER`: the same numbers and tokenizer, and a clear error for everything else."""

import importlib.util
import re
from collections import defaultdict

import pytest
import torch
from transformers import (
    AutoTokenizer,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MiniMaxM2Config,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from megatron_rft.commands.main import main
from megatron_rft.conversion import HFFolder, gguf, hf_shapes, load_config
from megatron_rft.families.shapes import experts, head_dim
from megatron_rft.families.tables import FAMILIES as ALL
from tests.shapes import sizes

SIZES = sizes(1, 32, 2, 1, 64, vocab_size=8)
CONFIG = Qwen3Config(**SIZES)
HEAD = SIZES | dict(head_dim=16, tie_word_embeddings=False)
FAMILIES = {  # those that transformers' reader knows, with GGUF's name
    "qwen3": ("qwen3", CONFIG),
    "qwen2": ("qwen2", Qwen2Config(**SIZES)),
    "llama": ("llama", LlamaConfig(**SIZES)),
    "mistral": ("llama", MistralConfig(**SIZES, sliding_window=None)),
    "qwen3_moe": ("qwen3moe", Qwen3MoeConfig(**HEAD, num_experts=4, num_experts_per_tok=2)),
    "gemma3_text": ("gemma3", Gemma3TextConfig(**HEAD, sliding_window=7)),
    "minimax_m2": ("minimax-m2", MiniMaxM2Config(**HEAD, num_local_experts=4, num_experts_per_tok=2)),
    "gpt_oss": ("gpt-oss", GptOssConfig(**HEAD, num_local_experts=4, num_experts_per_tok=2)),
}
EXPERTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
EXPERT = re.compile(r"model\.layers\.0\.\w+\.experts\.(\d+)\.(\w+)\.weight")
needs_packages = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in gguf.PACKAGES),
    reason=f"{' and '.join(gguf.PACKAGES)} are not both installed (. tools/setup_env.sh cpu,gguf)",
)


def as_in_gguf(architecture, config, tensors):
    """GGUF name -> tensor, as llama.cpp writes them: queries and keys of Llama with pairs of neighbours, norms of Gemma
    with the 1, the experts of a layer in one."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    kinds = {name: kind for kind, name in MODEL_ARCH_NAMES.items()}
    names, written, experts = get_tensor_name_map(kinds.get(architecture, kinds["qwen3"]), 1), {}, defaultdict(list)
    for name, tensor in tensors.items():
        stem, suffix = (name, "weight") if name.endswith("sinks") else name.rsplit(".", 1)
        if expert := EXPERT.fullmatch(name):
            experts[f"blk.0.ffn_{EXPERTS[expert[2]]}_exps.weight"].append(tensor)
        elif name.endswith("e_score_correction_bias"):
            written["blk.0.exp_probs_b.bias"] = tensor
        elif theirs := names.get_name(stem):
            if architecture == "llama" and stem.endswith(("q_proj", "k_proj")):
                tensor = tensor.unflatten(0, (-1, 2, config.head_dim // 2)).transpose(1, 2).flatten(0, 2)
            written[f"{theirs}.{suffix}"] = tensor + 1 if architecture == "gemma3" and "norm" in name else tensor
    return written | {name: torch.stack(each) for name, each in experts.items()}


def write(path, architecture="qwen3", scaled=False, config=CONFIG):
    """A model of one layer with its tokenizer. Returns HF name -> tensor."""
    from gguf import GGUFWriter

    generator = torch.Generator().manual_seed(0)
    shapes = hf_shapes(config).items()
    tensors = {name: torch.randn(shape, generator=generator).mul(64).round() / 64 for name, shape in shapes}
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(1), writer.add_context_length(64), writer.add_embedding_length(32)
    writer.add_feed_forward_length(64), writer.add_head_count(2), writer.add_head_count_kv(CONFIG.num_key_value_heads)
    if experts(config):
        writer.add_expert_count(4), writer.add_expert_used_count(2)
    if config.model_type == "mistral":
        writer.add_name("mistral")
    writer.add_rope_dimension_count(head_dim(config)), writer.add_key_length(head_dim(config))
    writer.add_layer_norm_rms_eps(1e-6), writer.add_vocab_size(8)
    writer.add_tokenizer_model("gpt2"), writer.add_token_list(["<eos>", *"abcde", "ab", "f"])
    writer.add_token_types([3, 1, 1, 1, 1, 1, 1, 1]), writer.add_token_merges(["a b"]), writer.add_eos_token_id(0)
    if scaled:
        writer.add_tensor("rope_freqs.weight", torch.ones(64).numpy())
    for name, tensor in as_in_gguf(architecture, config, tensors).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    return tensors


@needs_packages
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ("gpt_oss", "mistral")])
def test_weights_and_tokenizer(tmp_path, capsys, family):
    architecture, written = FAMILIES[family]
    expected, out = write(tmp_path / "model.gguf", architecture, config=written), tmp_path / "out"
    assert main(["convert", str(tmp_path / "model.gguf"), str(out)]) == 0
    config = load_config(out)
    assert (config.model_type, config.num_key_value_heads) == (family, 1)
    read = HFFolder(out, config)
    for name, tensor in expected.items():
        assert torch.equal(read(name), tensor), name
    assert AutoTokenizer.from_pretrained(out)("abc")["input_ids"] == [6, 3]
    assert main(["convert", str(tmp_path / "model.gguf"), str(out)]) == 2
    assert "exists already" in capsys.readouterr().err


@needs_packages
@pytest.mark.parametrize(
    "content, words",
    [
        ("nothing", "there is no file"),
        ("not gguf", "magic"),
        ("another family", "mamba"),
        ("gpt_oss", "finds no model.layers.0.mlp.experts.down_proj in it (5 are missing)"),
        ("mistral", "sliding-window attention"),  # the reader takes a window of 4096 for granted
        ("scaled", "rope_freqs.weight"),
        ("other heads", "size mismatch"),  # transformers' reader takes Qwen3's head size for granted
    ],
)
def test_what_cannot_be_read(tmp_path, capsys, content, words):
    path = tmp_path / "model.gguf"
    if content == "another family":
        write(path, "mamba")
    elif content in FAMILIES:
        write(path, FAMILIES[content][0], config=FAMILIES[content][1])
    elif content == "scaled":
        write(path, scaled=True)
    elif content == "other heads":
        write(path, config=Qwen3Config(**CONFIG.to_dict() | {"head_dim": 16}))
    elif content == "not gguf":
        path.write_bytes(b"GGUX" * 100)
    assert main(["convert", str(path), str(tmp_path / "out")]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@needs_packages
def test_the_families_that_transformers_reads():
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    known = {family for family in ALL if family.removesuffix("_text") in GGUF_SUPPORTED_ARCHITECTURES}
    assert known == FAMILIES.keys()


def test_a_missing_package_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gguf, "PACKAGES", ("json", "no_such_package"))
    assert main(["convert", str(tmp_path / "model.gguf"), str(tmp_path / "out")]) == 2
    assert "reading a GGUF file needs no_such_package: pip install" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--logits"], ["--like", "x"], ["--tensor-parallel", "2"], ["--to", "megatron"]])
def test_options_without_effect_are_refused(tmp_path, capsys, options):
    assert main(["convert", str(tmp_path / "model.gguf"), str(tmp_path / "out"), *options]) == 2
    assert options[0] in capsys.readouterr().err

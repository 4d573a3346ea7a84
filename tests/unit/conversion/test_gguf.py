"""`megatron-rft convert MODEL.gguf FOLDER`: the same numbers and tokenizer, and a clear error for everything else."""

import importlib.util

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config

from megatron_rft.commands.main import main
from megatron_rft.conversion import HFFolder, gguf, hf_shapes, load_config
from tests.shapes import sizes

CONFIG = Qwen3Config(**sizes(1, 32, 2, 1, 64, vocab_size=8))
PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
NAMES |= {f"model.layers.0.{ours}": f"blk.0.{theirs}" for ours, theirs in PARTS.items()}
needs_packages = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in gguf.PACKAGES),
    reason=f"{' and '.join(gguf.PACKAGES)} are not both installed (. tools/setup_env.sh cpu,gguf)",
)


def write(path, architecture="qwen3", scaled=False, config=CONFIG):
    """A model of one layer with its tokenizer. Returns HF name -> tensor."""
    from gguf import GGUFWriter

    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in hf_shapes(config).items()}
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(1), writer.add_context_length(64), writer.add_embedding_length(32)
    writer.add_feed_forward_length(64), writer.add_head_count(2), writer.add_head_count_kv(CONFIG.num_key_value_heads)
    writer.add_key_length(config.head_dim), writer.add_layer_norm_rms_eps(1e-6), writer.add_vocab_size(8)
    writer.add_tokenizer_model("gpt2"), writer.add_token_list(["<eos>", *"abcde", "ab", "f"])
    writer.add_token_types([3, 1, 1, 1, 1, 1, 1, 1]), writer.add_token_merges(["a b"]), writer.add_eos_token_id(0)
    if scaled:
        writer.add_tensor("rope_freqs.weight", torch.ones(64).numpy())
    for name, tensor in tensors.items():
        writer.add_tensor(NAMES[name.removesuffix(".weight")] + ".weight", tensor.numpy())
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    return tensors


@needs_packages
def test_weights_and_tokenizer(tmp_path, capsys):
    expected, out = write(tmp_path / "model.gguf"), tmp_path / "out"
    assert main(["convert", str(tmp_path / "model.gguf"), str(out)]) == 0
    config = load_config(out)
    assert (config.model_type, config.num_key_value_heads) == ("qwen3", CONFIG.num_key_value_heads)
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
        ("scaled", "rope_freqs.weight"),
        ("other heads", "size mismatch"),  # transformers' reader takes Qwen3's head size for granted
    ],
)
def test_what_cannot_be_read(tmp_path, capsys, content, words):
    path = tmp_path / "model.gguf"
    if content == "another family":
        write(path, "mamba")
    elif content == "scaled":
        write(path, scaled=True)
    elif content == "other heads":
        write(path, config=Qwen3Config(**CONFIG.to_dict() | {"head_dim": 16}))
    elif content == "not gguf":
        path.write_bytes(b"GGUX" * 100)
    assert main(["convert", str(path), str(tmp_path / "out")]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_missing_package_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gguf, "PACKAGES", ("json", "no_such_package"))
    assert main(["convert", str(tmp_path / "model.gguf"), str(tmp_path / "out")]) == 2
    assert "reading a GGUF file needs no_such_package: pip install" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--logits"], ["--like", "x"], ["--tensor-parallel", "2"], ["--to", "megatron"]])
def test_options_without_effect_are_refused(tmp_path, capsys, options):
    assert main(["convert", str(tmp_path / "model.gguf"), str(tmp_path / "out"), *options]) == 2
    assert options[0] in capsys.readouterr().err

"""What a model's configuration may not say, because megatron-core's model would silently compute something else; and
whether the tensors in the folder are those of the configuration."""

import json
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from megatron_rft.families.shapes import expert_ffn, experts, first, head_dim, hf_shapes
from megatron_rft.families.tables import EXPERT_BIAS, QKV_BIAS, READ_BY, family_of
from megatron_rft.families.towers import vision_of
from megatron_rft.utils.errors import DataError

GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False}
GEMMA |= {"attn_logit_softcapping": None, "final_logit_softcapping": None}
ROUTER = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
# of embeddings, residuals, scores or logits: no family here reads one
MULTIPLIER = re.compile(r"\w+_(multiplier|scaling|scale)|scale_(emb|depth)")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # types that change the frequencies and the scores' scale
IGNORED = ("rotary_emb.inv_freq", "score.weight")  # the first is computed, the second is read only for a critic
WRAPPED = re.compile(r"(model\.language_model|language_model\.model)\.")  # the text model's, in a model that also sees
BESIDE = re.compile(r"mtp\.|model\.visual\.|(model\.)?(vision_tower|multi_modal_projector)\.")
SEEN = re.compile(r"(model\.)?visual\.")


def rope(config: Any, kind: str = "full_attention") -> dict[str, Any]:
    """The rotary embedding's parameters, in transformers' words, from a config.json of any of its versions. `kind`: of
    layers, where those with a window have their own."""
    found = dict(first(config, "rope_parameters", "rope_scaling", default={}))
    if isinstance(found.get(kind), dict):
        found = dict(found[kind])
    elif family_of(config).local and kind == "sliding_attention" and "rope_theta" not in found:
        found = {"rope_theta": first(config, "rope_local_base_freq", "rope_theta")}
    found = {"rope_type": found.pop("type", "default"), "rope_theta": getattr(config, "rope_theta", None)} | found
    found |= {"rope_type": "default"} if found["rope_type"] == "mrope" else {}  # positions in three axes
    return {"partial_rotary_factor": first(config, "partial_rotary_factor", default=1.0)} | found


def why_unsupported(config: Any) -> str:
    """The fields that cannot be represented; empty if there are none."""
    c, family = config, family_of(config)
    computed = {"hidden_act": "silu", "swiglu_alpha": 1.702}
    computed |= (GEMMA if family.gemma else {}) | (ROUTER if experts(c) else {})
    others = [name for name, value in computed.items() if (getattr(c, name, value) or None) != (value or None)]
    refused = [f"{name} {getattr(c, name)!r} (only {computed[name]!r})" for name in others] + _unread(c) + _windows(c)
    biases = ["mlp_bias", "attention_out_bias"] + (["attention_bias"] if not family.has(QKV_BIAS) else [])
    refused += [f"{name}: true" for name in biases if getattr(c, name, False)]
    refused += ["attention_bias: false"] if family.sinks and not first(c, "attention_bias", default=True) else []
    if quantised := getattr(c, "quantization_config", None):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised.quant_method
        refused.append(f"weights quantised by {method} (save a bf16 copy of the model with transformers first)")
    refused += _rotary(c)
    refused += _router(c) if experts(c) else []
    refused += _vision(c) if family.tower else []
    what = f"this {c.model_type} model's configuration cannot be represented: "
    return what + "; ".join(refused) if refused else ""


def _unread(c: Any) -> list[str]:
    """Options that the family's own code does not read, where they say other than what it computes."""
    family = family_of(c)
    computed = {
        "use_sliding_window": first(c, "sliding_window") is not None,
        "use_qk_norm": family.qk_norm or family.latent,
        "attention_bias": family.has(QKV_BIAS),
        "norm_topk_prob": True,
        "partial_rotary_factor": 1.0,
    }
    numbers = (name for name, value in vars(c).items() if isinstance(value, float | int))
    computed |= {name: 1 for name in numbers if MULTIPLIER.fullmatch(name)}
    said = {name: first(c, name) for name in computed} | {"partial_rotary_factor": rope(c)["partial_rotary_factor"]}
    return [
        f"{name}: {json.dumps(value)}, which the code of {c.model_type} models does not read: leave it out"
        for name, value in said.items()
        if value not in (None, computed[name]) and c.model_type not in READ_BY.get(name, ())
    ]


def _windows(c: Any) -> list[str]:
    window, kinds = first(c, "sliding_window"), set(getattr(c, "layer_types", None) or ())
    everywhere = c.model_type == "mistral" or (c.model_type == "qwen3_moe" and first(c, "use_sliding_window"))
    unknown = kinds - {"full_attention", "linear_attention" if family_of(c).gated else None, "sliding_attention"}
    if window is None and "sliding_attention" in kinds:
        unknown |= {"sliding_attention without sliding_window"}
    if not family_of(c).windows and (kinds & {"sliding_attention"} or (window and everywhere)):
        fix = "sliding_window to null" if c.model_type == "mistral" else "use_sliding_window to false"
        return [f"sliding-window attention (set {fix} if the context fits in the window)"]
    return [f"layer_types {', '.join(sorted(unknown))}"] if unknown else []


def needs_sequence_parallel(config: Any) -> str:
    """What of this model megatron-core splits over tensor-parallel ranks only beside sequence parallelism; or empty."""
    if experts(config):
        return "a mixture of experts"
    return "latent attention" if family_of(config).latent else "a delta net" if family_of(config).gated else ""


def whole_experts(config: Any) -> str:
    """The reason why megatron-core cannot cut this model's experts; empty if it can."""
    return "the model's experts have biases" if family_of(config).sinks else ""


def whole_sequences(config: Any) -> str:
    """The reason why this model's sequences can be neither cut by context parallelism nor share their prompts; empty if
    they can."""
    if family_of(config).gated:
        return "the model's delta nets pass a state from token to token"
    if family_of(config).windows:
        return "the model has attention sinks and windows" if family_of(config).sinks else "the model has windows"
    return ""


def _rotary(c: Any) -> list[str]:
    found, latent = rope(c), family_of(c).latent
    kind = found["rope_type"]
    kinds = dict.fromkeys((kind, rope(c, "sliding_attention")["rope_type"]))
    refused = [f"rope_type {each!r} (only {', '.join(ROPE_TYPES)})" for each in kinds if each not in ROPE_TYPES]
    mscale, other, factor = (found.get(name) for name in ("mscale", "mscale_all_dim", "attention_factor"))
    # others scale the rotated part of q and k alone
    if kind == "yarn" and latent and (not mscale or mscale != other or factor not in (None, 1)):
        refused.append(f"mscale {mscale}, mscale_all_dim {other}, attention_factor {factor} (only equal ones, and 1)")
    if kind != "default" and found["partial_rotary_factor"] != 1.0:
        refused.append(f"rope_type {kind!r} with partial_rotary_factor {found['partial_rotary_factor']}")
    if latent and not first(c, "rope_interleave", default=True):
        refused.append("rope_interleave: false")
    return refused


def _vision(c: Any) -> list[str]:
    if not hasattr(c, "vision_config"):
        return ["no vision_config: it is a language model without its vision tower"]
    refused, found = [], rope(c)
    if experts(c) and c.hidden_size in (expert_ffn(c), 2 * expert_ffn(c)):
        refused.append(
            f"moe_intermediate_size {expert_ffn(c)} with hidden_size {c.hidden_size}: square experts, which "
            "transformers does not know from transposed ones"
        )
    sections, interleaved = found.get("mrope_section"), hasattr(vision_of(c), "deepstack_visual_indexes")
    if sum(sections or ()) * 2 != head_dim(c):
        refused.append(f"mrope_section {sections} with heads of {head_dim(c)} (it has to sum up to half of that)")
    if found.get("mrope_interleaved", interleaved) != interleaved:
        refused.append(f"mrope_interleaved: {json.dumps(not interleaved)}, which the code of its models does not read")
    return refused + ([f"rope_type {found['rope_type']!r} with images"] if found["rope_type"] != "default" else [])


def _router(c: Any) -> list[str]:
    refused = []
    if family_of(c).has(EXPERT_BIAS) and (c.num_experts_per_tok == 1 or not first(c, "norm_topk_prob", default=True)):
        refused.append("norm_topk_prob: false, or num_experts_per_tok 1, with a sigmoid router")
    if (first(c, "n_group") or 1) > 1 and c.num_experts_per_tok != 2 * c.topk_group:
        refused.append(f"num_experts_per_tok {c.num_experts_per_tok} with topk_group {c.topk_group} (only its double)")
    return refused


# ---- tensors


def weight_files(folder: Path) -> list[str]:
    """The names of the files of a model's weights. Raises DataError if one is not there."""
    index, what = folder / "model.safetensors.index.json", "names files that are not there:"
    if index.exists():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        files, what = ["model.safetensors"], "is not there, nor"
    if absent := [file for file in files if not (folder / file).exists()]:
        pickled = "; pickled weights (*.bin) are not read: save the model with safe_serialization=True first"
        hint = pickled if list(folder.glob("*.bin")) else "; a model.path without weights takes model.initialise=random"
        hint = hint if folder.is_dir() else " (no such folder)"
        raise DataError(f"{folder}: {index.name} {what} {', '.join(absent)}{hint}")
    return files


class StoredTensors:
    """What the headers of a folder's files say.

    The constructor raises DataError, naming the tensors, if one is missing, has another shape than `hf_config` says, or
    is not used by the model.
    """

    def __init__(self, path: str | Path, hf_config: Any):
        self.path, self.family = Path(path), family_of(hf_config)
        self.files: dict[str, tuple[str, str]] = {}  # tensor name -> file name, name in the file
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in weight_files(self.path):
            try:
                tensors = safe_open(self.path / file, "np")
            except SafetensorError as error:
                raise DataError(f"{self.path / file} is damaged or incomplete: {error}") from None
            for stored in list(tensors.keys()):
                name = self._published(stored)
                self.files[name] = file, stored
                self.shapes[name] = tuple(tensors.get_slice(stored).get_shape())
        self._check(hf_config)

    def _published(self, stored: str) -> str:
        """The family's name of a stored tensor. Versions of transformers have written others."""
        if self.family.tower and SEEN.match(stored):
            return SEEN.sub(self.family.tower, stored, count=1)
        prefix = WRAPPED.match(stored) or re.match(r"model\.(?!visual\.)", stored)
        return stored if prefix is None else self.family.prefix + stored[prefix.end() :]

    def _check(self, hf_config: Any) -> None:
        expected = hf_shapes(hf_config)
        ignored = IGNORED + (("lm_head.weight",) if hf_config.tie_word_embeddings else ())
        more = [name for name in self.files if name not in expected and not name.endswith(ignored)]
        self.skipped = [name for name in more if is_beside(name, hf_config.num_hidden_layers)]
        self.turned = [name for name in expected if self.shapes.get(name, expected[name]) != expected[name]]
        # transformers 5 saves stacked experts [E, in, out] of Qwen3-VL as [E, out, in]
        stacked = [each for each in expected.items() if self.family.tower and len(each[1]) == 3]
        turned = {name: (count, columns, rows) for name, (count, rows, columns) in stacked}
        wrong = [name for name in self.turned if self.shapes[name] != turned.get(name)]
        problems = {
            "missing": [name for name in expected if name not in self.files],
            "unexpected": [f"{name} in {self.files[name][0]}" for name in more if name not in self.skipped],
            "of another shape": [f"{name} {self.shapes[name]}, config.json says {expected[name]}" for name in wrong],
        }
        raise_on_problems(self.path, hf_config, problems)


def is_beside(name: str, layers: int) -> bool:
    """Return whether a tensor is of a published model's other parts: its vision tower, or its layers that predict
    further tokens, which come after the `layers` of the model."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return bool(BESIDE.match(name) or (layer and int(layer[1]) >= layers))


def raise_on_problems(path: Path, hf_config: Any, problems: dict[str, list[str]]) -> None:
    """Raise one DataError that lists all `problems`: kind -> names of tensors. Empty lists are no problem."""
    found = [f"{len(names)} {kind}: {some(names)}" for kind, names in problems.items() if names]
    named = set(getattr(hf_config, "architectures", None) or ()) - {family_of(hf_config).architecture}
    found += [f"its configuration names the architecture {', '.join(named)}"] if found and named else []
    if found:
        found.append("config.json and tensors must be of one model")
        raise DataError(f"{path}: the tensors are not those of this {hf_config.model_type} model. " + "; ".join(found))


def some(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")

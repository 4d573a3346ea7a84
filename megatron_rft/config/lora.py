"""The section `lora`: train low-rank adapters of a frozen model."""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from megatron_rft.config.messages import at
from megatron_rft.config.sections import Count, FilePath, Positive, Section, Share

TARGETS = {  # Hugging Face's modules
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
LAYERS = {  # megatron-core's
    "attention": ("self_attention.linear_qkv", "self_attention.linear_proj"),
    "mlp": ("mlp.linear_fc1", "mlp.linear_fc2"),
    "vision": (),
}
VISION = re.compile(r".*visual\..*\.(?:qkv|attn\.proj|\w+_proj|mlp\.[02]|linear_fc[12])")  # transformers' modules


def targets_of(named: Any) -> Any:
    """PEFT's names of all modules of a target are the target. Raises ValueError for a part of them."""
    if not isinstance(named, list):
        return named
    modules = [module for its in TARGETS.values() for module in its]
    targets = [each for each in named if each not in modules]
    for target, its in TARGETS.items():
        given, missing = [each for each in its if each in named], [each for each in its if each not in named]
        if given and missing and target not in targets:
            raise ValueError(
                f"{', '.join(given)} without {', '.join(missing)}: megatron-core joins q_proj, k_proj and v_proj, and "
                f"gate_proj and up_proj, in one layer each, so all modules of a target have adapters. Write {target} "
                f"for {', '.join(its)}"
            )
        targets += [target] if given and target not in targets else []
    return targets


class Lora(Section):
    """Names and meaning are those of PEFT's LoraConfig: r, lora_alpha, lora_dropout, use_rslora."""

    rank: Count = 16
    """Columns of each adapter's B and rows of its A."""
    alpha: Positive = 32.0
    """The adapter's output is multiplied by alpha / rank."""
    targets: Annotated[list[Literal[*LAYERS]], BeforeValidator(targets_of), Field(min_length=1)] = list(TARGETS)  # pyright: ignore[reportInvalidTypeForm]
    """Layers with adapters. attention: q_proj, k_proj, v_proj, o_proj. mlp: gate_proj, up_proj, down_proj. PEFT's names
    of all of a target's modules are the target. vision: all linear layers of a vision tower."""
    use_rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead, so that a larger rank does not learn more slowly."""
    dropout: Share = 0.0
    """Share of the adapter's inputs that are zero in training. Log-probs before the step are computed without it."""
    path: FilePath | None = None
    """A folder in PEFT's format to start from: adapters of this model with the same options. None: A is random and B
    zero, so that training starts from the model itself."""

    def _check(self):
        if len(set(self.targets)) < len(self.targets):
            raise at("targets", f"names a target twice: {', '.join(self.targets)}")

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)

    def peft(self) -> dict[str, Any]:
        """The fields of PEFT's adapter_config.json that must agree."""
        modules: Any = sorted(module for target in self.targets for module in TARGETS.get(target, ()))
        if "vision" in self.targets:  # whose modules may have the names of others
            others = [rf"(?!.*visual\.).*\.({'|'.join(modules)})"] if modules else []
            modules = "|".join([VISION.pattern, *others])
        return {"r": self.rank, "lora_alpha": self.alpha, "use_rslora": self.use_rslora, "target_modules": modules}

"""The section `constraint`, which keeps the policy from degenerating (dynamic_constraint.txt 3). No torch.

    none      no constraint
    static    the algorithm's KL to the reference: `eta` and `mode` set algorithm.kl_coefficient and algorithm.kl_in
    dynamic   a frozen refiner corrects the policy's responses, and the policy learns corrections that score higher

Without the section an algorithm has the KL of its defaults. With kind dynamic it has no KL, unless
algorithm.kl_coefficient is given.
"""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from megatron_rft.config.algorithms import SECTIONS
from megatron_rft.config.messages import at, check_braces, hint
from megatron_rft.config.sections import Count, FilePath, Natural, NonNegative, Section

TEMPLATES = Path(__file__).parents[1] / "rollout" / "templates"
TEMPLATE_OF = {"math": "mathematics", "code": "code", "model": "dialogue"}  # by reward.kind
ETA = "the paper uses 1e-2 for dialogue and 1e-4 for code"
Place = Literal["loss", "reward"] | None


class Constraint(Section):
    """The options of every kind."""

    refines: ClassVar[bool] = False

    kind: str
    kl_every: Natural = 0
    """Steps between measurements of KL(policy || reference), which is not part of the loss; 0: none. Each costs a
    forward pass of the reference."""


class NoConstraint(Constraint, kind="none"): ...


class StaticOptions(Constraint, kind="static"):
    eta: NonNegative = Field(description=ETA)
    """Weight of the KL."""
    mode: Place = None
    """loss: a term of the loss. reward: a penalty on the reward, without a gradient. None: the algorithm's kl_in."""


class DynamicOptions(Constraint, kind="dynamic"):
    refines: ClassVar[bool] = True

    eta: NonNegative = Field(description=ETA)
    """Weight of the cross entropy on refined responses; 0 only measures it."""
    mode: Place = None
    """loss: a term of the loss. reward: a penalty on the reward, without a gradient. None: loss."""
    tokens: Literal["sum", "mean"] = "sum"
    """The constraint of a pair is the sum of its tokens' cross entropies, as in the paper, or their mean."""
    per: Literal["responses", "pairs"] = "responses"
    """Divisor of the summed constraints in the loss. responses: the mini-batch's sampled responses, so the constraint
    fades as pairs become rare. pairs: the number of pairs."""
    filter: bool = True
    """Learn only refined responses that score higher than the original. false is the paper's ablation."""
    agreeing: bool = False
    """Also refine groups of equal rewards that the algorithm would leave out (dapo). Groups with a pair are then
    trained on, by their pairs alone. Only with mode loss."""
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Refine this share of the responses, chosen by run.seed."""
    first: Count | None = None
    """Refine at most this many responses of a group, the first that can be improved. None: all."""
    template: FilePath | None = None
    """The refiner's prompt: code, dialogue, mathematics, or a file with {question}, {response} and optionally {reward}
    in braces. None: by reward.kind."""
    temperature: NonNegative = 0.0
    """Temperature of the refiner; 0 is greedy."""
    max_tokens: Count | None = None
    """Maximum tokens of a refined response. None: rollout.max_response_tokens."""
    overlap: bool = False
    """Refine early groups while later ones are still being generated. This changes only the speed, and helps if
    generation leaves processors idle."""
    norms_every: Natural = 0
    """Steps between measurements of the gradient norms of the loss's two parts; 0: none. Each costs two more backward
    passes."""

    def _check(self):
        untrained = "while eta is 0: the pairs are not trained on"
        self.unused(self.eta == 0, untrained, "mode", "tokens", "per", "filter", "agreeing")
        self.unused(self.mode == "reward", "with mode reward: each response has its own penalty", "per")
        if self.agreeing and self.mode == "reward":
            why = "penalties would be all that differs in such a group: refined responses lose and the others gain"
            raise at("agreeing", f"with mode reward, {why}. Use mode: loss")
        if self.norms_every and (not self.eta or self.mode == "reward"):
            raise at("norms_every", "the loss has only one part: eta is 0, or the constraint is in the reward")
        if self.template is not None:
            read_template(self.template)

    def template_text(self, reward_kind: str) -> str:
        name = self.template or TEMPLATE_OF.get(reward_kind)
        if name is None:
            names = ", ".join(named_templates())
            raise at("constraint.template", f"is required with reward.kind={reward_kind}: {names}, or a file")
        return read_template(name)


CONSTRAINTS = {"none": NoConstraint, "static": StaticOptions, "dynamic": DynamicOptions}
"""By `constraint.kind`."""


def named_templates() -> list[str]:
    return sorted(each.stem for each in TEMPLATES.glob("*.txt"))


def read_template(name: str) -> str:
    """The text of a named template or of a file, without its last line break."""
    names = named_templates()
    path = TEMPLATES / f"{name}.txt" if name in names else Path(name)
    try:
        text = path.read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError):
        raise at("template", f"{name!r} is neither a template's name nor a text file.{hint(name, names)}") from None
    check_braces("template", text, {"question", "response"}, {"reward"}, name)
    return text


def into_algorithm(recipe: dict[str, Any]) -> dict[str, Any]:
    """Sets the algorithm's KL options from the constraint. Values that are not sections are left to validation."""
    constraint, algorithm = recipe.get("constraint"), recipe.get("algorithm") or {}
    if not isinstance(constraint, dict) or not isinstance(algorithm, dict):
        return recipe
    section = SECTIONS.get(str(algorithm.get("name", "grpo")))
    if section is None or "kl_in" not in section.model_fields:
        return recipe
    kind, eta = constraint.get("kind"), constraint.get("eta")
    if kind == "static":
        said = {"kl_coefficient": eta} | ({"kl_in": constraint["mode"]} if constraint.get("mode") else {})
    elif kind in ("none", "dynamic"):
        said = {"kl_coefficient": 0.0}
    else:
        return recipe
    for name, value in said.items():
        given = algorithm.get(name)
        if kind != "dynamic" and given is not None and given != value:
            option = {"kl_coefficient": "eta", "kl_in": "mode"}[name]
            instead = f"constraint.{option} is {value}" if kind == "static" else "constraint.kind none has no KL"
            raise at(f"algorithm.{name}", f"{given} contradicts the constraint: {instead}. Leave this one out")
    return recipe | {"algorithm": said | {name: value for name, value in algorithm.items() if value is not None}}

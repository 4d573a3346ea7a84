"""The section `reward`: a section for each kind of verifier, and their table. No torch.

A section's own options are the arguments of the class that grades (`rewards/registry.py`).
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_serializer

from megatron_rft.config.messages import at, check_braces
from megatron_rft.config.one_of import OneOf
from megatron_rft.config.sections import Count, FilePath, Positive, Section

OF_A_PART = ("weight", "shaping", "name")
SECTIONS: dict[str, type["RewardOptions"]] = {}  # by `reward.kind`; filled from REWARDS


class RewardOptions(Section):
    """The options of every kind."""

    kind: str
    max_error_share: float = Field(default=0.5, ge=0, le=1)
    """Responses on which the grader itself fails are left out and counted; above this share of a step's responses the
    run ends."""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    """In a sum."""
    shaping: bool = False
    """In a sum: add this part only in training. PIPO, DAPO's filter and all accuracies use the sum without it."""
    name: str | None = None
    """In a sum: its name in reasons and details. None: its kind."""

    def inside(self) -> dict[str, "RewardOptions"]:
        """The rewards that this one consists of, by their place in it."""
        return {}

    def everything(self) -> list["RewardOptions"]:
        """This reward and all its parts, recursively."""
        return [self, *(each for part in self.inside().values() for each in part.everything())]

    def judges(self) -> list[str]:
        """The checkpoints that score responses here."""
        return [each.model for each in self.everything() if isinstance(each, JudgeOptions)]

    def check_alone(self, place: str) -> None:
        """Refuse options that only a part of a sum may have."""
        for option in OF_A_PART:
            if self.differs(option):
                raise at(place + option, "is for the parts of a sum")

    def _check(self):
        for place, part in self.inside().items():
            if part.differs("max_error_share"):
                raise at(f"{place}.max_error_share", "belongs to the whole reward: set reward.max_error_share")

    @model_serializer(mode="wrap")
    def _without_unset_options_of_a_part(self, serialise) -> dict[str, Any]:
        return {key: value for key, value in serialise(self).items() if key not in OF_A_PART or self.differs(key)}


AnyReward = Annotated[RewardOptions, OneOf("kind", SECTIONS, "math")]


class MathOptions(RewardOptions, kind="math"):
    """The final answer is equivalent to the reference answer; 1 or 0."""

    answer: Literal["boxed", "marked", "any"] = "marked"
    """Where the answer is read. boxed: only the last \\boxed{}. marked: also "#### 5", "the answer is 5", and the value
    at the end of the response. any: also the last number or formula. Votes use the same answer."""


class CodeOptions(RewardOptions, kind="code"):
    """The share of the row's tests that the program passes in a sandbox; -1, -0.6, or from -0.3 to 1."""

    timeout_s: Positive = 5.0
    """Processor seconds of one test (one input of a script, one call of a function); twice that in elapsed time."""
    row_timeout_s: Positive = 60.0
    """Processor seconds of all tests of a row together; twice that in elapsed time."""
    workers: Count = 1
    """Programs that run at a time, per rank."""
    memory_mb: Count = 1024
    """Address space of a program."""
    without_container: bool = False
    """Run programs even if no container works. They can then read this machine's files."""

    def _check(self):
        if self.row_timeout_s < self.timeout_s:
            raise at(
                "row_timeout_s",
                f"{self.row_timeout_s:g} s for all tests of a row, less than timeout_s={self.timeout_s:g} for one",
            )


class ToolOptions(RewardOptions, kind="tool"):
    """Comparison of tool calls with the reference's."""

    rules: Literal["rlla", "exact"] = "rlla"
    """rlla: partial credit from -3 to 4, as in ToolRL. exact: 1 if the calls equal the reference's in any order, else
    0."""


class ChoiceOptions(RewardOptions, kind="choice"):
    """The letter of a multiple choice; 1 or 0."""


class FormatOptions(RewardOptions, kind="format"):
    """The response consists of the sections `tags`; 1 or 0."""

    tags: Annotated[list[str], Field(min_length=1)]
    """The sections, each once and in this order, such as [think, answer]."""


class JudgeOptions(RewardOptions, kind="model"):
    """A sequence-classification checkpoint scores the response."""

    model: FilePath
    """Folder or hub name of the checkpoint."""
    template: str = "{prompt}{response}"
    """The text that is scored."""
    max_tokens: Count = 2048
    """Longer texts lose their beginning."""
    batch: Count = 16
    """Responses that are scored together."""

    def _check(self):
        check_braces("template", self.template, {"response"}, {"prompt"})


class SumOptions(RewardOptions, kind="sum"):
    """The weighted sum of `parts`."""

    parts: Annotated[list[AnyReward], Field(min_length=1)]
    """Rewards, each with its `weight`; with `shaping: true` it is not part of the verifier's reward."""

    def inside(self) -> dict[str, RewardOptions]:
        return {f"parts.{number}": part for number, part in enumerate(self.parts)}

    def _check(self):
        if all(part.shaping for part in self.parts):
            raise at("parts", "all of them are shaping: at least one must be a verifier")
        names = [part.name or part.kind for part in self.parts]
        for name in names:
            if names.count(name) > 1:
                raise at("parts", f"two are called {name!r}: give each its own name")


class ByRowOptions(RewardOptions, kind="by_row"):
    """Each row names its kind."""

    kinds: Annotated[dict[str, AnyReward], Field(min_length=1)]
    """The rewards, by the names that rows use."""
    field: str = "reward"
    """The row's field that names one of `kinds`."""

    def inside(self) -> dict[str, RewardOptions]:
        return {f"kinds.{name}": part for name, part in self.kinds.items()}

    def _check(self):
        for place, part in self.inside().items():
            part.check_alone(f"{place}.")


class NoOptions(RewardOptions, kind="none"):
    """No grading, for algorithms without rewards."""


class OwnOptions(RewardOptions, kind="own"):
    """Your function (docs/own_data_and_reward.md)."""

    function: str
    """my_file.py:name (relative to the working directory) or my_module:name."""
    maximum: float | None = Field(default=None, allow_inf_nan=False)
    """Upper bound of the reward. None: no bound."""
    signature: Literal["trl", "trl_chat", "verl"] | None = None
    """Whose arguments it has. trl: prompts, completions and the row's columns, as lists of texts. trl_chat: the same
    with lists of messages. verl: data_source, solution_str, ground_truth, extra_info. None: (prompt, text), or
    (prompts, texts) with lists."""
    processes: Count = 1
    """Processes of each rank with an engine in which it runs."""
    timeout_s: Positive = 60.0
    """Seconds for a response; for a function of lists, for the responses to one problem. Later ones are left out."""
    memory_mb: Count | None = None
    """Limit of a process's data, with the models that its module loads. None: no limit."""
    at_once: Count | None = None
    """Calls of an async function that wait at the same time, in each process. None: 64."""


REWARDS: dict[str, tuple[type[RewardOptions], str]] = {
    # reward.kind: (section, MODULE.CLASS of the verifier under rewards/)
    "math": (MathOptions, "math.MathReward"),
    "code": (CodeOptions, "code.CodeReward"),
    "tool": (ToolOptions, "tools.verifier.ToolReward"),
    "choice": (ChoiceOptions, "choice.ChoiceReward"),
    "format": (FormatOptions, "choice.FormatReward"),
    "model": (JudgeOptions, "model.ModelReward"),
    "sum": (SumOptions, "combine.SumReward"),
    "by_row": (ByRowOptions, "combine.ByRowReward"),
    "none": (NoOptions, "base.NoReward"),
    "own": (OwnOptions, "user_reward.UserReward"),
}
SECTIONS.update({kind: section for kind, (section, _) in REWARDS.items()})

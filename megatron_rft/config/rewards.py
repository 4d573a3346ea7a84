"""The `reward` section: which verifier grades, and its options. No torch.

One flat section: an option that the chosen kind does not read is refused.
"""

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_serializer, model_validator

from megatron_rft.config.messages import at
from megatron_rft.config.sections import Count, Natural, Positive, Section

ALWAYS = {"kind", "on_error", "on_nonfinite"}


@dataclass(frozen=True)
class Kind:
    """A reward. `made_by`: FILE:CLASS below `megatron_rft.rewards`. `reads`: options of the section that the class gets
    under their names. `needs`: the one of them that has no default."""

    made_by: str
    reads: tuple[str, ...] = ()
    needs: str | None = None


KINDS = {
    "math": Kind("math:MathReward", ("timeout_s", "workers", "answer")),
    "code": Kind("code:CodeReward", ("timeout_s", "row_timeout_s", "workers", "memory_mb", "without_container")),
    "tool": Kind("tools.verifier:ToolReward", ("rules",)),
    "choice": Kind("choice:ChoiceReward"),
    "format": Kind("choice:FormatReward", ("tags",), needs="tags"),
    "model": Kind("model:ModelReward", ("model", "template", "max_tokens", "batch"), needs="model"),
    "server": Kind("model:ServerReward", ("url", "timeout_s", "batch"), needs="url"),
    "sum": Kind("combine:SumReward", ("parts",), needs="parts"),
    "by_row": Kind("combine:ByRowReward", ("field", "kinds"), needs="kinds"),
    "own": Kind("user_reward:UserReward", ("function", "maximum"), needs="function"),
}
PART = ("weight", "shaping", "name")


class Reward(Section):
    kind: Literal[tuple(KINDS)] = "math"
    """math: the final answer is equivalent to the reference answer; 1 or 0.
    code: the program runs in a sandbox against the row's tests; -1, -0.6, or from -0.3 to 1 by the share it passes.
    tool: tool calls against the reference's.
    choice: the letter of a multiple choice; 1 or 0.
    format: the response consists of the sections `tags`; 1 or 0.
    model: a sequence-classification checkpoint scores the response. server: a URL does.
    sum: the weighted sum of `parts`. by_row: each row's own kind.
    own: a function of yours (docs/own_data_and_reward.md)."""
    on_error: Literal["drop", "stop"] = "drop"
    """When the grader itself fails on a response: leave it out, counted, or end the run. It is never a reward of 0."""
    on_nonfinite: Literal["drop", "stop"] = "stop"
    """When a reward is NaN or infinite: end the run, naming the response, or leave it out like a grader's failure."""
    timeout_s: Positive = 5.0
    """math: of one response's grading. code: processor seconds of one test (one input of a script, one call of a
    function), and twice that by the clock. server: of one request."""
    row_timeout_s: Positive = 60.0
    """code: processor seconds of all tests of a row together, and twice that by the clock."""
    workers: Natural = 1
    """math: grading processes; 0: in this process, without a time limit. code: programs that run at one time,
    per rank."""
    answer: Literal["boxed", "marked", "any"] = "marked"
    """math: where an answer is read. boxed: the last \\boxed{} alone. marked: also "#### 5", "the answer is 5", and the
    value that the response ends with. any: else the last number or formula. Votes read the same answer."""
    memory_mb: Count = 1024
    """code: address space of a program."""
    without_container: bool = False
    """code: run programs even where no container works. They can then read this machine's files."""
    rules: Literal["rlla", "bfcl", "exact"] = "rlla"
    """tool: rlla, partial credit from -3 to 4 as ToolRL has it. bfcl: 1 or 0 by the Berkeley leaderboard's rules.
    exact: 1 where the calls are the reference's, in any order, else 0."""
    tags: list[str] = []
    """format: each of them once, in this order, such as [think, answer]."""
    model: str | None = None
    """model: folder or hub name of the checkpoint."""
    template: str = "{prompt}{response}"
    """model: the text that is scored."""
    max_tokens: Count = 2048
    """model: of the text's end."""
    batch: Count = 16
    """model, server: responses that are scored together."""
    url: str | None = None
    """server: takes a POST of {"prompts": [...], "responses": [...]} and answers {"rewards": [...]}."""
    function: str | None = None
    """own: my_file.py:name, its path relative to the working directory, or my_module:name."""
    maximum: float | None = Field(default=None, allow_inf_nan=False)
    """own: no reward is above it. None: there is no bound."""
    parts: list["Reward"] = []
    """sum: rewards, each with its `weight` and, where it is no part of what the verifier says, `shaping: true`."""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    """In a sum."""
    shaping: bool = False
    """In a sum: added in training only. PIPO, DAPO's filter and all accuracies see the sum without it."""
    name: str | None = None
    """In a sum: what reasons and details call it. None: its kind."""
    field: str = "reward"
    """by_row: the row's field that names one of `kinds`."""
    kinds: dict[str, "Reward"] = {}
    """by_row: a name that rows use -> a reward."""

    @model_validator(mode="after")
    def _check(self):
        for option in sorted(self.model_fields_set - ALWAYS - set(PART) - set(KINDS[self.kind].reads)):
            raise at(option, f"does nothing with kind {self.kind}")
        needed = KINDS[self.kind].needs
        if needed and not getattr(self, needed):
            raise at(needed, f"is required with kind {self.kind}")
        if self.kind == "code" and not self.workers:
            raise at("workers", "kind code runs programs in processes of their own: it takes 1 or more")
        if self.kind == "code" and self.row_timeout_s < self.timeout_s:
            raise at(
                "row_timeout_s",
                f"{self.row_timeout_s:g} s for all tests of a row, less than timeout_s={self.timeout_s:g} for one",
            )
        if self.kind == "server" and not self.url.startswith(("http://", "https://")):
            raise at("url", f"{self.url!r} is no http:// or https:// address")
        if self.kind == "model":
            self._check_template()
        if self.kind == "sum":
            self._check_sum()
        for name, each in [*enumerate(self.parts), *self.kinds.items()]:
            place = "parts" if self.parts else "kinds"
            for key in ("on_error", "on_nonfinite"):
                if each.differs(key):
                    raise at(f"{place}.{name}.{key}", f"belongs to the whole reward: set reward.{key}")
        for name, each in self.kinds.items():
            each.check_alone(f"kinds.{name}.")
        return self

    def everything(self) -> list["Reward"]:
        """This one, and all that it is made of."""
        return [self, *(each for part in (*self.parts, *self.kinds.values()) for each in part.everything())]

    def check_alone(self, place: str):
        """It is no part of a sum."""
        for option in PART:
            if getattr(self, option) != type(self).model_fields[option].default:
                raise at(place + option, "is for the parts of a sum")

    @model_serializer(mode="wrap")
    def _only_what_is_read(self, serialise) -> dict[str, Any]:
        """So that a recipe that was written out can be read again."""
        defaults = {name: field.default for name, field in type(self).model_fields.items()}
        kept = {*KINDS[self.kind].reads} | ALWAYS | {name for name in PART if getattr(self, name) != defaults[name]}
        return {name: value for name, value in serialise(self).items() if name in kept}

    def _check_template(self):
        try:
            shows = self.template.format(prompt="\0", response="\1")
        except (KeyError, IndexError, ValueError) as error:
            raise at("template", f"{error!r}: it is a format string over {{prompt}} and {{response}}") from None
        if "\1" not in shows:
            raise at("template", "has no {response}")

    def _check_sum(self):
        if all(part.shaping for part in self.parts):
            raise at("parts", "all of them are shaping: there is no verifier among them")
        names = [part.name or part.kind for part in self.parts]
        for name in names:
            if names.count(name) > 1:
                raise at("parts", f"two are called {name!r}: give each a name of its own")

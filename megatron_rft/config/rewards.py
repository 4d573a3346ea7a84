"""The section `reward`: the kind of verifier and its options. No torch.

The section is flat. An option that the chosen kind does not read is refused.
"""

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_serializer, model_validator

from megatron_rft.config.messages import at
from megatron_rft.config.sections import Count, Natural, Positive, Section

ALWAYS = {"kind", "on_error", "on_nonfinite"}


@dataclass(frozen=True)
class Kind:
    """A kind of reward. `made_by`: FILE:CLASS in `megatron_rft.rewards`. `reads`: the section's options that are the
    class's arguments. `needs`: the required one."""

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
    code: the share of the row's tests that the program passes in a sandbox; -1, -0.6, or from -0.3 to 1.
    tool: comparison of tool calls with the reference's.
    choice: the letter of a multiple choice; 1 or 0.
    format: the response consists of the sections `tags`; 1 or 0.
    model: a sequence-classification checkpoint scores the response. server: a server scores it.
    sum: the weighted sum of `parts`. by_row: each row names its kind.
    own: your function (docs/own_data_and_reward.md)."""
    on_error: Literal["drop", "stop"] = "drop"
    """If the grader itself fails on a response. drop: leave the response out and count it. stop: end the run."""
    on_nonfinite: Literal["drop", "stop"] = "stop"
    """If a reward is NaN or infinite. stop: end the run and name the response. drop: leave the response out."""
    timeout_s: Positive = 5.0
    """math: limit of one response's grading. code: processor seconds of one test (one input of a script, one call of a
    function); twice that in elapsed time. server: limit of one request."""
    row_timeout_s: Positive = 60.0
    """code: processor seconds of all tests of a row together; twice that in elapsed time."""
    workers: Natural = 1
    """math: grading processes; 0: grade in this process, without a time limit. code: programs that run at a time, per
    rank."""
    answer: Literal["boxed", "marked", "any"] = "marked"
    """math: where the answer is read. boxed: only the last \\boxed{}. marked: also "#### 5", "the answer is 5", and the
    value at the end of the response. any: also the last number or formula. Votes use the same answer."""
    memory_mb: Count = 1024
    """code: address space of a program."""
    without_container: bool = False
    """code: run programs even if no container works. They can then read this machine's files."""
    rules: Literal["rlla", "bfcl", "exact"] = "rlla"
    """tool: rlla: partial credit from -3 to 4, as in ToolRL. bfcl: 1 or 0 by the Berkeley leaderboard's rules.
    exact: 1 if the calls equal the reference's in any order, else 0."""
    tags: list[str] = []
    """format: the sections, each once and in this order, such as [think, answer]."""
    model: str | None = None
    """model: folder or hub name of the checkpoint."""
    template: str = "{prompt}{response}"
    """model: the text that is scored."""
    max_tokens: Count = 2048
    """model: longer texts lose their beginning."""
    batch: Count = 16
    """model, server: responses that are scored together."""
    url: str | None = None
    """server: receives a POST of {"prompts": [...], "responses": [...]} and answers {"rewards": [...]}."""
    function: str | None = None
    """own: my_file.py:name (relative to the working directory) or my_module:name."""
    maximum: float | None = Field(default=None, allow_inf_nan=False)
    """own: upper bound of the reward. None: no bound."""
    parts: list["Reward"] = []
    """sum: rewards, each with its `weight`; with `shaping: true` it is not part of the verifier's reward."""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    """In a sum."""
    shaping: bool = False
    """In a sum: add this part only in training. PIPO, DAPO's filter and all accuracies use the sum without it."""
    name: str | None = None
    """In a sum: its name in reasons and details. None: its kind."""
    field: str = "reward"
    """by_row: the row's field that names one of `kinds`."""
    kinds: dict[str, "Reward"] = {}
    """by_row: the rewards, by the names that rows use."""

    @model_validator(mode="after")
    def _check(self):
        for option in sorted(self.model_fields_set - ALWAYS - set(PART) - set(KINDS[self.kind].reads)):
            raise at(option, f"does nothing with kind {self.kind}")
        needed = KINDS[self.kind].needs
        if needed and not getattr(self, needed):
            raise at(needed, f"is required with kind {self.kind}")
        if self.kind == "code" and not self.workers:
            raise at("workers", "must be at least 1 with kind code, which runs programs in separate processes")
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
        """This reward and all its parts, recursively."""
        return [self, *(each for part in (*self.parts, *self.kinds.values()) for each in part.everything())]

    def check_alone(self, place: str):
        """Refuse options that only a part of a sum may have."""
        for option in PART:
            if self.differs(option):
                raise at(place + option, "is for the parts of a sum")

    @model_serializer(mode="wrap")
    def _only_what_is_read(self, serialise) -> dict[str, Any]:
        """Write only options that the kind reads: the others would be refused on loading."""
        kept = {*KINDS[self.kind].reads} | ALWAYS | set(filter(self.differs, PART))
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
            raise at("parts", "all of them are shaping: at least one must be a verifier")
        names = [part.name or part.kind for part in self.parts]
        for name in names:
            if names.count(name) > 1:
                raise at("parts", f"two are called {name!r}: give each its own name")

"""The plug-ins around an online algorithm, sections pipo and distil, and the options of a distillation's teacher."""

from typing import Annotated, Literal

from pydantic import Field

from megatron_rft.config.sections import FilePath, Positive, Section, ShareOrAll

Divergence = Literal["reverse_kl", "forward_kl", "jsd"]


class Teaching(Section):
    teacher: FilePath | Annotated[dict[str, FilePath], Field(min_length=1)]
    """Folder or hub name of the teacher: any size and family, with the model's tokenizer. Or several by name, such as
    {code: path/a, text: path/b}: data.teacher_field says which one a row has."""
    divergence: Divergence = "reverse_kl"
    """reverse_kl: KL(student || teacher). forward_kl: KL(teacher || student). jsd: the Jensen-Shannon divergence. Exact
    over the vocabulary."""
    jsd_beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """jsd: the teacher's share of the mixture."""

    @property
    def teachers(self) -> dict[str, str]:
        """The paths of all teachers by name."""
        return self.teacher if isinstance(self.teacher, dict) else {"": self.teacher}

    def _check(self):
        self.unused(self.divergence != "jsd", f"with divergence {self.divergence}", "jsd_beta")


class Distil(Teaching):
    coefficient: Positive = 1.0
    """Of the mean divergence per token, which is added to the algorithm's loss."""


class PIPO(Section):
    window: Annotated[int, Field(ge=2)] = 8
    """Number of previous batch means against which the improvement is measured."""
    rectification: ShareOrAll = 0.1
    """Factor of a negative improvement."""
    learning_rate: Positive = 1e-6
    """Learning rate of the verification step."""
    xi_max: Positive = 10.0
    """The improvement is clipped to ± this."""
    optimizer_state: Literal["shared", "own"] = "shared"
    """Adam's moments in the verification step. shared: those of the policy's steps. own: a second set, which takes as
    much memory again."""

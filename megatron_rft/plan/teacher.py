"""Checks the teacher of a distillation against the model and the layout, and counts its weights. No torch."""

from megatron_rft.config.sections import Megatron
from megatron_rft.plan.layout import Layout, problems
from megatron_rft.plan.model_shape import ModelShape, find_shape
from megatron_rft.plan.parameters import stage_chunks, total
from megatron_rft.utils.errors import ConfigError, DataError


def check(teacher: str, student: ModelShape | None, megatron: Megatron, layout: Layout, longest: int) -> str:
    """Return the plan's line about the teacher. `longest`: tokens of the longest sequence. Raises UserError if it can
    not be this model's teacher."""
    shape = find_shape(teacher, "teacher")
    if shape is None:
        return f"teacher: {teacher}, from the Hugging Face hub: not checked yet"
    if student and shape.vocabulary < student.vocabulary:
        what = f"its vocabulary has {shape.vocabulary} rows, fewer than the model's {student.vocabulary}"
        raise DataError(f"teacher: {teacher}: {what}")
    if longest > shape.max_positions:
        raise ConfigError(f"teacher: a sequence may have {longest} tokens, beyond its {shape.max_positions} positions")
    if found := list(problems(layout, shape)):
        raise ConfigError(f"teacher: it is computed in the model's layout, and {'; '.join(found)}")
    if shape.sequence_parallel and layout.tp > 1 and not megatron.sequence_parallel:
        what = "tensor parallelism needs megatron.sequence_parallel"
        raise ConfigError(f"teacher: {shape.sequence_parallel} with {what}")
    return f"teacher: {teacher} ({shape}), its weights in host memory while idle"


def weights(teacher: str, layout: Layout, element: int) -> int:
    """Return the bytes of the teacher's weights on the rank that has most; 0 before its download."""
    shape = find_shape(teacher, "teacher", loads=False)
    if shape is None:
        return 0
    tower = shape.tower.whole if shape.tower else 0
    return max(total(stage_chunks(shape, layout, i)) + (tower if i == 0 else 0) for i in range(layout.pp)) * element

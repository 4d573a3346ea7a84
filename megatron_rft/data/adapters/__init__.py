"""Adapters turn raw rows of published data sets into rows with our field names.

    question   the problem, as published          answer     the reference, as text
    history    turns before it, [{role, content}], a system turn first
    solution   a reference solution (SDPO's feedback, SFT's response)
    subject, level, id      strings, where the data set has them
    tests      of programs          choices   letter -> text
    unusable   why this row cannot be used for training or grading; it is then left out and counted

An adapter is a function from `Fields` to such a row. `config/datasets.py` has the table of all adapters, with their
rewards and locations on the hub.
"""

from collections.abc import Callable, Iterator

from megatron_rft.config.datasets import DATASETS
from megatron_rft.data.adapters import code, mathematics, text, tools
from megatron_rft.data.fields import Fields, File, Row
from megatron_rft.utils.errors import DataError, first_line

MODULES = {"mathematics": mathematics, "code": code, "tools": tools, "text": text}
ADAPTERS: dict[str, Callable[[Fields], Row]] = {
    name: getattr(MODULES[module], function)
    for name, (module, function) in ((name, known.adapter.split(".")) for name, known in DATASETS.items())
}


def adapt(rows: Iterator[tuple[str, Row]], name: str, file: File) -> Iterator[Row]:
    """Applies the adapter `name` to the rows of `file`."""
    for place, row in rows:
        place = f"{place} (adapter {name})"
        try:
            adapted = ADAPTERS[name](Fields(row, place, file))
        except DataError:
            raise
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            problem = first_line(error) if type(error) is ValueError else f"{type(error).__name__}: {first_line(error)}"
            raise DataError(f"{place}: a field is not what this data set has there ({problem})") from None
        yield adapted

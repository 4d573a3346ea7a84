"""The errors a user can cause, and the ones that end a run on purpose. Imports nothing, so every layer may raise them.

A `UserError` names the value, the place it came from and what to do about it; the command line prints it without a
traceback. Our own mistakes stay `assert`s and ordinary exceptions.
"""

import difflib
import errno
from collections.abc import Iterable


class UserError(ValueError):
    """Something the user gave is wrong. The message says what, where, and the fix."""


class ConfigError(UserError):
    """A recipe or an override is wrong."""


class DataError(UserError):
    """A data set, a tokenizer or a model folder is not what the recipe says."""


class RunFailed(RuntimeError):
    """The run cannot go on (numerical failure, a dead peer). What was saved, and where, is in the message."""


def disk_is_full(error: BaseException) -> bool:
    """Whether a write failed because the disk is full. torch reports a short write by the unexpected position only."""
    no_room = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    return no_room or "No space left" in str(error) or "unexpected pos" in str(error)


def disk_full(error: OSError) -> str:
    """The message for the user about a full disk."""
    where = f" where {error.filename} is" if error.filename else ""
    return f"the disk is full{where}. Free some space and run the same command again: it goes on from what is complete"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`" Did you mean 'lr'?"` when something known is close to `name`, else an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def first_line(error: BaseException) -> str:
    """The first line of what another library says, to stand within a sentence of ours."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__

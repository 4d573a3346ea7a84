"""The errors that a user can cause, and those that end a run on purpose. Imports nothing, so every layer may raise
them.

A `UserError` names the value, its origin and the fix; the command line prints it without a traceback. Bugs of this
package are `assert`s and ordinary exceptions.
"""

import difflib
import errno
import os
import re
from collections.abc import Iterable

FAILED_DISK = (errno.EROFS, errno.ESTALE, errno.EIO)
LOST = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, *FAILED_DISK)


class UserError(ValueError):
    """Some input of the user is wrong. The message names the value, its origin and the fix."""


class ConfigError(UserError):
    """A recipe or an override is wrong."""


class DataError(UserError):
    """A data set, a tokenizer or a model folder is not what the recipe says."""


class CodeError(UserError):
    """What the user's code returned can never be used. No retry would help, so it ends the run."""


class RunFailed(RuntimeError):
    """The run cannot continue (numerical failure, a dead process). The message says what was saved, and where."""


def disk_is_full(error: BaseException) -> bool:
    """Return whether a write failed because the disk is full. torch only reports an unexpected position in the file."""
    no_room = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    return no_room or "No space left" in str(error) or "unexpected pos" in str(error)


def folder_is_lost(error: BaseException, folder: object) -> str:
    """Return why a write below `folder` failed if the folder is gone or refuses writes, else an empty string. Libraries
    pass on the system's words and the path, except torch for a missing folder."""
    told, words = str(error), [*map(os.strerror, LOST), "does not exist"]
    return next((each for each in words if each in told), "") if str(folder) in told else ""


def disk_problem(error: Exception) -> str:
    """Return the message for the user about a full disk, or one that refuses writes; else an empty string. safetensors
    gives the system's number within its words alone."""
    told = re.search(r"\(os error (\d+)\)", str(error))
    number = int(told[1]) if told else getattr(error, "errno", None)
    name = getattr(error, "filename", None)
    where = f" where {name} is" if name else ""
    again = "and run the same command again: it keeps what is complete"
    if disk_is_full(error):
        return f"the disk is full{where}. Free some space {again}"
    if number in FAILED_DISK:
        return f"{os.strerror(number)}: the disk{where} refuses writes. Mount it anew {again}"
    return ""


def exit_status(error: Exception) -> tuple[int, str] | None:
    """Return the exit status of a command or a rank, and the message for the user; None for a bug, whose traceback is
    needed."""
    if isinstance(error, UserError | RunFailed):
        return USER_ERROR if isinstance(error, UserError) else FAILED, str(error)
    problem = disk_problem(error)
    return (FAILED, problem) if problem else None


def closest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """Return the known name that is closest to `name`, if one is close: by difflib's ratio, which is 1 if equal."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `" Did you mean 'lr'?"` if a known name is close to `name`, else an empty string."""
    found = closest(name, known)
    return f" Did you mean {found!r}?" if found else ""


def first_line(error: BaseException) -> str:
    """Return the first line of another library's message, for use within a sentence."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


FINISHED = 0
USER_ERROR = 2
"""Some input of the user is wrong; running the same command again gives the same error."""
FAILED = 3
"""The run failed: a killed rank, a numerical failure, a full disk."""
STOPPED = 75
"""Stopped after a checkpoint; the same command continues from there (EX_TEMPFAIL of sysexits.h)."""

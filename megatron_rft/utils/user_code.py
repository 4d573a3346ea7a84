"""Loads the user's code that a recipe names: `my_file.py:Name`, or `my_module:Name`. Imports no torch.

A file's path is relative to the working directory, which is also searched for modules.
"""

import importlib
import importlib.util
import inspect
import os
import random
import sys
import sysconfig
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_rft.utils.errors import CodeError, ConfigError, did_you_mean

SURROGATE = "it has half of a surrogate pair, which no file and no tokenizer takes: leave it out"
STDLIB, LIBRARY = sysconfig.get_path("stdlib"), "site-packages"


def load(named: str, option: str) -> Any:
    """Return the named object. `option`: the recipe's option that names it, for messages.

    Raises:
        ConfigError: there is no such file, module or name, or importing it fails.
    """
    module, colon, name = named.rpartition(":")
    if not (module and colon and name.isidentifier()):
        raise ConfigError(f"{option}: {named!r} names no code: write my_file.py:Name, or my_module:Name")
    imported = _import(module, option)
    if not hasattr(imported, name):
        hint = did_you_mean(name, (known for known in vars(imported) if not known.startswith("_")))
        raise ConfigError(f"{option}: {module} has no {name}.{hint}")
    return getattr(imported, name)


def seed_generators(seed: str) -> None:
    """Seed the global generators before a call of the user's code: the order of calls depends on timing."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(random.getrandbits(32))


def place(error: BaseException) -> str:
    """The last line of the user's code that raised, for messages: the last frame outside of the standard library and
    installed packages."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if not (LIBRARY in each.filename or each.filename.startswith((STDLIB, "<")))]
    last = (own or frames)[-1]
    return f"{os.path.basename(last.filename)}, line {last.lineno}"


def defined(function: Callable[..., Any]) -> str:
    """Where a function is defined, for messages."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{os.path.basename(code.co_filename)}, line {code.co_firstlineno}" if code else repr(function)


def broken(function: Callable[..., Any], value: Any, fix: str) -> CodeError:
    """The error of a function or a method that returned `value`."""
    return CodeError(f"{function.__name__} ({defined(function)}) returned {value!r:.80}: {fix}")


def source(named: str) -> Path | None:
    """The file of the code that `load` loads, if it has one."""
    module = named.rpartition(":")[0]
    if module.endswith(".py"):
        return Path(module)
    _search_working_directory()
    with suppress(ImportError, ValueError):  # `load` says what is wrong
        spec = importlib.util.find_spec(module)
        return Path(spec.origin) if spec and spec.has_location else None
    return None


def _search_working_directory() -> None:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def _import(module: str, option: str) -> ModuleType:
    _search_working_directory()
    try:
        return _import_file(Path(module), option) if module.endswith(".py") else importlib.import_module(module)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        lacks = error.name if isinstance(error, ModuleNotFoundError) else None
        if lacks and module.split(".")[0] == lacks.split(".")[0]:
            raise ConfigError(
                f"{option}: there is no module {module}, neither installed nor in {Path.cwd()}. A file is named with "
                f"its ending: {module.replace('.', '/')}.py:Name"
            ) from None
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f" ({last.filename}, line {last.lineno})" if not last.filename.startswith("<") else ""
        raise ConfigError(f"{option}: importing {module} failed: {type(error).__name__}: {error}{where}") from error


def _import_file(path: Path, option: str) -> ModuleType:
    """Import a file once, under a name that no other module has."""
    if not path.is_file():
        raise ConfigError(f"{option}: there is no file {path} (looked for in {Path.cwd()})")
    name = f"user:{path.resolve()}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up here
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]

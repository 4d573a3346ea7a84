"""Loads the user's code that a recipe names: `my_file.py:Name`, or `my_module:Name`. Imports no torch.

A file's path is relative to the working directory, which is also searched for modules. A Python session that calls the
package may give functions and classes themselves: `here` stores them where the processes of its runs find them.
"""

import atexit
import hashlib
import importlib
import importlib.util
import inspect
import os
import pickle
import random
import re
import shutil
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_rft.utils.errors import CodeError, ConfigError, closest, did_you_mean, first_line

SURROGATE = "it has half of a surrogate pair, which no file and no tokenizer takes: leave it out"
SESSION = "session:"  # names of a session's code begin with it
FOLDER = "MEGATRON_RFT_SESSION"  # environment variable: where that code is stored
STDLIB, LIBRARY = sysconfig.get_path("stdlib"), "site-packages"


def here(code: Any) -> str:
    """Store a function or a class of this session for the processes of its runs. Returns its name in recipes, with a
    digest: a recipe keeps its own of several functions of one name.

    Raises:
        ConfigError: it holds what another process cannot have, such as a lock or an open file.
    """
    import cloudpickle

    if FOLDER not in os.environ:
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="megatron-rft-session-")
        atexit.register(shutil.rmtree, os.environ[FOLDER], ignore_errors=True)
    name = name_of(code).strip("<>")
    try:
        content = cloudpickle.dumps(code)
        stored = f"{name}@{hashlib.sha256(content).hexdigest()[:8]}"
        Path(os.environ[FOLDER], stored).write_bytes(content)
    except Exception as error:
        why = f"cannot be sent to the processes of a run ({first_line(error)})"
        raise ConfigError(f"{name} {why}: {in_a_file(name)}") from None
    return SESSION + stored


def name_of(code: Any) -> str:
    """Of a function, a class, or an object that can be called."""
    return getattr(code, "__name__", type(code).__name__)


def in_a_file(name: str) -> str:
    return f"write it to a file (in a notebook: %%writefile my_code.py) and name it my_code.py:{name}"


def _stored(named: str, option: str) -> Any:
    """What `here` has stored."""
    stored = named.removeprefix(SESSION)
    name = stored.partition("@")[0]
    try:
        return pickle.loads(Path(os.environ.get(FOLDER, "-"), stored).read_bytes())
    except OSError:
        raise ConfigError(
            f"{option}: {name} is of a Python session that has ended: give it again, or {in_a_file(name)}"
        ) from None
    except Exception as error:
        raise ConfigError(
            f"{option}: {name} cannot be loaded in another process ({first_line(error)}): {in_a_file(name)}"
        ) from None


def load(named: str, option: str) -> Any:
    """Return the named object. `option`: the recipe's option that names it, for messages.

    Raises:
        ConfigError: there is no such file, module or name, or importing it fails.
    """
    module, colon, name = named.rpartition(":")
    if named.startswith(SESSION):
        return _stored(named, option)
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
    return f"{os.path.basename(code.co_filename)}, line {code.co_firstlineno}" if code else f"{function!r:.80}"


def broken(function: Callable[..., Any], value: Any, fix: str) -> CodeError:
    """The error of a function or a method that returned `value`."""
    return CodeError(f"{name_of(function)} ({defined(function)}) returned {value!r:.80}: {fix}")


def check_overrides(cls: type, named: str, option: str) -> None:
    """Refuse a class in a file with a name like one of its base classes' that stands nowhere else in the file: that of
    a misspelt method, which nothing would call."""
    file = source(named)
    text = file.read_text(errors="replace") if file and file.suffix == ".py" else ""
    own, theirs = ([c for c in cls.__mro__ if (c.__module__ == cls.__module__) == here] for here in (True, False))
    known = {name for each in theirs for name in vars(each)}
    for name in sorted({name for each in own for name in vars(each)} - known):
        meant = closest(name, known, cutoff=0.7)
        if meant and len(re.findall(rf"\b{name}\b", text)) == 1:
            raise ConfigError(f"{option}: nothing calls {cls.__name__}.{name}. Did you mean {meant!r}?")


def source(named: str) -> Path | None:
    """The file of the code that `load` loads, if it has one."""
    module = named.rpartition(":")[0]
    if named.startswith(SESSION):
        return Path(os.environ.get(FOLDER, "-"), named.removeprefix(SESSION))
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
            where = f"neither installed nor in {Path.cwd()}. Write a file as {module.replace('.', '/')}.py:Name"
            raise ConfigError(f"{option}: there is no module {module}, {where}") from None
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f" ({last.filename}, line {last.lineno})" if not last.filename.startswith("<") else ""
        beside = Path(module).with_name(f"{lacks}.py")
        where += f": {beside.parent} is not searched, add it to PYTHONPATH" if beside.is_file() else ""
        raise ConfigError(f"{option}: importing {module} failed: {type(error).__name__}: {error}{where}") from error


def _import_file(path: Path, option: str) -> ModuleType:
    """Import a file once, from its source: bytecode on disk may be of another text of the same second and size."""
    if not path.is_file():
        raise ConfigError(f"{option}: there is no file {path} (looked for in {Path.cwd()})")
    name = f"user:{path.resolve()}"  # that no other module has
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up here
        try:
            exec(spec.loader.source_to_code(path.read_bytes(), path), vars(module))
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]

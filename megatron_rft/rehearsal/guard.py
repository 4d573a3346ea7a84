"""Builds and loads the guard library (guard.cpp), which lets a CPU build of torch differentiate "cuda" tensors.

It is compiled once for each version of torch, into the user's cache folder. Load it before torch is imported. No torch.
"""

import ctypes
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from megatron_rft.utils.errors import UserError
from megatron_rft.utils.files import replacing

SOURCE = Path(__file__).with_name("guard.cpp")
TESTED = {(2, 13)}  # versions of torch; the guard uses interfaces that torch does not promise to keep
COMPILERS = ("g++", "c++", "clang++")


def torch_folder() -> Path:
    """Return torch's folder.

    Raises:
        UserError: rehearse does not work with this torch.
    """
    root = Path(importlib.util.find_spec("torch").origin).parent
    text = (root / "version.py").read_text()
    version = re.search(r"__version__ = '(\d+)\.(\d+)", text)
    here = (int(version[1]), int(version[2]))
    if here not in TESTED:
        tested = ", ".join(f"{a}.{b}" for a, b in sorted(TESTED))
        raise UserError(f"rehearse is tested with torch {tested} only, and this is {here[0]}.{here[1]}: install that")
    if re.search(r"^cuda\b.*= *'", text, re.MULTILINE):
        raise UserError(
            "rehearse needs a CPU build of torch, and this one is built for CUDA: run it in an environment made by "
            "`tools/setup_env.sh`"
        )
    return root


def compiler() -> str:
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else COMPILERS
    program = next(filter(None, map(shutil.which, wanted)), None)
    if program is None:
        raise UserError(
            f"rehearse compiles a small library once and found no C++ compiler ({', '.join(wanted)}): install g++, or "
            "set CXX to a compiler"
        )
    return program


def library(folder: Path | None = None) -> Path:
    """Return the path of the compiled guard, and build it if it is missing. `folder`: None for the user's cache."""
    root = torch_folder()
    folder = folder or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "megatron_rft"
    facts = SOURCE.read_bytes() + str(root).encode() + (root / "version.py").read_bytes()
    path = folder / f"guard_{hashlib.sha256(facts).hexdigest()[:16]}.so"
    if not path.is_file():
        _build(root, path)
    return path


def _build(root: Path, path: Path) -> None:
    program = compiler()
    options = ["-std=c++20", "-shared", "-fPIC", f"-I{root}/include", f"-L{root}/lib", "-lc10", "-ltorch_cpu"]
    command = [program, str(SOURCE), *options, f"-Wl,-rpath,{root}/lib"]
    try:
        with replacing(path) as new:
            new.touch()  # whether the folder can be written; the compiler would fail with another message
            done = subprocess.run([*command, "-o", str(new)], capture_output=True, text=True)
            if done.returncode:
                new.unlink(missing_ok=True)
                reasons = [line for line in done.stderr.splitlines() if "error" in line]
                reason = reasons[0] if reasons else done.stderr.strip()[-300:]
                raise UserError(f"{program} cannot compile {SOURCE}, which needs C++20 (g++ 10 or newer): {reason}")
    except OSError as error:
        raise UserError(
            f"{path.parent} cannot be written ({error.strerror}), and rehearse keeps a small library there: set "
            "XDG_CACHE_HOME to another folder"
        ) from None


def load() -> None:
    """Load the guard. Call it before torch is imported, whose libraries bind to the guard's symbols when they load."""
    assert "torch" not in sys.modules, "torch is imported already"
    ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL)

"""Checks the login node of a cluster, on this machine or through ssh, before nemo.py submits."""

import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

# The code's folder is as it will be in the job: a copy, with `runs` that leads to the workspace.
SCRIPT = """
refuse() {{ echo "$*" >&2; exit 2; }}
told="$(mkdir -p {workspace}/nemo {workspace}/runs 2>&1)" && [ -w {workspace}/nemo ] ||
    refuse "--workspace "{workspace}" cannot be written{there}: ${{told##*: }}"
for needed in {needed}; do
    command -v "$needed" >/dev/null || refuse "there is no $needed{there}"
done
folder="$(mktemp -d)" && trap 'rm -rf "$folder"' EXIT || exit 1
cd "$folder" && tar -xz && ln -s {workspace}/runs runs || exit 1
{plans}
"""
PLANS = """
{setup}
export PYTHONPATH="$PWD${{PYTHONPATH:+:$PYTHONPATH}}"
told="$(python -c 'import megatron_rft.commands.main' 2>&1 >/dev/null)" ||
    {{ echo "{unchecked}: ${{told##*$'\n'}}" >&2; exit 0; }}
"""
UNCHECKED = "not checked, for lack of an environment on the login node"
PLAN = """told="$(python -m megatron_rft {arguments} 2>&1 >/dev/null)" || refuse {name}": ${{told#error: }}"\n"""


class UserError(ValueError):
    """Some input of the user is wrong; the message says what, and the fix."""


@dataclass(frozen=True)
class LoginNode:
    """`host` None: this machine."""

    host: str | None = None
    user: str | None = None
    port: int | None = None
    identity: Path | None = None

    @classmethod
    def of(cls, text: str | None, identity: Path | None) -> "LoginNode":
        if text is None:
            return cls()
        found = re.fullmatch(r"([^@\s]+)@([^@:\s]+)(?::(\d+))?", text)
        if not found:
            raise UserError(f"--host {text}: write USER@HOST or USER@HOST:PORT")
        if identity and not identity.is_file():
            raise UserError(f"--identity {identity}: there is no such file")
        for needed in ("ssh", "rsync"):
            if shutil.which(needed) is None:
                raise UserError(f"there is no {needed} here, by which NeMo-Run sends the code to {text}: install it")
        return cls(found[2], found[1], found[3] and int(found[3]), identity)

    @property
    def ssh(self) -> list[str]:
        """The command line of ssh to the login node; empty on this machine."""
        if self.host is None:
            return []
        options = (["-p", str(self.port)] if self.port else []) + (["-i", str(self.identity)] if self.identity else [])
        return ["ssh", *options, f"{self.user}@{self.host}"]

    def check(self, workspace: Path, code: list[Path], setup: str | None, plans: dict[str, list[str]]) -> None:
        """Check that jobs can be submitted there, and run each of `plans` (arguments of megatron-rft) if `setup` leads
        to an environment of the run. `setup` None: the environment is in an image.

        Raises:
            UserError: jobs cannot be submitted; the message says why.
        """
        lines = [PLAN.format(arguments=shlex.join(each), name=shlex.quote(name)) for name, each in plans.items()]
        script = SCRIPT.format(
            workspace=shlex.quote(str(workspace)),
            there=f" on {self.host}" if self.host else "",
            needed="sbatch rsync" if self.host else "sbatch",
            plans="" if setup is None else PLANS.format(setup=setup, unchecked=UNCHECKED) + "".join(lines),
        )
        done = self._run(script, packed(code))
        said = done.stderr.decode(errors="replace").strip()
        if self.host and done.returncode == 255:  # ssh's own
            raise UserError(
                f"--host: {last(said)}. Until `{shlex.join(self.ssh)} true` works, nothing can be sent there"
            )
        if done.returncode:
            raise UserError(said if done.returncode == 2 else f"the check on the login node failed: {last(said)}")
        if last(said).startswith(UNCHECKED):
            print(last(said), file=sys.stderr)

    def _run(self, script: str, sent: bytes) -> subprocess.CompletedProcess:
        command = ["bash", "-c", script]
        if ssh := self.ssh:
            asks = [] if os.isatty(0) else ["-o", "BatchMode=yes"]  # of a person at a terminal ssh may ask things
            command = [*ssh[:-1], *asks, "-o", "ConnectTimeout=20", ssh[-1], shlex.join(command)]
        return subprocess.run(command, input=sent, capture_output=True)


def last(text: str) -> str:
    return text.splitlines()[-1].rstrip(". \r") if text else "no word why"


def packed(folders: list[Path]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for folder in folders:
            archive.add(folder, folder.name, filter=lambda item: None if "__pycache__" in item.name else item)
    return buffer.getvalue()

"""Says what tests/run.sh left out, and how to run what concerns the files that changed.

usage: left_out.py SKIPPED      a file with the tests that were skipped, and the reasons: conftest.py writes it

A test file concerns a folder of the package if it, or a script of tests that it uses, imports from that folder.
"""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
USED = re.compile(r"from tests\.([\w.]+) import|from tests import (\w+)|with_name\(\"([\w.]+)\.py\"\)")


def slow_files() -> list[Path]:
    return sorted(path for path in (ROOT / "tests").rglob("test_*.py") if "mark.slow" in path.read_text())


def folders(test: Path) -> set[str]:
    """The folders and modules of the package that a test file imports from, also through a script that it uses."""
    texts = [test.read_text()]
    for module, name, script in USED.findall(texts[0]):
        inside = (
            test.with_name(f"{script}.py") if script else ROOT / "tests" / f"{(module or name).replace('.', '/')}.py"
        )
        texts += [inside.read_text()] if inside.is_file() else []
    return set(re.findall(r"megatron_rft\.(\w+)", " ".join(texts)))


def changed() -> list[str]:
    """The files that differ from the branch that this one will be merged into, and those that git does not know."""

    def git(*arguments: str) -> list[str]:
        return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True).stdout.splitlines()

    base = next((found[0] for name in ("origin/main", "main") if (found := git("merge-base", name, "HEAD"))), "HEAD")
    return sorted({*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard")})


def concerned(files: list[str], tests: list[Path]) -> list[Path]:
    touched = {Path(file).parts[1].removesuffix(".py") for file in files if file.startswith("megatron_rft/")}
    return [test for test in tests if str(test.relative_to(ROOT)) in files or touched & folders(test)]


def skips(path: Path) -> list[str]:
    """The reasons of the tests that were skipped, each with the number of tests or files."""
    counts = Counter(reason for _, reason in (line.split("\t") for line in sorted({*path.read_text().splitlines()})))
    return [f"skipped: {count} x {reason}" for reason, count in counts.most_common()]


def lines(files: list[str]) -> list[str]:
    tests = slow_files()
    found = [f"left out: the slow tests of {len(tests)} files, which `bash tests/run.sh all` runs"]
    if run := " ".join(str(test.relative_to(ROOT)) for test in concerned(files, tests)):
        found.append(f"those that concern the files you changed: bash tests/run.sh all {run}")
    return found


if __name__ == "__main__":
    print("\n".join([*skips(Path(sys.argv[1])), *lines(changed())]))

"""Programs that try to escape, to read secrets, or to get an unearned reward: attack_programs/.

A script that succeeds prints ESCAPED, which is the output that its test expects: a reward above that of a wrong answer
is a successful attack. Those in STEAL are to print a secret, which is their test's expected output as well as the
content of a file and a variable outside. Placeholders: {canary} that file, {port} and {name} of listening sockets
outside; {pid} a process outside; {marker} part of the name of every file that is made.
"""

from pathlib import Path

FOLDER = Path(__file__).parent / "attack_programs"

SYSCALL = """import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def call(*args):
    return libc.syscall(*args)
"""

FIND = r"""import re
def find(text):
    for found in re.findall(r'TOKEN-\d+-of-the-test', text): print(found, flush=True)
"""


def _programs(name: str) -> dict[str, str]:
    parts = (FOLDER / name).read_text().split("\n#### ")[1:]
    programs = dict(part.split("\n", 1) for part in parts)
    return {name: code.replace("{syscall}", SYSCALL).replace("{find}", FIND) for name, code in programs.items()}


SCRIPTS = _programs("scripts.txt")
STEAL = [name for name in SCRIPTS if name.startswith(("the canary", "the environment", "environments", "an expected"))]

# What needs no rights and does no harm, so that it can be seen to work where nothing holds it.
PROVEN = (
    "fork once", "raw fork", "raw clone", "clone3", "memory files", "shared memory", "the canary",
    "the canary through ..", "the environment", "environments in /proc", "any process in /proc",
    "its own memory map", "passwords", "home folders", "loopback", "datagrams", "an abstract socket", "netlink",
    "a handle on a process", "a shell", "a subprocess", "another program in its place",
)  # fmt: skip

# Tested as modules, by ASSERTS. What they get is never above a wrong answer's.
MODULES = _programs("modules.txt")

ASSERTS = """
def check(f):
    assert f(3) == "{token}"
    assert math.isclose(f(4), 271828.1828)
    assert abs(f(5) - 31415.9) < 1e-6
    assert sorted(f(6)) == ["{token}"]
    assert len(f(7)) == 123457
    assert helper(f(8))
    assert f("a") == f("b") == "{token}"
check(f)
"""
SETUP = "def helper(x): return x == '{token}'"

"""The fork server: an interpreter with imported modules that forks every cell. Run as `server.py SOCKET
[FOLDERS]`: the read-only folders of its container; without them there is none.

It never reads programs, inputs or tests, so that no cell finds another's data in its forked memory. Orders come over a
socket, one message each, with the file descriptors for the cell.
"""

import gc
import importlib
import json
import os
import select
import socket
import sys
import time

import cell
import container
import kernel

# Imported once, so that programs import them without cost.
WARM = (
    "abc", "array", "bisect", "cmath", "collections", "collections.abc", "contextlib", "copy", "csv", "dataclasses",
    "datetime", "decimal", "enum", "fractions", "functools", "hashlib", "heapq", "inspect", "io", "itertools", "json",
    "math", "numbers", "operator", "pprint", "queue", "random", "re", "statistics", "string", "struct", "textwrap",
    "threading", "time", "typing", "unicodedata", "uuid", "warnings",
)  # fmt: skip


def main(socket_fd: int, folders: list[str]) -> None:
    if folders:
        container.enter(folders)
    for name in WARM:
        importlib.import_module(name)
    kernel.become_nobody()
    sys.path.pop(0)  # programs must not import from this folder
    control = socket.socket(fileno=socket_fd)
    kernel.compiled_filter(1)
    gc.freeze()  # keeps the memory shared: a cell's garbage collector would write to it
    control.send(b"ready")
    serve(control, isolated=bool(folders))


def serve(control: socket.socket, isolated: bool) -> None:
    """Serve orders until the socket closes. Several cells may run at a time; a report is sent when a cell has ended."""
    running: dict[int, cell.Cell] = {}
    while True:
        now = time.monotonic()
        wait = min((each.deadline - now for each in running.values()), default=None)
        ready, _, _ = select.select([control, *running], [], [], None if wait is None else max(wait, 0))
        if control in ready:
            message, fds, *_ = socket.recv_fds(control, 4096, 8)
            if not message:
                return
            start(json.loads(message) | {"isolated": isolated}, fds, control, running)
        for pidfd in [fd for fd, each in running.items() if fd in ready or each.is_late()]:
            control.send(json.dumps(running.pop(pidfd).end()).encode())


def start(order: dict, fds: list[int], control: socket.socket, running: dict[int, cell.Cell]) -> None:
    try:
        made = cell.Cell(order, fds, control)
        running[made.pidfd] = made
    except OSError as error:
        control.send(json.dumps({"role": order["role"], "error": str(error)}).encode())
    for fd in fds:
        os.close(fd)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])

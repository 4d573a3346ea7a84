"""Drives a headless Chromium over WebDriver, which is JSON over HTTP, with the standard library."""

import fcntl
import json
import os
import re
import shutil
import subprocess
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import pytest

PACKAGES = ("chromium", "chromium-driver")  # of Debian; they bring `chromium` and `chromedriver`
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element's id in the protocol


def install() -> None:
    """Skip the test, with the reason, if there is no browser and none can be installed. Two workers may call this at
    once: the second waits until the first has all of it."""
    with open(__file__) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _install()


def _install() -> None:
    if shutil.which("chromium") and shutil.which("chromedriver"):
        return
    if os.geteuid() or not shutil.which("apt-get"):
        pytest.skip(f"no browser: install {' and '.join(PACKAGES)}")
    apt = ["apt-get", "-o", "DPkg::Lock::Timeout=120", "-y"]
    command = [*apt, "install", "--no-install-recommends", *PACKAGES]
    for attempt in ([], [[*apt, "update"]]):
        for each in [*attempt, command]:
            done = subprocess.run(each, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}, capture_output=True)
        if done.returncode == 0:
            return
    pytest.skip(f"no browser: {' '.join(command)} failed: {done.stderr.decode()[-300:]}")


class Browser:
    """One window, closed at the end of `with`."""

    def __init__(self, width: int = 1300, height: int = 900):
        self._folder = tempfile.mkdtemp(prefix="browser-")
        self._driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
        for line in self._driver.stdout:
            if found := re.search(r"started successfully on port (\d+)", line):
                break
        self._url = f"http://127.0.0.1:{found[1]}/session"
        arguments = [*FLAGS, f"--user-data-dir={self._folder}", f"--window-size={width},{height}"]
        options = {"binary": shutil.which("chromium"), "args": arguments}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self._call("POST", "", {"capabilities": {"alwaysMatch": wanted}})
        self._url += f"/{session['sessionId']}"

    def _call(self, method: str, path: str, body: dict | None = None) -> Any:
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, content, {"Content-Type": "application/json"}, method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=300) as answer:
            return json.load(answer)["value"]

    def open(self, page: Path | str) -> None:
        """Open a file or a URL."""
        self._call("POST", "/url", {"url": page if isinstance(page, str) else page.resolve().as_uri()})

    def ask(self, script: str, *arguments: Any) -> Any:
        """The value of a JavaScript expression, with its arguments as arguments[0] ..."""
        return self._call("POST", "/execute/sync", {"script": f"return {script}", "args": list(arguments)})

    def _element(self, selector: str) -> dict:
        return self._call("POST", "/element", {"using": "css selector", "value": selector})

    def click(self, selector: str) -> None:
        self._call("POST", f"/element/{self._element(selector)[ELEMENT]}/click", {})

    def hover(self, selector: str, dx: int = 0, dy: int = 0) -> None:
        """Move the mouse over an element; `dx`, `dy`: pixels from its middle."""
        self.ask("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", self._element(selector))
        for x in (dx - 1, dx):  # a move, wherever it was before
            move = {"type": "pointerMove", "duration": 0, "origin": self._element(selector), "x": x, "y": dy}
            actions = [{"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": [move]}]
            self._call("POST", "/actions", {"actions": actions})

    def size(self, width: int, height: int) -> None:
        self._call("POST", "/window/rect", {"width": width, "height": height})

    def console(self) -> list[str]:
        """The console's errors since the last call."""
        return [entry["message"] for entry in self._call("POST", "/se/log", {"type": "browser"})]

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self._call("DELETE", "")
        finally:
            self._driver.terminate()
            self._driver.wait(timeout=120)
            shutil.rmtree(self._folder, ignore_errors=True)

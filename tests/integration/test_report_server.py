"""The report that follows a run, in a real browser; and who is refused."""

import threading
import urllib.error
import urllib.request
from contextlib import suppress

import pytest

from megatron_rft.report.server import start
from megatron_rft.tracking.metrics import StepFile
from tests.integration.browser import Browser, install
from tests.integration.tiny import wait_until
from tests.unit.report.made import step_of, write_run


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", steps=10)


@pytest.fixture
def url(run):
    server, url = start([run])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield url
    server.shutdown()
    server.server_close()


def ask(url: str, **headers: str) -> tuple[int, str]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, headers=headers), timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_only_with_its_token_and_its_address(url):
    assert url.startswith("http://127.0.0.1:")
    assert ask(url)[0] == 200
    for refused in (url.partition("?")[0], url[:-1], url + "x", url.replace("/?token=", "/version?token=x")):
        status, text = ask(refused)
        assert status == 403 and "reward" not in text
    assert ask(url, Host="evil.example:80")[0] == 403
    assert ask(url.replace("/?", "/../recipe.yaml?"))[0] == 404


def test_the_page_follows_the_run(url, run):
    install()
    with Browser() as browser:
        browser.open(url)
        status = "document.querySelector('.notice')?.textContent ?? ''"
        assert "run: step 10 of 30" in browser.ask(status)
        drawn = "document.querySelectorAll('#stack_0 .bar').length"
        assert browser.ask(drawn) == 20

        def follows() -> bool:
            with suppress(urllib.error.HTTPError):  # the driver's, while the page loads itself again
                return "run: step 11 of 30" in browser.ask(status) and browser.ask(drawn) == 22
            return False

        file = StepFile(run / "metrics.jsonl", 11)
        file.write(11, step_of(11, 0, False))
        file.close()
        assert wait_until(follows) and browser.console() == []

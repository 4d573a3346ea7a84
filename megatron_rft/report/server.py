"""`megatron-rft report --serve`: the report in a browser, which follows runs that are under way.

It listens on 127.0.0.1 and answers requests that carry the token of its URL; from elsewhere use `ssh -L`. The page asks
every few seconds whether a run has written something, and loads itself again.
"""

import hmac
import secrets
from functools import partial
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from megatron_rft.report import page, status
from megatron_rft.report.groups import grouped
from megatron_rft.report.runs import METRICS_FILE, read_all
from megatron_rft.tracking.metrics import NOTES_FILE
from megatron_rft.utils.errors import ConfigError, UserError

ADDRESS = "127.0.0.1"
EVERY_MS = 3000
FOLLOW = """
setInterval(async () => {
  try {
    if (document.hidden) return;
    if (await (await fetch("version" + location.search)).text() !== "%s") location.reload();
  } catch (error) { /* the server has ended: the page stays */ }
}, %d);
"""


def version(folders: list[Path]) -> str:
    """Changes when a run has written something that the page shows."""
    files = [folder / name for folder in folders for name in (METRICS_FILE, NOTES_FILE)]
    return " ".join(str(path.stat().st_size if path.is_file() else 0) for path in files)


def html(folders: list[Path]) -> str:
    """The page, from files that are read anew for each request."""
    before = version(folders)  # what is written while the runs are read makes the page load itself again
    try:
        told = [line for folder in folders for line in status.lines(folder)]
        runs, notices = read_all(folders)
        text = page.html(grouped(runs), ["\n".join(told), *notices])
    except UserError as error:  # no step has finished yet
        text = page.EMPTY.format(escape(str(error)))
    text = text.replace("default-src 'none'", "default-src 'none'; connect-src 'self'", 1)
    return text.replace("</body>", f"<script>{FOLLOW % (before, EVERY_MS)}</script></body>", 1)


PAGES = {"/": ("text/html; charset=utf-8", html), "/version": ("text/plain", version)}


class Handler(BaseHTTPRequestHandler):
    def __init__(self, folders: list[Path], token: str, *arguments, **named):
        self.folders, self.token = folders, token
        super().__init__(*arguments, **named)

    def do_GET(self) -> None:
        place = urlsplit(self.path)
        given = parse_qs(place.query).get("token", [""])[0]
        host = self.headers.get("Host", "").rpartition(":")[0]
        if host not in (ADDRESS, "localhost") or not hmac.compare_digest(given.encode(), self.token.encode()):
            return self._answer(403, "text/plain", "the address and the token of the URL that was printed, please\n")
        if place.path not in PAGES:
            return self._answer(404, "text/plain", "there is only the report\n")
        kind, make = PAGES[place.path]
        self._answer(200, kind, make(self.folders))

    def _answer(self, status: int, kind: str, text: str) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Requests, which carry the token, are not logged."""


def start(folders: list[Path], port: int = 0) -> tuple[ThreadingHTTPServer, str]:
    """The server, which does not serve yet, and its URL. `port` 0: any free one.

    Raises:
        ConfigError: the port is taken.
    """
    token = secrets.token_urlsafe(24)
    try:
        server = ThreadingHTTPServer((ADDRESS, port), partial(Handler, folders, token))
    except OSError as error:
        raise ConfigError(f"--port {port}: {error.strerror}. Choose another, or leave it out") from None
    server.daemon_threads = True
    return server, f"http://{ADDRESS}:{server.server_address[1]}/?token={token}"

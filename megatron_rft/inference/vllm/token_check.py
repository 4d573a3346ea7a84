"""Lets a vLLM server answer only requests that carry the run's token. Runs inside the server; imports no vLLM.

vLLM's own --api-key protects the paths under /v1 alone, not those that change weights. The token is in the environment
variable MEGATRON_RFT_TOKEN of the server and of the trainer: only processes of the same user can read it there.
"""

import hmac
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping

VARIABLE = "MEGATRON_RFT_TOKEN"
OPEN = "/health"  # says only that the server lives
REFUSAL = b"this server answers only to its run: set MEGATRON_RFT_TOKEN to the server's token"


class RequireToken:
    """ASGI middleware. Without a token in the environment every request passes."""

    def __init__(self, app: Callable[..., Awaitable[None]]):
        self.app = app
        token = os.environ.get(VARIABLE, "")
        self.expected = f"Bearer {token}".encode() if token else b""

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] not in ("http", "websocket") or self._allowed(scope):
            return await self.app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": REFUSAL})

    def _allowed(self, scope: dict) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return scope["path"] == OPEN or not self.expected or hmac.compare_digest(given, self.expected)


def set_if_missing() -> str:
    """Set a new token in this process's environment. Returns it; empty where there is one already."""
    if os.environ.get(VARIABLE):
        return ""
    os.environ[VARIABLE] = secrets.token_urlsafe(24)
    return os.environ[VARIABLE]


def header(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a client sends; empty without a token."""
    token = environment.get(VARIABLE)
    return {"Authorization": f"Bearer {token}"} if token else {}

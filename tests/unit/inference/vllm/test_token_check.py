"""Who is let through to a vLLM server. A real server is asked in tests/parity/test_vllm_server.py."""

import asyncio

import pytest

from megatron_rft.inference.vllm import token_check
from megatron_rft.inference.vllm.token_check import VARIABLE, RequireToken, header


def ask(path: str, headers: dict[str, str], kind: str = "http") -> list[dict]:
    """The middleware's answer; empty if the request reaches the server."""
    sent: list[dict] = []

    async def app(scope, receive, send):
        return None

    async def send(message):
        sent.append(message)

    scope = {"type": kind, "path": path, "headers": [(k.lower().encode(), v.encode()) for k, v in headers.items()]}
    asyncio.run(RequireToken(app)(scope, None, send))
    return sent


def test_only_the_token_is_let_through(monkeypatch):
    monkeypatch.setenv(VARIABLE, "abc")
    right = header()
    for path in ("/update_weights", "/collective_rpc", "/inference/v1/generate", "/v1/models"):
        assert ask(path, right) == []
        for wrong in ({}, {"Authorization": "Bearer abd"}, {"Authorization": "abc"}, {"Authorization": "Bearer "}):
            assert ask(path, wrong)[0]["status"] == 401
    assert ask("/health", {}) == []
    assert ask("/ws", {}, "websocket") == [{"type": "websocket.close", "code": 1008}]


@pytest.mark.parametrize("value", [None, ""])
def test_without_a_token_all_are_let_through(monkeypatch, value):
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    assert header() == {} and ask("/update_weights", {}) == []
    assert token_check.OPEN == "/health"


def test_servers_of_a_shell_without_a_token_get_one(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")
    token = token_check.set_if_missing()
    assert len(token) > 20 and header() == {"Authorization": f"Bearer {token}"}
    assert token_check.set_if_missing() == "" and header() == {"Authorization": f"Bearer {token}"}

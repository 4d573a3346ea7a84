"""A plan sees no rank's environment, which a test with a process group before it may have left."""

import pytest

from tests.conftest import RANKS


@pytest.fixture(autouse=True)
def no_rank(monkeypatch):
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)

import pytest

from tests.unit.inference.tiny import build_engine, build_model


@pytest.fixture(scope="session")
def model():
    return build_model()


@pytest.fixture
def engine(model):
    return build_engine(model)

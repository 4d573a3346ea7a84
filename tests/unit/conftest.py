import pytest

import megatron_rft.megatron  # noqa: F401  prepares megatron-core for this host
from megatron_rft.config import Megatron
from megatron_rft.megatron import parallel
from tests.unit.inference.tiny import build_engine, build_model


@pytest.fixture(scope="session")
def model():
    return build_model()


@pytest.fixture
def engine(model):
    return build_engine(model)


@pytest.fixture
def one_rank():
    """This process as the only rank of a layout, for actors."""
    parallel.initialize(Megatron())
    yield
    parallel.destroy_layout()

"""A command sees no rank's environment, which a test with a process group before it may have left."""

from tests.unit.plan.conftest import no_rank

__all__ = ["no_rank"]

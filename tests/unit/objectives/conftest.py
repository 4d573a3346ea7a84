import pytest
import torch

from megatron_rft.records import Batch


@pytest.fixture(scope="session")  # a pure function: hypothesis may share it
def make_batch():
    """A batch from response lengths, groups and rewards. Token ids are made up; every value given is kept."""

    def make(lens: list[int], group: list[int], rewards: list[float], **tokens: list[float] | torch.Tensor) -> Batch:
        responses = [list(range(10 * i, 10 * i + length)) for i, length in enumerate(lens)]
        return Batch.of(
            [[1, 2]] * len(lens),
            responses,
            tokens={name: torch.as_tensor(values, dtype=torch.float32) for name, values in tokens.items()},
            sequences={"group": torch.tensor(group), "rewards": torch.tensor(rewards)},
            scalars={"sampled_reward_sum": float(sum(rewards)), "sampled_count": float(len(rewards))},
        )

    return make

"""Makes draft models of speculative decoding load their own weights, which the trainer does not update."""

from vllm.config import VllmConfig
from vllm.config.utils import replace
from vllm.model_executor.model_loader.utils import get_draft_load_config
from vllm.v1.spec_decode.draft_model import DraftModelProposer

_create = DraftModelProposer._create_draft_vllm_config


def load_from_their_folder() -> None:
    """Make vLLM respect `draft_load_config`. vLLM 0.32 ignores it and loads a draft model like the main model, here
    with dummy weights, which would only show as a low acceptance."""
    DraftModelProposer._create_draft_vllm_config = _with_its_load_config


def _with_its_load_config(proposer: DraftModelProposer) -> VllmConfig:
    config = _create(proposer)
    return replace(config, load_config=get_draft_load_config(config))

"""Draft models of speculative decoding have weights of their own, which they keep: the trainer's are not for them."""

from vllm.config import VllmConfig
from vllm.config.utils import replace
from vllm.model_executor.model_loader.utils import get_draft_load_config
from vllm.v1.spec_decode.draft_model import DraftModelProposer

_create = DraftModelProposer._create_draft_vllm_config


def load_from_their_folder() -> None:
    """vLLM 0.32 loads a draft model as it loads the model, whatever `draft_load_config` says: here not at all. Random
    weights cost time and show nowhere but in the acceptance."""
    DraftModelProposer._create_draft_vllm_config = _with_its_load_config


def _with_its_load_config(proposer: DraftModelProposer) -> VllmConfig:
    config = _create(proposer)
    return replace(config, load_config=get_draft_load_config(config))

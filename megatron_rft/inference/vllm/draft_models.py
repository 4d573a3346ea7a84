"""Makes draft models of speculative decoding load their own weights, which the trainer does not update.

vLLM 0.32 ignores `draft_load_config` for a draft model and loads it like the main model, here with dummy weights, which
would only show as a low acceptance. It has two model runners: the first one on the CPU, the second one on GPUs.
"""

from vllm.config import VllmConfig
from vllm.config.utils import replace
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.utils import get_draft_load_config
from vllm.platforms import current_platform
from vllm.v1.spec_decode.draft_model import DraftModelProposer

_create = DraftModelProposer._create_draft_vllm_config


def load_from_their_folder() -> None:
    """Make both model runners respect `draft_load_config`."""
    DraftModelProposer._create_draft_vllm_config = lambda proposer: _with_its_load_config(_create(proposer))
    if current_platform.is_cuda():
        from vllm.v1.worker.gpu.spec_decode.standalone_ar import speculator

        speculator.get_model = lambda *, vllm_config, **options: get_model(
            vllm_config=_with_its_load_config(vllm_config), **options
        )


def _with_its_load_config(config: VllmConfig) -> VllmConfig:
    return replace(config, load_config=get_draft_load_config(config))

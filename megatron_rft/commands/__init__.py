"""One file per command of `megatron-rft`. `parser` defines the arguments, `main` runs the command."""

import logging
import warnings

for message in (  # warnings of torch and megatron-core that users cannot fix, also where they call a function
    ".*Apex (is|are) not installed",
    "full scope is deprecated",
    "The .grad attribute of a Tensor that is not a leaf",
    "`torch.distributed.* is deprecated",
    "`load_state_dict` is deprecated",
    "Please use DTensor instead",
):
    warnings.filterwarnings("ignore", message=message)
logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # it warns wherever there is no Triton

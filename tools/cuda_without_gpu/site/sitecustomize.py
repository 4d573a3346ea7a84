"""Python's part of the pretended machine; PYTHONPATH leads here (env.sh of build.sh).

PRETEND_COMPUTE=1: torch's operators give real numbers (compute.py), from the moment that torch has been imported.
PRETEND_WITHOUT_TE=1: Transformer Engine is not to be found.
"""

import ctypes
import importlib.util
import os
import sys

LIBRARY = os.environ.get("PRETEND_LIBRARY", "")
ASKED_BY_FILE = ("libcudart", "libcuda.so", "libcuda_stub", "libnccl.so")  # vLLM opens these past the preloaded one


class ComputeAfterTorch:
    """A finder that lets torch be imported, and then installs compute.py."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        execute = spec.loader.exec_module

        def then_install(module):
            execute(module)
            import compute

            compute.install()

        spec.loader.exec_module = then_install
        return spec


def _open_ours(self, name=None, *arguments, _init=ctypes.CDLL.__init__, **options):
    if isinstance(name, str) and any(part in os.path.basename(name) for part in ASKED_BY_FILE):
        name = LIBRARY
    _init(self, name, *arguments, **options)


if os.environ.get("PRETEND_WITHOUT_TE"):
    sys.modules["transformer_engine"] = None
if LIBRARY and LIBRARY in os.environ.get("LD_PRELOAD", ""):
    ctypes.CDLL.__init__ = _open_ours
    if os.environ.get("PRETEND_COMPUTE") and "resource_tracker" not in str(sys.argv):
        sys.meta_path.insert(0, ComputeAfterTorch())

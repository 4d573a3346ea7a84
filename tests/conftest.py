"""Whatever job, launcher or network the tests are started in: they are nobody's rank, and speak with this machine."""

import os

RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MEGATRON_RFT_LAUNCHER")

for name in list(os.environ):
    if name in RANKS or name.startswith(("SLURM", "TORCHELASTIC_", "PMI")):
        del os.environ[name]
for name in ("no_proxy", "NO_PROXY"):  # servers of the tests are here, whatever proxy leads out
    os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1", "localhost"]))

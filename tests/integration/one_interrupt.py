"""`megatron-rft` for which each SIGINT is the first one again, however long after it a busy machine brings the copy.

`tests/unit/utils/test_processes.py` shows by a clock of its own which one is a second Ctrl-C.
"""

import sys

from megatron_rft.commands import main
from megatron_rft.utils import processes

processes.SAME_S = float("inf")
sys.exit(main.main())

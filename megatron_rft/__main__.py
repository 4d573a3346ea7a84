"""`python -m megatron_rft` is `megatron-rft`."""

import sys

from megatron_rft.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m megatron_rft` is `megatron-rft`."""

import signal
import sys


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Ctrl-C during its import prints no traceback either."""
    try:
        from megatron_rft.utils.late_imports import lean_import

        return lean_import("megatron_rft.commands.main").main(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())

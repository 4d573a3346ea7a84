"""`python -m megatron_rft` is `megatron-rft`."""

import signal
import sys


def main(arguments: list[str] | None = None) -> int:
    """Ctrl-C while the command line is still being imported is no traceback either."""
    try:
        from megatron_rft.commands import main as cli

        return cli.main(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())

"""Runs `megatron-rft` and kills an engine process in the middle of each sync in the environment variable KILL_IN_SYNCS
("2 5"). With a server, it kills the server's engine."""

import os
import signal
import sys
from itertools import count

from megatron_rft.commands import main
from megatron_rft.megatron.actor import Actor
from tests.integration.engine_process import engine

syncs, stream = count(), Actor.stream


def killing(actor, **options):
    last = next(syncs) in map(int, os.environ["KILL_IN_SYNCS"].split())
    for number, pair in enumerate(stream(actor, **options)):
        if last and number == 5:
            os.kill(engine(), signal.SIGKILL)
        yield pair


Actor.stream = killing
sys.exit(main.main())

"""Puts a recipe's environment around an engine."""

import os
import shutil
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rft.config.environment import Program
from megatron_rft.data.images import ALBUM
from megatron_rft.environments.kept import Kept
from megatron_rft.environments.player import Episodes
from megatron_rft.environments.process import EnvironmentProcesses
from megatron_rft.environments.template import Template
from megatron_rft.inference.engine import Engine
from megatron_rft.inference.pool import EnginePool
from megatron_rft.tracking.metrics import NOTES_FILE, add_note
from megatron_rft.training.build import stop_token_ids
from megatron_rft.training.engines import EngineBuilder
from megatron_rft.utils.errors import ConfigError


def around(engine: Engine, builder: EngineBuilder, tokenizer: Any, stack: ExitStack, kept: Any = None) -> Engine:
    """The engine itself without an environment. The engine and the environments' processes end with `stack`. `kept`:
    the engine's weights (EngineWeights), if a run that is killed and resumed shall not play its episodes again."""
    stack.callback(engine.close)
    environment, rollout, data = builder.recipe.environment, builder.recipe.rollout, builder.recipe.data
    if environment is None:
        return engine
    template = Template(tokenizer, stop_token_ids(rollout.stop, tokenizer), data.chat_template_kwargs)
    program = isinstance(environment, Program)  # it brings conversations, also to prompts that are plain text
    notes = [note for role in environment.roles for note in template.check(role)] if data.chat or program else []
    if program:
        try:
            template.check("tool")
        except ConfigError as error:
            notes.append(f"a program that uses tools would fail: {error}")
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0 and notes:
        print("\n".join(notes), flush=True)

    def decode(ids: list[int]) -> str:
        """The text that the environment hears. Some models mark calls with special tokens."""
        ids = ids[:-1] if ids[-1] in template.stops else ids
        return tokenizer.decode(ids, skip_special_tokens=not environment.calls)

    log, options = builder.folder.parent / "environment" / f"rank_{rank}", environment.own_options()
    processes = EnvironmentProcesses(options, environment.processes, environment.turn_timeout_s, log)
    outside = isinstance(engine, EnginePool) and all(member.joins for member in engine.members)
    parts = (engine, processes, template, decode, environment.name, environment.max_turns, environment.turn_tokens)
    if program:
        from megatron_rft.environments.programs import Programs  # needs aiohttp

        player = Programs(*parts, at_once=environment.programs if outside else None, options=environment)
    else:
        own_pace = outside and rollout.staleness > 1
        player = Episodes(*parts, at_once=rollout.max_batch_sequences if own_pace else None)
    player.album = builder.folder.parent / ALBUM
    if kept:
        tell = partial(_tell, builder.folder.parent, environment.name)
        player.kept = Kept(builder.folder.parent, rank, kept, tell, rollout.staleness + 1)
        stack.push(lambda failed, *_: None if failed else shutil.rmtree(player.kept.folder, ignore_errors=True))
    stack.callback(player.close)
    return player


def _tell(run: Path, name: str, what: str) -> None:
    """On any rank."""
    note = f"environment {name}: {what}"
    print(note, file=sys.stderr, flush=True)
    add_note(run / NOTES_FILE, note)

"""What has ended is not played again with the same weights, whatever part of a file a kill has left."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rft.environments.kept import Kept
from megatron_rft.inference.engine import EngineLost
from megatron_rft.utils.files import read_json_lines
from tests.unit.environments.test_player import SAMPLING, Flaky, play, pool, requests, responses  # noqa: F401

NAME = "000004_00c0ffee"


class Silent:
    """An engine that must not be asked."""

    def agree(self, flag):
        return flag


def kept(run: Path, name: str = NAME, rank: int = 0, tell: Any = print) -> Kept:
    return Kept(run, rank, SimpleNamespace(name=name), tell)


def rows(run: Path) -> list[str]:
    """The keys of the episodes in whole lines."""
    paths = (run / "environment/kept").glob("*")
    return [key for path in paths for line in read_json_lines(path) for key in line]


def texts(found: dict[int, tuple], **without) -> dict[int, list[str]]:
    return {id: [json.dumps(asdict(replace(each, **without))) for each in group] for id, group in found.items()}


@pytest.fixture
def asked():
    return requests(reward=0.25, scores=True, rounds=2)


@pytest.fixture
def whole(play, engine, tmp_path, asked):  # noqa: F811
    """The episodes, which are kept in `tmp_path`."""
    return responses(play(kept=kept(tmp_path)), asked)


def test_with_the_same_weights_nothing_is_played_again(play, tmp_path, asked, whole):  # noqa: F811
    assert len(rows(tmp_path)) == 12
    again = responses(play(engine=Silent(), kept=kept(tmp_path, rank=1)), asked)
    assert texts(again) == texts(whole), "also the last bits of log-probs"
    assert len(rows(tmp_path)) == 12
    with pytest.raises(AttributeError, match="generate"):
        responses(play(engine=Silent(), kept=kept(tmp_path, "000004_00000bad")), asked)
    other = [replace(each, prompt_ids=(3, *each.prompt_ids)) for each in asked]
    with pytest.raises(AttributeError, match="generate"):
        responses(play(engine=Silent(), kept=kept(tmp_path)), other)


def test_a_line_that_a_kill_left_incomplete(play, engine, tmp_path, asked, whole):  # noqa: F811
    (path,) = (tmp_path / "environment/kept").iterdir()
    path.write_text(path.read_text()[:-40])
    assert not rows(tmp_path), "all or none of those that were in waves together"
    assert responses(play(kept=kept(tmp_path)), asked) == whole
    assert len(rows(tmp_path)) == 12


def test_at_its_own_pace_each_episode_is_kept_when_it_ends(play, engine, tmp_path, asked):  # noqa: F811
    alone = responses(play(engine=pool(engine, 0), at_once=1), asked)
    lost = play(engine=Flaky(engine, 8), at_once=1, kept=kept(tmp_path))
    with pytest.raises(EngineLost):
        responses(lost, asked)
    before = len(rows(tmp_path))
    assert 0 < before < 12
    again = responses(play(engine=Flaky(engine, 0), at_once=1, kept=kept(tmp_path)), asked)
    assert texts(again) == texts(alone), "each at its own pace is asked alone here, so even the last bits are equal"
    assert len(rows(tmp_path)) == 12


def test_in_waves_none_is_kept_before_all_have_ended(play, engine, tmp_path, asked):  # noqa: F811
    with pytest.raises(EngineLost):
        responses(play(engine=Flaky(engine, 2), kept=kept(tmp_path)), asked)
    assert not rows(tmp_path)


def test_what_is_not_kept(play, engine, tmp_path):  # noqa: F811
    failing = requests(count=1, fault="raises", fault_at=1)
    failed = responses(play(kept=kept(tmp_path)), failing)[0]
    assert len(rows(tmp_path)) == sum(each.finish_reason != "abort" for each in failed) < 3
    files = kept(tmp_path / "other")
    player = play(kept=files)
    for _ in player.generate(requests(), SAMPLING):
        files.weights.name = "000005_00c0ffee"  # new weights in the middle
    assert not (tmp_path / "other/environment").exists()


def test_what_is_older_than_the_last_checkpoint_is_removed(tmp_path):
    folder = tmp_path / "environment/kept"
    folder.mkdir(parents=True)
    names = ["000002_aa.0.jsonl", "000003_aa.0.jsonl", "000003_bb.1.jsonl", "000004_aa.0.jsonl"]
    for name in names:
        (folder / name).write_text("")
    kept(tmp_path, "000003_aa").begin([])
    assert sorted(path.name for path in folder.iterdir()) == names, "there is no checkpoint"
    (tmp_path / "checkpoints/step_000003").mkdir(parents=True)
    (tmp_path / "checkpoints/step_000003/run.json").write_text("{}")
    kept(tmp_path, "000004_aa").begin([])
    assert sorted(path.name for path in folder.iterdir()) == names[1:]


A, B, C, X, Y = range(1, 6)  # what a program may ask


def calls(run: Path, *played: list[tuple[int, int]], name: str = NAME) -> list[str]:
    """What is said of episodes of a program: each has its calls, of (what it asked, the token that was sampled)."""
    told: list[str] = []
    files = kept(run, name, tell=told.append)
    for sample, episode in enumerate(played):
        request = SimpleNamespace(seed=3, prompt_ids=(1, 2), problem=SimpleNamespace(index=7))
        player = SimpleNamespace(request=request, sample=sample, calls={}, numbers=len(episode))
        files.begin([player])
        for number, (asked, sampled) in enumerate(each for each in episode if each != KILLED):
            files.call(player, number, asked, [sampled])
        if episode[-1] != KILLED:
            files.finish(player)
    files.close()
    return told


KILLED = (0, 0)  # in place of a last call
FIRST = [(A, 5), (B, 6), (C, 7)]


def test_a_program_that_asks_otherwise_is_named(tmp_path):
    assert not calls(tmp_path, FIRST, FIRST), "nothing was killed"
    assert not calls(tmp_path, FIRST, FIRST)
    assert not calls(tmp_path, [(B, 6), (A, 5), (C, 7)]), "in another order"
    assert not calls(tmp_path, [(X, 5)], name="000005_00c0ffee"), "other weights"
    (told,) = calls(tmp_path, FIRST, [(A, 5), (X, 6), (Y, 7)], [(X, 5)])
    assert told.startswith("problem 7, answer 1: the program does not repeat itself: ") and "call 2 was one" in told


@pytest.mark.parametrize("other", [FIRST[:2], [*FIRST, (X, 5)]], ids=["fewer", "more"])
def test_a_program_that_asks_fewer_or_more_calls_is_named(tmp_path, other):
    calls(tmp_path, FIRST)
    assert len(calls(tmp_path, other)) == 1


def test_what_follows_other_samples_is_not_compared(tmp_path):
    """Neither are calls of which a kill has left no whole line, nor those of two killed runs with each other."""
    calls(tmp_path, FIRST)
    assert not calls(tmp_path, [(A, 9), (X, 6), KILLED])
    assert not calls(tmp_path, [(A, 9), (X, 6), (Y, 7)])
    for path in (tmp_path / "environment/kept").iterdir():
        path.write_text("\n".join(line[:-3] if ".1" in line else line for line in path.read_text().split("\n")))
    assert not calls(tmp_path, [(A, 9), (Y, 6), (Y, 7)])

"""A run that is killed at any moment ends, once resumed, with the bits of one that was
not killed.
"""

import os
import random
import signal
from functools import partial

import pytest

from fedrot.strategies.resume.checkpoints import Checkpointing
from tests.strategies.resume.children import ROUNDS, child, play
from tests.strategies.resume.folders import result_of, round_of, run_state, save


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory,
):
    """Return how a run ends that nobody kills, and when it reaches each mark."""
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = child(partial(play, folder))
    assert ended.code == 0
    return (folder / "end").read_text(), ended.marks


DRAWN = random.Random(20)
#: Kills of one run, one after the other: a mark, another one that it never goes beyond,
#: and the share of the time between them after which it dies.
KILLS = [
    [("aggregate 1", "aggregated 1", 0.3)],
    [("aggregate 2", "aggregated 2", 0.7)],
    [("write 1", "written 1", 0.0)],
    [("write 2", "written 2", 0.5)],
    # Once in every round.
    [
        (f"aggregate {number}", f"aggregate {number + 1}", DRAWN.random())
        for number in range(1, ROUNDS)
    ],
    *(
        pytest.param([("start", "finish", DRAWN.random())], marks=pytest.mark.long)
        for _ in range(12)
    ),
]


@pytest.mark.parametrize("kills", KILLS)
def test_a_killed_run_ends_as_one_that_nobody_kills(tmp_path, undisturbed, kills):
    expected, times = undisturbed
    playing = partial(play, tmp_path)
    for begin, end, share in kills:
        ended = child(playing, begin, share * (times[end] - times[begin]), end)
        assert ended.code == -signal.SIGKILL
    assert child(playing).code == 0
    assert (tmp_path / "end").read_text() == expected
    # Killed between the last checkpoint and the removal of the oldest, a run has
    # nothing left to save.
    last = [ROUNDS - 2, ROUNDS - 1, ROUNDS]
    assert Checkpointing(tmp_path / "checkpoints").rounds() in (last, last[1:])
    assert not [*(tmp_path / "checkpoints").glob(".round*")]


def die(folder, at, mark):
    """Save two more rounds, and die just before the file operation of this number, if
    there is one.
    """
    done = 0

    def counted(operation):
        def call(*args, **kwargs):
            nonlocal done
            done += 1
            if done > at:
                mark(operation.__name__)
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*args, **kwargs)

        return call

    checkpoints = Checkpointing(folder, keep=1)
    state = run_state()
    with checkpoints.writing():
        for name in ("mkdir", "open", "fsync", "rename", "replace", "unlink", "rmdir"):
            setattr(os, name, counted(getattr(os, name)))
        for number in (3, 4):
            checkpoints.save(number, result_of(number), state)


def test_death_before_any_file_operation_leaves_whole_checkpoints(
    tmp_path,
):
    """A process dies at every step of two writes that replace the only checkpoint."""
    steps = []
    for step in range(200):
        folder = tmp_path / str(step)
        save(folder, 2, keep=1)
        died = child(partial(die, folder, step))
        newest = Checkpointing(folder).newest()
        steps.append((*died.marks, round_of(newest)))
        assert (
            newest.result.train_metrics_clientapp
            == result_of(newest.round).train_metrics_clientapp
        )
        # The next run clears away what is left, and writes.
        save(folder, newest.round + 1, keep=1)
        assert round_of(Checkpointing(folder).newest()) == newest.round + 1
        assert len(list(folder.iterdir())) == 3  # With the lock and the metrics.
        if died.code == 0:
            break
        assert died.code == -signal.SIGKILL
    # Before the rename the old one is the newest, after it the new one; there is
    # nothing else.
    found = [number for *_, number in steps]
    assert found == sorted(found)
    assert set(found) == {2, 3, 4}
    for number in (3, 4):
        assert steps[found.index(number) - 1][0] == "replace"
        before = [mark for mark, newest in steps[:-1] if newest == number - 1]
        # Of the round before: the folder of all checkpoints, after the rename.
        assert before.count("fsync") == (number == 4) + len(
            ["metrics", "model", "state", "folder"]
        )
    # The first one is of the temporary name, which is gone by then.
    last = [mark for mark, newest in steps[:-1] if newest == 4]
    assert (last.count("fsync"), last.count("unlink"), last.count("rmdir")) == (1, 3, 1)

"""Claims of units by several workers: every unit once, few file operations, and the units of workers that die."""

import itertools
import shutil

import pytest

from reshard.execution import journal as module
from reshard.execution.journal import Journal
from reshard.execution.unit_records import UnitRecord


@pytest.fixture
def creates(monkeypatch):
    """Units that somebody has tried to claim, in order."""
    tried = []
    claim = Journal.claim
    monkeypatch.setattr(Journal, "claim", lambda self, unit: tried.append(unit) or claim(self, unit))
    return tried


def take_turns(shares, journal, *, dead=(), slow=()):
    """Let workers do their units in turn; dead ones stop at their first unit, slow ones take every tenth turn."""
    done = {worker: [] for worker in range(len(shares))}
    running = dict(enumerate(shares))
    for turn in range(100_000):
        for worker, share in list(running.items()):
            if worker in slow and turn % 10:
                continue
            unit = next(share, "end")
            if unit == "end" or worker in dead:
                del running[worker]
            elif unit is not None:
                journal.record(UnitRecord(unit=unit))
                done[worker].append(unit)
        if not running:
            break
    assert not running
    return done


@pytest.mark.parametrize(("num_units", "num_workers"), [(1, 1), (1, 3), (7, 3), (500, 16), (100, 64)])
def test_workers_of_one_speed_do_every_unit_once(tmp_path, creates, num_units, num_workers):
    journal = Journal(tmp_path)
    done = take_turns([Journal(tmp_path).share(num_units, at, num_workers) for at in range(num_workers)], journal)
    assert sorted(itertools.chain(*done.values())) == list(range(num_units))
    assert len(creates) <= num_units + num_workers


def test_a_slow_workers_units_are_taken_over_with_few_tries(tmp_path, creates):
    shares = [Journal(tmp_path).share(1000, at, 8) for at in range(8)]
    done = take_turns(shares, Journal(tmp_path), slow={3})
    assert sorted(itertools.chain(*done.values())) == list(range(1000))
    assert len(done[3]) < 50
    assert len(creates) < 1000 + 150  # 8 workers that try every unit make 8,000


def test_the_units_of_a_dead_worker_are_done_by_the_others(tmp_path, monkeypatch):
    for name in ("_PATIENCE_SECONDS", "_PATIENCE_UNITS", "_PAUSE_AFTER_LISTING"):
        monkeypatch.setattr(module, name, 0.0)
    shares = [Journal(tmp_path).share(30, at, 3) for at in range(3)]
    take_turns(shares, Journal(tmp_path), dead={1})
    assert Journal(tmp_path).done() == set(range(30))


def test_a_worker_that_waits_lists_the_folder_for_a_tenth_of_its_time(tmp_path, monkeypatch):
    clock = itertools.count()
    journal, listings = Journal(tmp_path), []

    def done(self):
        listings.append(next(clock))
        return set()

    journal.claim(0)  # by another worker, which does not record it
    monkeypatch.setattr(Journal, "done", done)
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 1e9)
    assert list(itertools.islice(journal.share(1, 0, 1), 40)) == [None] * 40
    assert len(listings) < 5


def test_nothing_is_claimed_of_a_result_that_is_published(tmp_path):
    journal = Journal(tmp_path)
    share = journal.share(10, 0, 1)
    assert next(share) == 0
    shutil.rmtree(tmp_path / ".journal")
    assert list(share) == []
    assert list(tmp_path.iterdir()) == []

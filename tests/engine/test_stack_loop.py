"""The loop of a stack in one process: steps, saves, streams and DataLoaders with real torch."""

import dataclasses
import itertools
import random

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, TensorDataset

from elastic_trainer import BatchPlan, ConfigurationError, Session
from elastic_trainer.data import loaders, random_state
from elastic_trainer.data.order import GlobalOrder, PositionedSampler
from elastic_trainer.stacks import rank_files
from elastic_trainer.stacks.loop import Run
from reshard.commits.commit import COMMIT_FILE, read_commit, write_commit
from reshard.topology import Topology

pytestmark = pytest.mark.engine

ROWS, GLOBAL = 50, 12


@pytest.fixture
def make_run(tmp_path, monkeypatch):
    """Attempts of one process in `tmp_path`; loading and saving is a file with a number."""
    monkeypatch.setenv("ETJ_CHECKPOINT_ROOT", str(tmp_path))

    def make(*, attempt=1, resume=None, global_batch=GLOBAL, micro_batch=3):
        monkeypatch.setenv("ETJ_ATTEMPT", str(attempt))
        monkeypatch.setenv("ETJ_RESUME", str(resume or ""))
        session = Session.from_env()
        session.start()
        run = Run(session, session.batch_plan(global_batch=global_batch, micro_batch=micro_batch), seed=5)
        run.loaded = []

        def save(folder, tag):
            (folder / tag).mkdir(parents=True)
            (folder / tag / "state").write_text(str(session.position.step))

        run.restore(load=lambda folder: run.loaded.append((folder / "state").read_text()), save=save, format_="dcp")
        return run

    return make


def saved_steps(root):
    return sorted(int(path.parent.name.split("-")[1]) for path in root.glob(f"a*/step-*/{COMMIT_FILE}"))


def test_it_saves_when_the_script_asks_and_after_the_last_step(make_run, tmp_path):
    run = make_run()
    for step in run.steps(5):
        run.report(torch.tensor(2.0))
        run.report(torch.tensor(4.0))
        if step == 2:
            run.save()
    assert saved_steps(tmp_path) == [3, 5]
    commit = read_commit(tmp_path / "a1" / "step-00000003")
    assert (commit.step, commit.samples, commit.format) == (3, 3 * GLOBAL, "dcp")
    resumed = make_run(attempt=2, resume=tmp_path / "a1" / "step-00000003")
    assert resumed.loaded == ["3"]
    assert list(resumed.steps(5)) == [3, 4]


def test_stop_ends_the_training_with_a_save(make_run, tmp_path):
    run = make_run()
    for step in run.steps(100):
        if step == 1:
            run.stop()
    assert saved_steps(tmp_path) == [2]


def test_a_loss_is_the_mean_of_what_was_reported(make_run, monkeypatch):
    run = make_run()
    told = []
    after_step = run.session.after_step
    monkeypatch.setattr(run.session, "after_step", lambda **facts: told.append(facts["loss"]) or after_step(**facts))
    for step in run.steps(3):
        if step == 0:
            run.report(torch.tensor(2.0, requires_grad=True))
            run.report(torch.tensor(4.0))
        elif step == 1:
            run.report(1.5)
    assert told[:2] == [3.0, 1.5]
    assert told[2] != told[2]  # nothing was reported


def test_data_before_attach_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ETJ_CHECKPOINT_ROOT", str(tmp_path))
    session = Session.from_env()
    run = Run(session, session.batch_plan(global_batch=2, micro_batch=1))
    with pytest.raises(ConfigurationError, match="attach"):
        run.sampler(range(4))
    with pytest.raises(ConfigurationError, match="attach"):
        next(run.steps(1))


class Rows(Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        return row


def as_tuple(rows):
    return tuple(rows)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_order_goes_on_after_a_resume_and_another_batch_size(make_run, tmp_path, workers):
    def loader(**options):
        return DataLoader(Rows(), collate_fn=as_tuple, num_workers=workers, **options)

    quiet = make_run()
    expected = [batch for _, batch in quiet.steps(6, loader(batch_size=2, shuffle=True))]
    assert all(isinstance(batch, tuple) and len(batch) == GLOBAL for batch in expected)
    # Micro batches of another size, from a resume on; the loader's own batch size does not matter.
    resumed = make_run(attempt=2, resume=tmp_path / "a1" / "step-00000006", micro_batch=4)
    batches = resumed.batches(loader(batch_size=7, shuffle=True))
    rest = [sum((next(batches) for _ in range(3)), ()) for _ in resumed.steps(8)]
    one = make_run(attempt=3)
    whole = [batch for _, batch in one.steps(8, loader(shuffle=True))]
    assert expected + rest == whole
    assert sorted(row for batch in whole for row in batch)[:2] == [0, 0]  # two epochs


def test_replicas_with_loaders_of_two_workers_share_a_step(make_run):
    def rows_of(dp):
        plan = BatchPlan(global_batch=GLOBAL, micro_batch=2, dp=dp)
        found = set()
        for replica in range(dp):
            order = GlobalOrder(num_rows=ROWS, plan=plan, replica=replica, seed=1)
            sampler = PositionedSampler(order.step_batches, lambda: GLOBAL)
            iterator = iter(loaders.rebuild(DataLoader(Rows(), num_workers=2), sampler))
            found |= set(next(iterator).tolist())
            iterator._shutdown_workers()
        return found

    assert rows_of(1) == rows_of(2) == rows_of(3)
    assert len(rows_of(1)) == GLOBAL


def test_other_orders_are_refused():
    class Own(Sampler):
        def __iter__(self):
            return iter(range(3))

    data = TensorDataset(torch.arange(4))
    cases = {
        "Own has an order of its own": DataLoader(data, sampler=Own()),
        "RandomSampler has an order of its own": DataLoader(data, sampler=RandomSampler(data, replacement=True)),
        "Numbers is a stream": DataLoader(Numbers()),
        "batch sampler of its own": DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 2, True)),
        "makes no batches": DataLoader(data, batch_size=None),
    }
    for message, loader in cases.items():
        with pytest.raises(ConfigurationError, match=message):
            loaders.order_of(loader, seed=0)
    assert loaders.order_of(DataLoader(data, shuffle=True), seed=3) == (3, True)
    assert loaders.order_of(DataLoader(data), seed=3) == (3, False)


def test_a_changed_seed_is_told(make_run, tmp_path, caplog):
    run = make_run()
    rows = run.sampler(range(ROWS), seed=1)
    list(run.steps(1))
    resumed = make_run(attempt=2, resume=tmp_path / "a1" / "step-00000001")
    assert list(itertools.islice(resumed.sampler(range(ROWS), seed=1), 2)) == list(itertools.islice(rows, 2))
    assert not caplog.records
    resumed.sampler(range(ROWS), seed=2)
    assert "data order changed" in caplog.text


class Numbers(IterableDataset):
    """A stream that workers share."""

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        yield from range(first, 40, step)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 calls it
def test_torchdatas_loader_goes_on_exactly(make_run, tmp_path, workers):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def loader():
        return stateful.StatefulDataLoader(Numbers(), batch_size=3, num_workers=workers)

    quiet = iter(loader())
    expected = [next(quiet).tolist() for _ in range(10)]
    run = make_run()
    stream = run.stream(loader())
    assert stream.start.how == "first"
    seen = [next(stream).tolist() for _ in run.steps(4)]
    resumed = make_run(attempt=2, resume=tmp_path / "a1" / "step-00000004")
    stream = resumed.stream(loader())
    assert stream.start.how == "exact"
    assert seen + [next(stream).tolist() for _ in resumed.steps(10)] == expected


def count(shards):
    for shard in shards:
        yield from ({"row": 12 * shard + row} for row in range(12))


@pytest.mark.parametrize("replicas", [2, 3])
def test_hugging_face_streams_go_on_exactly(make_run, tmp_path, monkeypatch, replicas):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    datasets = pytest.importorskip("datasets")
    distributed = pytest.importorskip("datasets.distributed")

    def loader():
        stream = datasets.IterableDataset.from_generator(count, gen_kwargs={"shards": list(range(4))})
        return distributed.split_dataset_by_node(stream, 0, replicas).batch(2)

    quiet = make_run().stream(loader())
    expected = [next(quiet)["row"] for _ in range(20)]
    assert expected[0] in expected[1:]  # more than an epoch
    run = make_run()
    stream = run.stream(loader())
    seen = [next(stream)["row"] for _ in run.steps(5)]
    resumed = make_run(attempt=2, resume=tmp_path / "a1" / "step-00000005")
    stream = resumed.stream(loader())
    assert stream.start.how == "exact"
    assert seen + [next(stream)["row"] for _ in resumed.steps(20)] == expected


def test_states_fit_only_the_topology_that_wrote_them(make_run, tmp_path):
    run = make_run()
    list(run.steps(1))
    folder = tmp_path / "a1" / "step-00000001"
    commit = dataclasses.replace(read_commit(folder), topology=Topology(dp=4, tp=2))
    write_commit(folder, commit)
    for rank in range(8):
        rank_files.write(folder, rank, {"rank": rank})
    assert rank_files.read(folder, Topology(dp=4, tp=2), 5) == ({"rank": 5}, {"rank": 4})
    # The same replicas on fewer ranks: rank 2 has the data of the old ranks 4 and 5.
    assert rank_files.read(folder, Topology(dp=4), 2) == (None, {"rank": 4})
    assert rank_files.read(folder, Topology(dp=2, tp=2), 1) == (None, None)


def test_random_numbers_go_on(tmp_path):
    def draw():
        return (random.gauss(0, 1), float(numpy.random.rand()), float(torch.rand(())))

    def draw_by_rule(**place):
        random_state.reseed(random_state.seed_of(**place))
        return draw()

    random_state.reseed(7)
    draw()
    rank_files.write(tmp_path, 0, random_state.capture())
    expected = draw()
    random_state.restore(torch.load(tmp_path / "elastic_trainer" / "rank-00000.state", weights_only=True))
    assert draw() == expected
    place = {"seed": 1, "step": 2, "replica": 3}
    assert draw_by_rule(**place) == draw_by_rule(**place)
    others = [{**place, name: 9} for name in ("seed", "step", "replica", "stage", "part")]
    assert len({draw_by_rule(**other) for other in [place, *others]}) == 6

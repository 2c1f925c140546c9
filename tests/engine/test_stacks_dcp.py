"""Asynchronous saves by DCP with a torch that can use a stager again, and with one that cannot."""

from types import SimpleNamespace

import pytest
import torch
from torch import distributed
from torch.distributed.checkpoint import staging, state_dict_loader

from elastic_trainer.stacks.dcp import make_save
from tests.engine.stack_run import free_port

pytestmark = pytest.mark.engine


class StagerOfTorch211(staging.DefaultStager):
    """Empties itself after its first use, as torch 2.11.0 does (distributed/checkpoint/staging.py)."""

    def _stage(self, state_dict, **options):
        staged = super()._stage(state_dict, **options)
        self._state_dict_stager.close()
        return staged


@pytest.fixture(scope="module")
def one_rank():
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("stager", [staging.DefaultStager, StagerOfTorch211])
def test_every_save_holds_the_state_of_its_step(stager, one_rank, tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "DefaultStager", stager)
    settings = SimpleNamespace(async_saves=True, checkpoint_root=tmp_path / "volume")
    save = make_save(SimpleNamespace(settings=settings))
    weight = torch.ones(1000)
    for step in (1, 2, 3):
        state = {"weight": weight, "schedule": {"step": step, "of": torch.optim.SGD}}
        future = save(state, tmp_path / str(step))
        weight += 1  # the next step, while the save is written
        future.result()
    for step in (1, 2, 3):
        found = {"weight": torch.zeros(1000), "schedule": {"step": 0}}
        state_dict_loader.load(found, checkpoint_id=tmp_path / str(step))
        assert torch.equal(found["weight"], torch.full((1000,), float(step)))
        assert found["schedule"]["step"] == step

"""Which tensors of a file of torch.save are the weights: a table of what training scripts save."""

import pytest

from reshard.errors import UnsupportedError
from reshard.formats import read_checkpoint
from reshard.formats.pt.objects import new_tensor
from tests.unit.reshard.formats.test_pt_container import write


def tensor(*shape):
    return new_tensor("float32", shape)


def weights():
    return {"embed.weight": tensor(4, 2), "scale": tensor()}


OPTIMIZER = {"state": {0: {"step": tensor(), "exp_avg": tensor(4, 2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
NANOGPT = {
    "model": weights(), "optimizer": OPTIMIZER, "model_args": {"n_layer": 2}, "iter_num": 2000,
    "best_val_loss": tensor(), "config": {"device": "cpu"},
}  # fmt: skip
"""What nanoGPT's train.py saves as ckpt.pt."""


@pytest.mark.parametrize(
    ("value", "notes"),
    [
        pytest.param(weights(), "", id="alone"),
        pytest.param(
            NANOGPT, "under model; not converted besides: optimizer, model_args, iter_num, best_val_loss, config"
        ),
        pytest.param(
            {"state_dict": weights(), "rng_state": tensor(5056), "classes": tensor(4, 4)}, "rng_state, classes"
        ),
        pytest.param(
            {"model": {"module": weights(), "num_updates": tensor()}},
            "under model.module; not converted besides: model.num_updates",
        ),
        pytest.param({"model": weights(), "loss": tensor(), 3: tensor(2, 2)}, "besides: loss, 3"),
        pytest.param({**weights(), "seen": 3}, "at the top; not converted besides: seen"),
    ],
)
def test_weights_are_found_beside_bare_tensors(tmp_path, value, notes):
    write(tmp_path / "ckpt.pt", value)
    index = read_checkpoint(tmp_path, None)
    assert {tensor.key.name for tensor in index.tensors} == {"embed.weight", "scale"}
    assert notes in "".join(index.notes)


@pytest.mark.parametrize(
    ("value", "message", "problem"),
    [
        ({"model": weights(), "ema.weight": tensor(2)}, "several places at the top", "ema.weight"),
        ({"model": weights(), "state_dict": weights()}, "several places at the top", "state_dict"),
        ({"best_val_loss": tensor(), "net": weights()}, "no dict of tensors at the top", "net: a dict"),
        ({"class_weights": tensor(4), "net": weights()}, "no dict of tensors at the top", "net: a dict"),
    ],
)
def test_what_could_be_the_weights_is_not_left_out(tmp_path, value, message, problem):
    write(tmp_path / "ckpt.pt", value)
    with pytest.raises(UnsupportedError, match=message) as caught:
        read_checkpoint(tmp_path, None)
    assert problem in caught.value.problems

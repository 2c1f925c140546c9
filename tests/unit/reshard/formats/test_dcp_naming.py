"""Names in the state dict of Megatron-FSDP, whose optimizer has options by parameter and wrappers in names."""

import pytest

from reshard.errors import UnsupportedError
from reshard.formats.dcp.metadata import Entry, Place
from reshard.formats.dcp.naming import find_names
from reshard.tensors.geometry import Box
from reshard.tensors.layout import TensorKey

NORM, FIRST = "module.norm.weight", "module.mlp.linear_fc1.weight"


def entry(*path: str, shape: tuple[int, ...] | None = None, recorded: bool = True) -> Entry:
    key = ".".join(path)
    box = None if shape is None else Box((0,) * len(shape), shape)
    place = Place("__0_0.distcp", 0, 1)
    return Entry(
        key=key, path=path if recorded else (key,), shape=shape, dtype="" if shape is None else "float32",
        chunks=((box, place),),
    )  # fmt: skip


def entries(*, wrappers: int, recorded: bool = True, states: tuple[str, ...] = (NORM, f"{FIRST}_w", f"{FIRST}_v")):
    outer = "module." * wrappers
    weights = [entry("model", name, shape=(4,), recorded=recorded) for name in (NORM, f"{FIRST}_w", f"{FIRST}_v")]
    moments = [entry("optimizer", "state", outer + name, "exp_avg", shape=(4,), recorded=recorded) for name in states]
    options = [
        entry("optimizer", "param_to_group_meta", outer + name, "lr", recorded=recorded) for name in (NORM, FIRST)
    ]
    return [*weights, *moments, *options]


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("wrappers", [0, 1, 2])
def test_states_and_options_have_the_names_of_the_weights(wrappers, recorded):
    found = find_names(entries(wrappers=wrappers, recorded=recorded), "here")
    names = (NORM, f"{FIRST}_w", f"{FIRST}_v")
    assert set(found.tensors.values()) == {TensorKey(state, name) for state in ("weight", "exp_avg") for name in names}
    assert set(found.named.values()) == {(NORM, "lr"), (f"{FIRST}_w", "lr")}
    assert found.halves == {f"{FIRST}_v": f"{FIRST}_w"}
    assert found.rest == ()


@pytest.mark.parametrize(("wrappers", "states"), [(4, (NORM,)), (1, (NORM, "module.other.weight"))])
def test_states_of_no_weight_are_refused(wrappers, states):
    with pytest.raises(UnsupportedError, match="no weight belongs to the optimizer state"):
        find_names(entries(wrappers=wrappers, states=states), "here")


def test_options_of_no_weight_are_refused():
    other = entry("optimizer", "param_to_group_meta", "module.module.other.weight", "lr")
    with pytest.raises(UnsupportedError, match="cannot tell what 1 entries are"):
        find_names([*entries(wrappers=1), other], "here")


def test_torchs_own_options_are_not_for_halves():
    flat = [entry("optim", f"param_groups.{name}.lr") for name in (NORM, FIRST)]
    weights = [item for item in entries(wrappers=0) if item.path[0] == "model"]
    with pytest.raises(UnsupportedError, match="cannot tell what 1 entries are"):
        find_names([*weights, *flat], "here")

"""The reader of model descriptions: what is wrong with a file is said at once, all of it."""

import json

import pytest

from reshard.errors import UsageError
from reshard.formats.deepspeed.described.description import load

MODEL = {
    "version": 1,
    "parameters": {"a": [2, 3], "b": [3], "c": []},
    "frozen": ["c"],
    "buffers": {"scale": [1]},
    "shared": {"tied": "a"},
    "groups": [{"parameters": ["a"], "settings": {"betas": [0.9, 0.95], "fused": None}}, {"parameters": ["b"]}],
}


def write(tmp_path, value):
    path = tmp_path / "model.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_a_description_is_read_in_its_order(tmp_path):
    model = load(write(tmp_path, MODEL))
    assert list(model.params.items()) == [("a", (2, 3)), ("b", (3,)), ("c", ())]
    assert (model.frozen, model.buffers, model.shared, model.optimizer) == ({"c"}, {"scale": (1,)}, {"tied": "a"}, "")
    assert [group.names for group in model.groups] == [("a",), ("b",)]
    assert model.groups[0].settings == {"betas": (0.9, 0.95), "fused": None}


WRONG = {
    "unknown key": ({"weights": {}}, "unknown key 'weights'"),
    "negative size": ({"parameters": {"a": [-1], "b": [3], "c": []}}, "'a' has the shape [-1]"),
    "size of a bool": ({"buffers": {"scale": [True]}}, "'scale' has the shape [True]"),
    "no list": ({"frozen": "c"}, "frozen: expected a list of names"),
    "no object": ({"shared": ["a"]}, "shared: expected an object of names"),
    "group": ({"groups": [{"params": ["a"]}]}, "group 0: expected an object with parameters"),
    "setting": ({"groups": [{"parameters": ["a", "b"], "settings": {"lr": {}}}]}, "the setting 'lr' is {}"),
    "huge setting": ({"groups": [{"parameters": ["a", "b"], "settings": {"lr": 10**400}}]}, "expected plain data"),
    "twice": ({"groups": [{"parameters": ["a", "b", "a"]}]}, "groups: 'a' occurs 2 times"),
    "in no group": ({"groups": [{"parameters": ["a"]}]}, "groups: 'b' is trained, and in no group"),
    "frozen in a group": ({"groups": [{"parameters": ["a", "b", "c"]}]}, "groups: 'c' is frozen"),
    "unknown in a group": ({"groups": [{"parameters": ["a", "b", "x"]}]}, "groups: 'x' is no parameter"),
    "second name": ({"groups": [{"parameters": ["tied", "b"]}]}, "it is the second name of 'a'"),
    "both": ({"buffers": {"a": [2, 3]}}, "'a' is a parameter and a buffer"),
    "tied to nothing": ({"shared": {"tied": "x"}}, "shared: 'x' is no parameter"),
    "tied itself": ({"shared": {"b": "a"}}, "shared: 'b' is a parameter or buffer itself"),
    "empty group": ({"groups": [{"parameters": ["a", "b"]}, {"parameters": []}]}, "group 1 has no parameters"),
    "nothing trained": ({"frozen": ["a", "b", "c"], "groups": []}, "nothing is trained"),
}


@pytest.mark.parametrize(("change", "said"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said(tmp_path, change, said):
    with pytest.raises(UsageError) as caught:
        load(write(tmp_path, {**MODEL, **change}))
    assert any(said in problem for problem in caught.value.problems), caught.value.problems


def test_all_problems_are_in_one_error_and_not_too_many(tmp_path):
    with pytest.raises(UsageError) as caught:
        load(write(tmp_path, {**MODEL, "parameters": {f"p{at}": [-1] for at in range(100)}}))
    assert len(caught.value.problems) == 21
    assert caught.value.problems[-1] == "and 80 more"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1]", "expected a model description"),
        ('{"version": 2}', "expected a model description"),
        ('{"version": true}', "expected a model description"),
        ('{"version": 1, "version": 1}', "'version' occurs twice"),
        ('{"version": 1, "x": NaN}', "NaN is no number"),
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        (" " * (1 << 20) + "{}", "is larger than"),
    ],
)
def test_what_is_no_description_is_refused(tmp_path, text, said):
    with pytest.raises(UsageError) as caught:
        load(write(tmp_path, text))
    assert said in str(caught.value)

"""Describe a model and its parameter groups in a file, for `reshard run --model` to DeepSpeed's formats.

DeepSpeed's files hold weights in the order of the optimizer's parameters, without names. Where no DeepSpeed checkpoint
of the model exists yet, this file says the order. In the script that will train with DeepSpeed, before
`deepspeed.initialize`:

    from elastic_trainer.stacks.description import write_description
    write_description("model.json", model)                # configuration has the optimizer
    write_description("model.json", model, optimizer)     # the script passes its own

The model may lie on the device `meta`. Format: docs/model-description.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_trainer.errors import ConfigurationError

VERSION = 1


def write_description(path: Path | str, model: Any, optimizer: Any = None) -> None:
    """Write the description of a model, see `describe_model`.

    Args:
        path: file to write.
        model: see `describe_model`.
        optimizer: see `describe_model`.

    Raises:
        ConfigurationError: see `describe_model`.
    """
    lines = ",\n".join(
        f"{json.dumps(key)}: {_to_lines(value)}" for key, value in describe_model(model, optimizer).items()
    )
    Path(path).write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def _to_lines(value: Any) -> str:
    """Return a value as JSON, with one line for each entry of an object or list."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"\n {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(f"\n {json.dumps(item)}" for item in value) + "]"
    return json.dumps(value)


def describe_model(model: Any, optimizer: Any = None) -> dict[str, Any]:
    """Describe a model: its parameters in order, buffers, shared names, and the optimizer's groups.

    Args:
        model: `torch.nn.Module`, as it will be passed to `deepspeed.initialize`.
        optimizer: the `torch.optim.Optimizer` that will be passed, or the list of groups (dicts with `params`) that
            will be passed as `model_parameters`. None if `model_parameters` will be `model.parameters()`.

    Raises:
        ConfigurationError: the state dict holds more than parameters and buffers, or a group has others than the model.
    """
    first: dict[int, str] = {}
    parameters: dict[str, Any] = {}
    shared: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            shared[name] = first[id(parameter)]
            continue
        first[id(parameter)] = name
        parameters[name] = parameter
    saved = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if name in saved}
    if others := sorted(saved - parameters.keys() - shared.keys() - buffers.keys()):
        raise ConfigurationError(
            f"the state dict holds {', '.join(others[:5])}, which are neither parameters nor buffers: such a model"
            " cannot be described"
        )
    is_optimizer = optimizer is not None and hasattr(optimizer, "param_groups")
    groups = optimizer.param_groups if is_optimizer else optimizer
    if groups is None:
        groups = [{"params": list(parameters.values())}]
    return {
        "version": VERSION,
        "parameters": {name: _shape_of(parameter) for name, parameter in parameters.items()},
        "frozen": [name for name, parameter in parameters.items() if not parameter.requires_grad],
        "buffers": {name: list(buffer.shape) for name, buffer in buffers.items()},
        "shared": shared,
        "optimizer": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}" if is_optimizer else "",
        "groups": _describe_groups(groups, first),
    }


def _shape_of(parameter: Any) -> list[int]:
    """Return the shape of a whole parameter: `zero.Init` keeps it in `ds_shape`."""
    return list(getattr(parameter, "ds_shape", parameter.shape))


def _describe_groups(groups: Iterable[Mapping[str, Any]], names: Mapping[int, str]) -> list[dict[str, Any]]:
    described = []
    for group in groups:
        params = group["params"]
        trained = [parameter for parameter in ([params] if hasattr(params, "requires_grad") else list(params))
                   if parameter.requires_grad]  # fmt: skip
        if any(id(parameter) not in names for parameter in trained):
            raise ConfigurationError("a parameter group holds a parameter that is not the model's")
        settings = {key: _to_plain(value) for key, value in group.items() if key != "params" and _is_plain(value)}
        if trained:  # DeepSpeed drops empty groups
            described.append({"parameters": [names[id(parameter)] for parameter in trained], "settings": settings})
    return described


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(_to_plain(value), bool | int | float | str | list)


def _to_plain(value: Any) -> Any:
    """Return a setting as JSON has it; a learning rate may be a tensor."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_to_plain(item) for item in value]
    return value.item() if hasattr(value, "item") else value

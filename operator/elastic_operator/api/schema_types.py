"""Field types of the models in this package: strict types with bounds, and extra keywords of their JSON schema.

The models are frozen standard dataclasses. pydantic validates what arrives from outside into them, and derives the
schema of the resource from them; code inside the operator constructs and replaces them at no cost.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, Strict
from pydantic_core import PydanticCustomError, core_schema

GIB = 2**30


def to_camel_case(name: str) -> str:
    """Convert `first_step_time` to `firstStepTime`, and `from_` to `from`."""
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


class Keywords:
    """Keywords that are added to the schema of a field, for example `format`.

    The generator of the CRD (crds/generate.py) reads two keywords and removes them: `derived=True` marks a field that
    the reader computes where the resource leaves it out (`spec._derive`), and `absent=True` a field whose default is
    not written into the resource.
    """

    def __init__(self, **keywords: Any) -> None:
        self._keywords = keywords

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return the schema of the field with the keywords."""
        return {**handler(schema), **self._keywords}


class ReadAs:
    """A field that is validated as another type and then converted.

    Args:
        source: type of the value in the resource.
        convert: called with the validated value.
    """

    def __init__(self, source: Any, convert: Callable[[Any], Any]) -> None:
        self._source, self._convert = source, convert

    def __get_pydantic_core_schema__(self, _type: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """Return the schema of the source type, followed by the conversion."""
        return core_schema.no_info_after_validator_function(self._convert, handler.generate_schema(self._source))


class CheckedAs:
    """A mapping that is validated as a model and stays as it is, with the fields that the model does not know.

    Args:
        model: dataclass with the fields that are checked.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def __get_pydantic_core_schema__(self, _type: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """Return the schema of the model; the result of the validation is the input."""
        return core_schema.no_info_wrap_validator_function(_check_only, handler.generate_schema(self._model))


class SelectedAs(CheckedAs):
    """A mapping that is validated as a model and reduced to the fields that the model knows."""

    def __get_pydantic_core_schema__(self, type_: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """Return the schema of the model; the result of the validation are the known fields of the input."""
        names = {to_camel_case(field.name) for field in dataclasses.fields(self._model)}

        def select(value: Mapping[str, Any]) -> dict[str, Any]:
            return {key: item for key, item in value.items() if key in names}

        return core_schema.no_info_after_validator_function(
            select, super().__get_pydantic_core_schema__(type_, handler)
        )


def _check_only(value: Any, validate: core_schema.ValidatorFunctionWrapHandler) -> Any:
    validate(without_nulls(value))
    return value


def not_expected(expected: str) -> PydanticCustomError:
    """Return the error of a field that is not `expected`."""
    return PydanticCustomError("not_expected", "expected {expected}", {"expected": expected})


def without_nulls(value: Any, *, opaque: frozenset[str] = frozenset(), depth: int = 32) -> Any:
    """Return JSON data without fields that are null, which mean the same as absent fields.

    Fields whose names are not ASCII are left out too: no model has them, and pydantic refuses some of them.

    Args:
        value: data from the API server.
        opaque: names of fields that are not searched.
        depth: levels that are searched.
    """
    if depth and isinstance(value, Mapping):
        return {
            key: item if key in opaque else without_nulls(item, opaque=opaque, depth=depth - 1)
            for key, item in value.items()
            if item is not None and key.isascii()
        }
    if depth and isinstance(value, list):
        return [without_nulls(item, opaque=opaque, depth=depth - 1) for item in value]
    return value


def _to_whole(value: Any) -> Any:
    """Return a float without fraction as an int: JSON does not distinguish 8 from 8.0, and some clients write 8.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_to_whole)
INT32, INT64 = Keywords(format="int32"), Keywords(format="int64")
SET = Keywords(**{"x-kubernetes-list-type": "set"})
OPEN = Keywords(**{"x-kubernetes-preserve-unknown-fields": True})
ABSENT = Keywords(absent=True)
DERIVED = Keywords(derived=True)

Flag = Annotated[bool, Strict()]
Degree = Annotated[int, Strict(), Field(ge=1, le=1024), WHOLE, INT32]
"""A degree of parallelism, or a number of accelerators in a node."""
NodeCount = Annotated[int, Strict(), Field(ge=1, le=65_536), WHOLE, INT32]
ZeroStage = Annotated[int, Strict(), Field(ge=0, le=3), WHOLE, INT32]
Speed = Annotated[float, Strict(), Field(ge=0.000001, le=1_000_000, allow_inf_nan=False)]


_MANAGER_NAME = re.compile(
    r"[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*/[A-Za-z0-9/%:@._~!$&()*+,;=-]+"
)
"""A path with a domain as its first part, as the API server demands it of `spec.managedBy` of a Job."""


def _check_manager_name(name: str) -> str:
    if not _MANAGER_NAME.fullmatch(name):
        raise not_expected("a name with its domain such as kueue.x-k8s.io/multikueue")
    return name


ManagerName = Annotated[str, Strict(), Field(min_length=3, max_length=63), AfterValidator(_check_manager_name)]

GLOBAL_PATTERN = "[A-Za-z_][A-Za-z0-9_]*([.][A-Za-z_][A-Za-z0-9_]*)+"
GLOBAL_EXPECTED = "the full name of one class or function, as my_package.state.Progress, not a pattern"
"""Form of a name in `spec.checkpoint.allowedGlobals`, and its description."""

_MAX_GLOBAL = 256

MAX_ALLOWED_GLOBALS = 64


def is_global_name(name: str) -> bool:
    """Return whether a name may stand in `spec.checkpoint.allowedGlobals`."""
    return len(name) <= _MAX_GLOBAL and re.fullmatch(GLOBAL_PATTERN, name) is not None


def _check_global(name: str) -> str:
    if not is_global_name(name):
        raise not_expected(GLOBAL_EXPECTED)
    return name


GlobalName = Annotated[str, Strict(), Field(max_length=_MAX_GLOBAL), AfterValidator(_check_global)]
"""`reshard.formats.pt.trust` refuses names of functions that run code which the file chooses."""

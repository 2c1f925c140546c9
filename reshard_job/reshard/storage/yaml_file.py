"""Read YAML files that a user names: plain data only, in time and memory proportional to the file's size."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.errors import UsageError
from reshard.storage.files import LocalFile

if TYPE_CHECKING:
    import yaml

MAX_BYTES = 1 << 20
_MOST_DIGITS = 18  # longer numbers take more than linear time to read, and an attacker can make them collide as keys
_MOST_OF_A_FRACTION = 32  # Python writes at most 24 characters
_MOST_QUOTED = 300
_NO_PIPES = "the output of a command, <(...), is a pipe: write it to a file, and name that"


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file: a regular file of at most `MAX_BYTES`, or a link to one.

    Aliases are refused, because a kilobyte of them can expand to gigabytes. A mapping with a key twice is refused, too.

    Raises:
        UsageError: the file cannot be read, is not a regular file, is too long, or is not such YAML.
    """
    try:
        import yaml
    except ImportError as error:
        raise UsageError(
            "is YAML, which this installation cannot read", path=str(path), hint="pip install PyYAML"
        ) from error
    text = read_content(path)
    try:
        return yaml.load(text, Loader=_loader())
    except (
        yaml.YAMLError, RecursionError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError
    ) as error:  # the parser itself raises all of these  # fmt: skip
        raise UsageError(f"is no YAML: {_reason(error)}", path=str(path)) from error


def read_content(path: Path) -> bytes:
    """Return the content of a regular file of at most `MAX_BYTES`, or of a link to one.

    Raises:
        UsageError: the file cannot be read, is not a regular file, or is too long.
    """
    try:
        with LocalFile(path, follow=True) as file:
            blocks = [b""]
            while (block := file.read(MAX_BYTES + 1, sum(map(len, blocks)))) and sum(map(len, blocks)) <= MAX_BYTES:
                blocks.append(block)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        hint = _NO_PIPES if isinstance(error, OSError) and error.errno == errno.EINVAL else ""
        raise UsageError(f"cannot be read: {why}", path=str(path), hint=hint) from error
    content = b"".join(blocks)
    if len(content) > MAX_BYTES:
        raise UsageError(f"is larger than {MAX_BYTES} bytes", path=str(path), hint="name a file of rules or patterns")
    return content


def _reason(error: Exception) -> str:
    """Describe a parser's error in one line; the parser's own message has several."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None)
    if mark is None or problem is None:
        return " ".join(str(error).split())[:_MOST_QUOTED] or type(error).__name__
    return f"{problem!s:.{_MOST_QUOTED}} in line {mark.line + 1}, column {mark.column + 1}"


def _loader() -> type[yaml.SafeLoader]:
    import yaml

    class Loader(yaml.SafeLoader):
        """A loader that reads plain data only and refuses aliases, long numbers and repeated keys."""

        def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
            if self.check_event(yaml.AliasEvent):
                event = self.peek_event()  # type: ignore[no-untyped-call]
                raise yaml.composer.ComposerError(None, None, f"*{event.anchor} is an alias", event.start_mark)
            return super().compose_node(parent, index)

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen: set[Any] = set()
            for name, _ in node.value:
                key = self.construct_object(name, deep=True)
                if key in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is there twice", name.start_mark)
                seen.add(key)
            return dict(super().construct_mapping(node, deep))

        def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
            check_length(node, _MOST_DIGITS)
            return int(super().construct_yaml_int(node))

        def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
            check_length(node, _MOST_OF_A_FRACTION)
            return float(super().construct_yaml_float(node))

    def check_length(node: yaml.ScalarNode, most: int) -> None:
        if len(node.value) > most:
            problem = f"a number of {len(node.value)} characters, at most {most} are read"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)

    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
    Loader.add_constructor("tag:yaml.org,2002:float", Loader.construct_yaml_float)
    return Loader

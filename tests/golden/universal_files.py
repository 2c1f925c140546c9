"""The universal checkpoints beside this file, and values of `.pt` files without torch."""

from collections.abc import Mapping
from pathlib import Path

from reshard.api import Conversion, RunOptions, convert
from reshard.formats.pt.objects import Inert, Tensor
from reshard.formats.pt.reader import PtFile, read, read_tensor_bytes
from reshard.topology import Topology
from tests.golden.files import STEP

ROOT = Path(__file__).parent / "universal-0.19.8"
NAMES = ("pipeline-tp2-pp2", "zero2-dp3", "zero3-dp3")


def converted(name: str) -> Path:
    """Return the universal folder that DeepSpeed's own converter made of the native checkpoint of this name."""
    return ROOT / name / STEP


def universal(source: Path, target: Path, topology: str = "dp=1,zero=1", like: Path | None = None) -> Path:
    """Convert a checkpoint to a universal one with `reshard`."""
    wanted = Conversion(
        source=source, target=target, topology=Topology.parse(topology), target_format="universal", like=like
    )
    convert(wanted, RunOptions(reread=True, sync=False))
    return target


def value_of(path: Path):
    """Content of a file with tensors as (type, shape, bytes)."""
    file = read(path)
    return _plain(file.value, file)


def _plain(value, file: PtFile):
    if isinstance(value, Tensor):
        return value.dtype, value.shape, read_tensor_bytes(file.path, value, limit_bytes=1 << 20)
    if isinstance(value, Inert):
        return str(value.target), _plain(value.args, file), _plain(value.state, file)
    if isinstance(value, Mapping):
        return {key: _plain(item, file) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_plain(item, file) for item in value)
    return value

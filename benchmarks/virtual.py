"""Virtual mode beside the other ways to the same ranks: until it is ready, and what every rank then reads."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import checkpoints
from benchmarks.checkpoints import ENVIRONMENT, OUTPUT, ROOT
from benchmarks.converting import RESHARD, TARGET
from benchmarks.measure import Measurement, drop_from_cache, measure, size_of
from benchmarks.table import median, seconds
from reshard.topology import Topology
from reshard.virtual.manifest import decode
from reshard.virtual.restrict import restrict

REPORT = OUTPUT / "loaded"
MASTER_PORT = "29517"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A source and the ranks that load it.

    Attributes:
        kind: as `benchmarks/restore.py` calls the model.
        title: of its tables.
        source: makes the checkpoint or finds it.
        to: topology of the ranks.
        universal_options: of DeepSpeed's converter.
    """

    kind: str
    title: str
    source: Callable[[], Path]
    to: str
    universal_options: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Ranks that load."""
        return Topology.parse(self.to).world_size


CASES = (
    Case(
        kind="zero3",
        title="ZeRO-3, saved by 4 ranks, loaded by 3",
        source=checkpoints.zero3,
        to="dp=3,zero=3",
        universal_options=("--inject_missing_state",),
    ),
    Case(kind="zero1", title="ZeRO-1, saved by dp=2, loaded by tp=2 x dp=2", source=checkpoints.zero1, to="tp=2,dp=2"),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Measurements that one rank took of its load.

    Attributes:
        seconds: from the beginning until the engine has everything.
        processor_seconds: that it computed meanwhile.
        from_storage: bytes of the checkpoint by read calls, or of mapped files those that the kernel fetched.
        from_memory: bytes by read calls on files in memory.
        from_disk: bytes that the kernel fetched for it.
        weights: sum over its master weights and moments.
    """

    seconds: float
    processor_seconds: float
    from_storage: int
    from_memory: int
    from_disk: int
    weights: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way from the source to loaded ranks: the command that prepares, once per run, and the loads."""

    name: str
    how: str
    prepared: Sequence[Measurement]
    loads: Sequence[Load]


def virtual(repeat: int) -> str:
    """ZeRO-3 and ZeRO-1: ready, per rank, and all ranks together; the page cache is empty before each command."""
    return "\n".join(_case(case, repeat) for case in CASES)


def _case(case: Case, repeat: int) -> str:
    source = case.source()
    needs: list[int] = []
    ways = []
    for name, how, options, command in _ways(case, source):
        prepared = [_prepare(command, source) for _ in range(repeat)]
        if how == "virtual" and not needs:
            needs = needs_of(TARGET)
        loads = _load(case, how, source if how == "virtual" else TARGET, options)
        if options:  # the ranks of this machine share its page cache, those of nodes of their own would not
            loads = [dataclasses.replace(load, from_storage=_alone(rank, source)) for rank, load in enumerate(loads)]
        ways.append(Way(name=name, how=how, prepared=prepared, loads=loads))
        sys.stdout.write(f"{case.kind}: {together(ways[-1], needs, size_of(source))}\n")
        sys.stdout.flush()
    shutil.rmtree(TARGET, ignore_errors=True)
    shutil.rmtree(REPORT, ignore_errors=True)
    note = compared(ways)
    return "\n".join([_prepared_table(case, source, ways), _rank_table(ways, needs), _table(ways, needs, source), note])


def compared(ways: Sequence[Way]) -> str:
    """Return a sentence that says whether all ranks hold the same weights and moments in all ways.

    Raises:
        RuntimeError: ours differ.
    """
    other = {
        way.name: [rank for rank, load in enumerate(way.loads) if load.weights != ways[0].loads[rank].weights]
        for way in ways
    }
    if wrong := [way.name for way in ways if way.how != "universal" and other[way.name]]:
        raise RuntimeError(f"{wrong[0]}: ranks {other[wrong[0]]} hold other weights or moments than: {ways[0].name}")
    different = [f"{name}: other weights or moments in ranks {ranks}." for name, ranks in other.items() if ranks]
    return "\n".join([*(different or ["All ranks hold the same weights and moments in all ways."]), ""])


def _ways(case: Case, source: Path) -> list[tuple[str, str, tuple[str, ...], list[str]]]:
    """(name, how the ranks load, options of that, command that prepares)."""
    ours = [RESHARD, "run", str(source), str(TARGET), "--to", case.to]
    universal = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *case.universal_options]
    universal += ["--input_folder", str(source), "--output_folder", str(TARGET)]
    workers = ["--num_extract_workers", "4", "--num_merge_workers", "2"]
    lazily = [*ours, "--mode", "virtual"]
    return [
        ("virtual, all ranks on one node", "virtual", (), lazily),
        ("virtual, every rank on a node of its own", "virtual", ("--own-node",), lazily),
        ("materialize, then `load_checkpoint`", "native", (), ours),
        ("`ds_to_universal`, then DeepSpeed's universal load", "universal", (), [*universal, *workers]),
    ]


def _prepare(command: Sequence[str], source: Path) -> Measurement:
    """One run into an empty target, with nothing of an earlier run left to be written."""
    shutil.rmtree(TARGET, ignore_errors=True)
    subprocess.run(["sync", "-f", str(OUTPUT)], check=True)
    drop_from_cache(source)
    return measure(command, env=ENVIRONMENT, log=OUTPUT / "commands.log")


def _alone(rank: int, source: Path) -> int:
    """Bytes that one process reads to make a rank's files, with nothing of the source in the page cache."""
    shutil.rmtree(REPORT, ignore_errors=True)
    REPORT.mkdir()
    drop_from_cache(source)
    script = (
        "import sys; from pathlib import Path; from reshard.virtual.load import load_files; "
        "from reshard.virtual.manifest import decode; "
        "load_files(decode(Path(sys.argv[1])), [int(sys.argv[2])], Path(sys.argv[3]))"
    )
    command = [sys.executable, "-c", script, str(TARGET), str(rank), str(REPORT)]
    environment = {**ENVIRONMENT, "OPENBLAS_NUM_THREADS": "1"}  # as the process that a trainer starts
    return measure(command, env=environment, log=OUTPUT / "commands.log").bytes_read


def needs_of(virtual_commit: Path) -> list[int]:
    """Tensor bytes of the source that each rank's files are made of, each byte counted once."""
    manifest = decode(virtual_commit)
    return [restrict(manifest.plan, files.tolist()).bytes_to_read for files in manifest.ranks]


def _load(case: Case, how: str, storage: Path, options: Sequence[str]) -> list[Load]:
    """Let real ranks load TARGET, with `storage` dropped from the page cache."""
    shutil.rmtree(REPORT, ignore_errors=True)
    REPORT.mkdir()
    script = [str(ROOT / "benchmarks/restore.py"), case.kind, how, str(TARGET), str(REPORT), "--storage", str(storage)]
    launcher = [sys.executable, "-m", "elastic_trainer.launch", "--nproc", str(case.world_size)]
    environment = {**ENVIRONMENT, "ETJ_TOPOLOGY": case.to, "MASTER_PORT": MASTER_PORT}
    if how == "virtual":
        environment["ETJ_RESUME"] = str(TARGET)
    measure([*launcher, *script, *options], env=environment, log=OUTPUT / "commands.log")
    told = [json.loads((REPORT / f"rank-{rank}.json").read_text("utf-8")) for rank in range(case.world_size)]
    # What a rank reads before the framework begins is the source, mapped by the process that it starts for that; then
    # the framework reads files in memory.
    return [
        Load(
            seconds=item["seconds"],
            processor_seconds=item["processor_seconds"],
            from_storage=max(item["bytes_before_framework"], item["storage_bytes"])
            if how == "virtual"
            else item["bytes_by_framework"],
            from_memory=item["bytes_by_framework"] if how == "virtual" else 0,
            from_disk=item["storage_bytes"],
            weights=item["weights"],
        )
        for item in told
    ]


def _prepared_table(case: Case, source: Path, ways: Sequence[Way]) -> str:
    size = size_of(source)
    lines = [
        f"{case.title}: {size / 1e9:.2f} GB. Until the ranks can load (whole process, empty page cache):",
        "",
        "| command | wall s, median (all) | read | written | peak memory |",
        "|---|---|---|---|---|",
    ]
    names = ("`reshard run --mode virtual`", "`reshard run`", "`ds_to_universal`, 4 extract / 2 merge workers")
    for name, way in zip(names, ways[1:], strict=True):
        last = way.prepared[-1]
        read, written = (f"{value / 1e6:.1f} MB" for value in (last.bytes_read, last.bytes_written))
        memory = max(item.peak_rss_bytes for item in way.prepared) / 2**20
        lines.append(f"| {name} | {seconds(way.prepared)} | {read} | {written} | {memory:.0f} MiB |")
    return "\n".join([*lines, ""])


def _rank_table(ways: Sequence[Way], needs: Sequence[int]) -> str:
    """Tabulate the bytes that each rank read of the checkpoint, as a multiple of the bytes that it needs."""
    lines = [
        "What each rank reads of the checkpoint, as a multiple of what it needs:",
        "",
        "| rank | needs | " + " | ".join(way.name for way in ways) + " |",
        "|---|---|" + "---|" * len(ways),
    ]
    for rank, need in enumerate(needs):
        read = " | ".join(f"{way.loads[rank].from_storage / need:.2f} x" for way in ways)
        lines.append(f"| {rank} | {need / 1e6:.0f} MB | {read} |")
    return "\n".join([*lines, ""])


def _table(ways: Sequence[Way], needs: Sequence[int], source: Path) -> str:
    lines = [
        "All ranks together:",
        "",
        (
            "| | read of the checkpoint / needed | read of memory / needed | fetched from disk / source | prepare s "
            "| load s, slowest rank | together s | load, processor s |"
        ),
        "|---|---|---|---|---|---|---|---|",
        *(together(way, needs, size_of(source)) for way in ways),
    ]
    return "\n".join([*lines, ""])


def together(way: Way, needs: Sequence[int], source_bytes: int) -> str:
    """Row of all ranks together; `needs` is bytes by rank."""
    storage, memory, disk = (
        sum(getattr(item, name) for item in way.loads) for name in ("from_storage", "from_memory", "from_disk")
    )
    prepare, load = median(way.prepared), max(item.seconds for item in way.loads)
    return (
        f"| {way.name} | {storage / sum(needs):.2f} x | {memory / sum(needs):.2f} x | {disk / source_bytes:.2f} x "
        f"| {prepare:.1f} | {load:.1f} | {prepare + load:.1f} "
        f"| {sum(item.processor_seconds for item in way.loads):.1f} |"
    )

"""What each verb of the command line does: options in, a result for machines and for people out.

What only some verbs need is imported by them: a conversion of a small checkpoint takes no longer than imports do.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard import api
from reshard.cli import arguments, render
from reshard.cli.job_env import claim_target
from reshard.cli.locate import check_source, check_target, newest, refuse_weights_beside, training_states_beside
from reshard.cli.output import tell
from reshard.cli.progress import ProgressLine
from reshard.commits.commit import VIRTUAL, read_commit, source_of
from reshard.commits.staging import Sharing, above
from reshard.contract import COMMIT_FILE, ExitCode, ReshardReport
from reshard.errors import (
    ReshardError,
    SourceError,
    TargetError,
    UncommittedError,
    UnsupportedError,
    UsageError,
    VerificationError,
)
from reshard.execution.resume import Resumed
from reshard.execution.verify import digests as read_digests
from reshard.execution.verify import total, verify_commit
from reshard.planning.plan import Plan
from reshard.storage.object_store import location
from reshard.storage.target_writer import free_bytes, target_errors
from reshard.tensors.layout import Index
from reshard.tensors.views import keep_tensors

if TYPE_CHECKING:
    from reshard.cli.estimate import Estimate
    from reshard.cli.explain import Explanation
    from reshard.execution.compare import Agreement
    from reshard.virtual.auto_mode import Choice


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What a verb has found: for machines, for people, and how the process ends."""

    value: dict[str, Any]
    lines: Sequence[str]
    exit_code: ExitCode = ExitCode.OK


def _inspect(options: argparse.Namespace) -> Result:
    from reshard.cli import inspection

    path = location(options.path)
    check_source(path)
    path, led = _bytes_of(path)
    patterns = _path(options.patterns)
    found = inspection.inspect(path, lambda commit: api.read_source(path, commit, patterns), told=patterns is not None)
    beside = [f"{name} in it holds the state of the training: these are the weights alone"
              for name in training_states_beside(path)]  # fmt: skip
    found = dataclasses.replace(found, notes=(*([led] if led else []), *found.notes, *beside))
    value = {"ok": not found.problems, "exit_code": int(found.exit_code), **render.inspect_value(found)}
    return Result(value, render.inspect_lines(found, tensors=options.tensors), found.exit_code)


def _bytes_of(path: Path) -> tuple[Path, str]:
    """Where the bytes of a checkpoint are, and a note if that is elsewhere: a virtual commit leads to its source."""
    try:
        commit = read_commit(path)
    except SourceError:
        return path, ""
    if commit.format != VIRTUAL:
        return path, ""
    found = source_of(path, commit)
    return found, f"{path} is a virtual commit for {commit.topology}: this is where its bytes are"


def _plan(options: argparse.Namespace) -> Result:
    from reshard.cli import preflight

    target = None if options.target is None else arguments.new_folder(options.target)
    wanted = _conversion(options, target)
    if target is not None:
        check_target(wanted.source, target)
    plan = api.plan_conversion(wanted, memory_bytes=arguments.memory_bytes(options.memory), num_threads=options.threads)
    mode = _mode(options, plan)
    refused = None if target is None else preflight.refusal(wanted, plan, mode.mode)
    value, estimated = _priced(options, plan, mode, target, refused)
    if target is not None:
        value["target_free_bytes"] = free_bytes(above(target))
        value["already_done"] = refused is None and preflight.is_done(wanted, plan, mode.mode)
        value["refused"] = None if refused is None else render.error_value(refused, refused.exit_code, str(refused))
    code = ExitCode.OK if refused is None else refused.exit_code
    told = {"ok": refused is None, **({} if refused is None else {"exit_code": int(code)}), **value}
    return Result(told, render.plan_lines(value, estimated), code)


def _priced(
    options: argparse.Namespace, plan: Plan, mode: Choice, target: Path | None, refused: ReshardError | None
) -> tuple[dict[str, Any], Estimate]:
    """A plan's facts, and what it costs here."""
    from reshard.cli import estimate
    from reshard.virtual import conversion

    rates = estimate.assumed(plan) if options.no_measure else estimate.measure(plan, None if refused else target)
    if refused is not None and not options.no_measure:
        nowhere = dataclasses.replace(rates.write, detail="nothing was written where the target is refused")
        rates = dataclasses.replace(rates, write=nowhere)
    chosen = (mode.mode, mode.reason)
    if mode.mode == VIRTUAL and not isinstance(refused, UnsupportedError):
        sizes = {name: len(content) for name, content in conversion.manifest_files(plan).items()}
        estimated = estimate.estimate_manifest(sum(sizes.values()), rates)
        return render.manifest_value(plan, estimated, sizes, chosen, files=options.files), estimated
    estimated = estimate.estimate(plan, rates)
    return render.plan_value(plan, estimated, estimate.count_requests(plan), chosen, files=options.files), estimated


def _run(options: argparse.Namespace) -> Result:
    worker = arguments.worker(options.worker)
    target = arguments.new_folder(options.target)
    wanted = _conversion(options, target, runs=True)
    check_target(wanted.source, target)
    check_report(options.report, wanted.source, target)
    sharing = Sharing.TOGETHER if worker else Sharing.RESUMABLE if options.resume else Sharing.ALONE
    line = ProgressLine(quiet=options.quiet)

    expected: list[int] = []

    def note(*texts: str) -> None:
        tell(f"reshard: note: {text}" for text in texts if not options.quiet)

    def planned(plan: Plan) -> None:
        note(*plan.summary()["notes"], *_allowed(options), *_not_compared(plan, mode))
        expected.append(plan.bytes_to_read // (worker[1] if worker else 1))
        line.expect(expected[0])

    def resumed(before: Resumed) -> None:
        note(f"--resume: {before}")
        line.expect(expected[0] - before.num_bytes)

    with target_errors(wanted.target, 0):
        wanted = dataclasses.replace(wanted, owner=claim_target(wanted.source, wanted.target))
    plan, mode = _chosen(options, wanted)
    if plan is not None and mode.mode == VIRTUAL:
        from reshard.virtual import conversion

        memory_bytes = arguments.memory_bytes(options.memory)
        report = conversion.prepare(wanted, memory_bytes=memory_bytes, planned=planned, plan=plan)
        return _reported(options, report, mode)
    try:
        report = api.convert(
            wanted,
            memory_bytes=arguments.memory_bytes(options.memory),
            num_threads=options.threads,
            reread=options.reread,
            sync=not options.no_sync,
            bytes_per_second=arguments.size("--limit-rate", options.limit_rate),
            sharing=sharing,
            worker=worker or (0, 1),
            latest=options.latest,
            progress=line,
            planned=planned,
            resumed=resumed,
            plan=plan,
        )
    finally:
        line.close()
    return _reported(options, report, mode)


def _allowed(options: argparse.Namespace) -> list[str]:
    """What to say of names that the user trusts."""
    names = sorted(set(options.allow_global))
    return [f"--allow-global: pickles of the result may name {', '.join(names)}, as COMMIT.json says"] if names else []


def _not_compared(plan: Plan, mode: Choice) -> list[str]:
    """What to say of copies that a conversion into files would compare."""
    if mode.mode != VIRTUAL or not plan.bytes_to_compare:
        return []
    what = f"copies of tensors ({plan.bytes_to_compare} bytes) are not compared in a virtual commit"
    return [f"{what}, which loads one of each: reshard verify compares them"]


def _reported(options: argparse.Namespace, report: ReshardReport, mode: Choice) -> Result:
    report = dataclasses.replace(report, mode_reason=mode.reason)
    write_report(options.report, report)
    return Result(json.loads(report.to_json()), render.report_lines(report))


def _mode(options: argparse.Namespace, plan: Plan) -> Choice:
    """The mode and why."""
    from reshard.virtual import auto_mode, conversion

    if options.mode != "auto":
        return auto_mode.Choice(mode=options.mode, reason="asked for")
    return conversion.choose_mode(plan, auto_mode.parse_loader(options.loader))


def _chosen(options: argparse.Namespace, wanted: api.Conversion) -> tuple[Plan | None, Choice]:
    """The mode, and the plan if it took one to choose."""
    from reshard.virtual.auto_mode import MATERIALIZE, Choice

    if options.mode == MATERIALIZE or (options.mode == "auto" and options.loader is None):
        return None, Choice(mode=MATERIALIZE, reason="")
    memory_bytes = arguments.memory_bytes(options.memory)
    plan = api.plan_conversion(wanted, memory_bytes=memory_bytes, num_threads=options.threads)
    return plan, _mode(options, plan)


def _verify(options: argparse.Namespace) -> Result:
    states, names = arguments.states(options.states), _path(options.names)
    found = [_index(options.first, options.patterns)]
    found += [] if options.second is None else [_index(options.second, None)]
    if absent := sorted(set(states) - {tensor.key.state for index in found for tensor in index.tensors}):
        raise UsageError(f"--states {options.states}: no checkpoint holds {', '.join(absent)}")
    seen = [_held(index, states, names if at == 0 else None) for at, index in enumerate(found)]
    line = ProgressLine(quiet=options.quiet)
    line.expect(sum(map(_stored_bytes, seen)))
    try:
        told = names is not None or options.patterns is not None
        digests = [_digests(index, line, told=at == 0 and told) for at, index in enumerate(seen)]
    finally:
        line.close()
    value = {"ok": True, "first": options.first, "tensors": len(digests[0]), "digest": total(digests[0])}
    if len(seen) > 1:
        return _compared(options, value, _compare(seen, digests))
    value["committed"] = (seen[0].root / COMMIT_FILE).exists()
    proved = "as committed" if value["committed"] else "no COMMIT.json: copies agree, the files' own checksums hold"
    return Result(value, [f"{options.first}: {value['tensors']} tensors, digest {value['digest']}: {proved}"])


def _held(index: Index, states: tuple[str, ...], names: Path | None) -> Index:
    """What of a checkpoint is compared: of these states, those that it holds."""
    held = tuple(state for state in states if any(tensor.key.state == state for tensor in index.tensors))
    return api.view_of(keep_tensors(index, []) if states and not held else index, states=held, names=names)


def _compare(seen: Sequence[Index], digests: Sequence[dict[str, str]]) -> Agreement:
    from reshard.execution import compare
    from reshard.execution.rounded_digests import rounded_digests

    first, second = (compare.side(index, own) for index, own in zip(seen, digests, strict=True))
    rounded = [rounded_digests(index, keys) for index, keys in zip(seen, compare.to_round(first, second), strict=True)]
    return compare.compare_sides(
        dataclasses.replace(first, rounded=rounded[0]), dataclasses.replace(second, rounded=rounded[1])
    )


def _digests(index: Index, line: ProgressLine, *, told: bool) -> dict[str, str]:
    """Read everything. Told of other names or cuts, the marker's checksums of files are compared, not its digests."""
    if not told:
        return verify_commit(index, progress=line)
    with contextlib.suppress(UncommittedError):
        return read_digests(index, commit=read_commit(index.root), progress=line)
    return read_digests(index, progress=line)


def _stored_bytes(index: Index) -> int:
    """Of all copies of all tensors."""
    item = np.array([tensor.item_bytes for tensor in index.tensors], dtype=np.int64)
    return int((index.shards.num_elements * item[index.shards.tensor]).sum())


def _compared(options: argparse.Namespace, value: dict[str, Any], found: Agreement) -> Result:
    if found.different:
        more = [f"and {len(found.different) - 20} more"] if len(found.different) > 20 else []
        raise VerificationError(
            f"{len(found.different)} tensors differ between {options.first} and {options.second}",
            problems=[*found.different[:20], *more],
            hint="verify each of the two alone, which tells a damaged one; if both are well, they are different"
            " checkpoints (another step, another run), or the map of names is wrong: reshard explain shows each byte",
        )
    if not found.same:
        raise VerificationError(
            f"{options.first} and {options.second} have no tensor in common: nothing could be compared",
            problems=found.not_compared[:20],
            hint="give --names FILE where the second has other names",
        )
    facts = found.to_dict()
    first, second, states = options.first, options.second, ", ".join(facts["states"])
    if found.not_compared:
        lines = [f"{first} and {second} agree in the {facts['tensors']} tensors that both hold: {states}"]
    else:
        lines = [f"{first} and {second} hold the same {facts['tensors']} tensors: {states}"]
    if facts["across_states"]:
        lines.append(
            f"  {len(facts['across_states'])} of them: weights on one side, master weights (fp32) on the other"
        )
    if found.rounded:
        lines.append(f"  {found.rounded} of them: of another type, equal when rounded to nearest even")
    lines += [f"  not compared: {note}" for note in found.not_compared]
    return Result({**value, "second": str(options.second), **facts}, lines)


def _explain(options: argparse.Namespace) -> Result:
    from reshard.cli import explain

    source = location(options.source).absolute()
    if options.to or options.format:
        plan = api.plan_conversion(_conversion(options, None), num_threads=1)
        index = plan.index
    else:
        plan = None
        check_source(source)
        index = api.index_of(source, patterns=_path(options.patterns))
        index = api.view_of(index, states=arguments.states(options.states), names=_path(options.names))
    found = explain.explain(index, explain.find(index, options.tensor), plan)
    if options.svg is not None:
        _draw(Path(options.svg), found)
    lines = [line for item in found for line in explain.to_lines(item, index.aliases)]
    return Result({"ok": True, "source": str(source), "tensors": [explain.to_dict(item) for item in found]}, lines)


def _draw(path: Path, found: Sequence[Explanation]) -> None:
    from reshard.cli import svg

    if len(found) > svg.MAX_TENSORS:
        raise UsageError(
            f"{len(found)} tensors match: a picture shows at most {svg.MAX_TENSORS}", hint="name fewer tensors"
        )
    try:
        path.write_text(svg.draw(found), encoding="utf-8")
    except OSError as error:
        raise TargetError(f"cannot be written: {error.strerror}", path=str(path)) from error


def _conversion(options: argparse.Namespace, target: Path | None, *, runs: bool = False) -> api.Conversion:
    """What is asked for; a run may find its work done, and the source removed since."""
    source = location(options.source).absolute()
    source = newest(source) if getattr(options, "newest", False) else source
    topology = arguments.topology(options.to)
    if topology is None or not runs:
        check_source(source)
    like = None if options.like is None else location(options.like).absolute()
    if like is not None:
        check_source(like)
    wanted = api.Conversion(
        source=source,
        target=target if target is not None else source,
        topology=topology or api.index_of(source, patterns=_path(options.patterns)).topology,
        target_format=options.format,
        weight_dtype=options.dtype,
        states=arguments.states(options.states),
        like=like,
        names=_path(options.names),
        patterns=_path(options.patterns),
        file_bytes=arguments.size("--file-size", options.file_size),
        attempt=getattr(options, "attempt", 0),
        require_commit=getattr(options, "require_commit", False),
        keeps_stage="zero" not in (options.to or "zero"),
        allow_differences=options.allow_differences,
        allow_globals=tuple(options.allow_global),
    )
    if runs and api.done_without_source(wanted) is None:
        check_source(source)
    if options.format != "safetensors" and options.states != "weight" and source.is_dir():
        refuse_weights_beside(source)
    return wanted


def _index(text: str, patterns: str | None) -> Index:
    path = location(text)
    check_source(path)
    return api.index_of(path, patterns=_path(patterns))


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text).absolute()


def check_report(report: str | None, *checkpoints: Path) -> None:
    """A report must not hurt checkpoints, and must have a place, before a byte is moved.

    Raises:
        UsageError: it lies in the source or in the target.
        TargetError: there is no such folder.
    """
    if report is None:
        return
    path = Path(report).absolute()
    if any(folder in path.parents for folder in checkpoints):
        raise UsageError(f"--report {report}: lies inside of a checkpoint", hint="name a file somewhere else")
    try:
        has_place = path.parent.is_dir() and not path.is_dir()
    except OSError as error:
        raise TargetError(f"the report cannot be written: {error.strerror}", path=report) from error
    if not has_place:
        raise TargetError("the report cannot be written: no such folder, or a folder itself", path=report)


def write_report(path: str | None, report: ReshardReport) -> None:
    """Leave a report in a file, if one is named.

    Raises:
        TargetError: it cannot be written.
    """
    if path is None:
        return
    try:
        Path(path).write_text(report.to_json(), encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise TargetError(f"the report cannot be written: {why}", path=path) from error


VERBS: Mapping[str, Callable[[argparse.Namespace], Result]] = {
    "inspect": _inspect,
    "plan": _plan,
    "run": _run,
    "verify": _verify,
    "explain": _explain,
}
"""What to call for each verb; every one may raise a `ReshardError`."""

"""The verbs of the command line: each takes the parsed options and returns a result for machines and for people.

A verb imports what only it needs when it runs, so that converting a small checkpoint starts without delay.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard import api
from reshard.cli import arguments, render
from reshard.cli.job_env import claim_checkpoint_root, report_nothing, take_over
from reshard.cli.locate import check_source, check_target, find_newest, find_training_states, refuse_weights_beside
from reshard.cli.output import check_report, write_log, write_report
from reshard.cli.progress import ProgressLine
from reshard.commits.commit import VIRTUAL, read_commit, source_of
from reshard.commits.staging import Sharing, nearest_folder
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
from reshard.execution.verify import Differences, read_digests, total_digest, verify_commit
from reshard.folders import read_checkpoint
from reshard.planning.plan import Plan
from reshard.profile.collector import Collector, collecting
from reshard.storage.object_store import location
from reshard.storage.target_writer import free_bytes, target_errors
from reshard.target import find_commit_without_source
from reshard.tensors.layout import Index
from reshard.tensors.views import keep_tensors

if TYPE_CHECKING:
    from reshard.cli.estimate import Estimate, Rates
    from reshard.cli.explain import Explanation
    from reshard.execution.compare import Agreement
    from reshard.virtual.auto_mode import Choice

_MOST_PROBLEMS = 20


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """Report of a verb: a value for machines, lines for people, and the exit code of the process."""

    value: dict[str, Any]
    lines: Sequence[str]
    exit_code: ExitCode = ExitCode.OK


def _inspect(options: argparse.Namespace) -> Result:
    from reshard.cli.inspection import inspect

    path = location(options.path)
    check_source(path)
    path, virtual_note = _resolve_virtual(path)
    patterns = _path(options.patterns)
    inspection = inspect(
        path,
        lambda commit: read_checkpoint(path, commit, patterns, _path(options.ds_config)),
        has_patterns=patterns is not None,
    )
    beside = [f"{name} in it holds the state of the training: these are the weights alone"
              for name in find_training_states(path)]  # fmt: skip
    notes = (*([virtual_note] if virtual_note else []), *inspection.notes, *beside)
    inspection = dataclasses.replace(inspection, notes=notes)
    value = {
        "ok": not inspection.problems,
        "exit_code": int(inspection.exit_code),
        **render.inspect_value(inspection),
    }
    return Result(value, render.inspect_lines(inspection, tensors=options.tensors), inspection.exit_code)


def _resolve_virtual(path: Path) -> tuple[Path, str]:
    """Return the folder that holds a checkpoint's bytes, and a note if that is the source of a virtual commit."""
    try:
        commit = read_commit(path)
    except (SourceError, UnsupportedError):
        return path, ""
    if commit.format != VIRTUAL:
        return path, ""
    return source_of(path, commit), f"{path} is a virtual commit for {commit.topology}: this is where its bytes are"


def _plan(options: argparse.Namespace) -> Result:
    target = None if options.target is None else arguments.parse_target(options.target)
    conversion = _conversion(options, target)
    if target is not None:
        check_target(conversion.source, target)
    plan = _make_plan(options, conversion)
    choice = _choose_mode(options, plan)
    if target is not None:
        return _plan_for_target(options, conversion, plan, choice)
    value, estimate = _price(options, plan, choice, None, None)
    return Result({"ok": True, **value}, render.plan_lines(value, estimate))


def _plan_for_target(options: argparse.Namespace, conversion: api.Conversion, plan: Plan, choice: Choice) -> Result:
    """Report a plan and what a run would find at its target."""
    from reshard.cli import preflight

    refusal = preflight.find_refusal(conversion, plan, choice.mode)
    value, estimate = _price(options, plan, choice, conversion.target, refusal)
    value["target_free_bytes"] = free_bytes(nearest_folder(conversion.target))
    value["already_done"] = refusal is None and preflight.is_done(conversion, plan, choice.mode)
    if refusal is None:
        return Result({"ok": True, **value, "refused": None}, render.plan_lines(value, estimate))
    code = refusal.exit_code
    value["refused"] = render.error_value(refusal, code, str(refusal))
    return Result({"ok": False, "exit_code": int(code), **value}, render.plan_lines(value, estimate), code)


def _price(
    options: argparse.Namespace, plan: Plan, choice: Choice, target: Path | None, refusal: ReshardError | None
) -> tuple[dict[str, Any], Estimate]:
    """Return a plan's facts and an estimate of its time on this machine."""
    from reshard.cli import estimate
    from reshard.virtual.conversion import manifest_files

    rates = _rates(options, plan, target, refusal)
    mode = (choice.mode, choice.reason)
    if choice.mode == VIRTUAL and not isinstance(refusal, UnsupportedError):
        sizes = {name: len(content) for name, content in manifest_files(plan).items()}
        manifest_estimate = estimate.estimate_manifest(sum(sizes.values()), rates)
        return render.manifest_value(plan, manifest_estimate, sizes, mode, files=options.files), manifest_estimate
    files_estimate = estimate.estimate(plan, rates)
    requests = estimate.count_requests(plan)
    return render.plan_value(plan, files_estimate, requests, mode, files=options.files), files_estimate


def _rates(options: argparse.Namespace, plan: Plan, target: Path | None, refusal: ReshardError | None) -> Rates:
    """Measure the storage, or assume its speed with `--no-measure`; write nothing where the target is refused."""
    from reshard.cli import estimate

    if options.no_measure:
        return estimate.assume(plan)
    if refusal is None:
        return estimate.measure(plan, target)
    rates = estimate.measure(plan, None)
    write = dataclasses.replace(rates.write, detail="nothing was written where the target is refused")
    return dataclasses.replace(rates, write=write)


def _run(options: argparse.Namespace) -> Result:
    target = arguments.parse_target(options.target)
    options.source, left_out = take_over(options.source, target)
    if not options.source:
        return Result(*report_nothing(options.report))
    conversion = _conversion(options, target, is_run=True)
    check_target(conversion.source, target)
    check_report(options.report, conversion.source, target)
    check_report(options.profile_svg, conversion.source, target, option="--profile-svg")
    with target_errors(target, 0):
        conversion = dataclasses.replace(conversion, owner=claim_checkpoint_root(conversion.source, target))

    def on_plan(plan: Plan) -> None:
        _tell_plan_notes(options, plan, choice)
        left_out.extend(plan.layout.notes)

    with collecting() as collector:
        plan, choice = _plan_to_choose(options, conversion)
        if plan is not None and choice.mode == VIRTUAL:
            from reshard.virtual.conversion import prepare

            report = prepare(conversion, on_plan=on_plan, plan=plan)
        else:
            report = _run_materialize(options, conversion, plan, on_plan)
    report = dataclasses.replace(report, mode_reason=choice.reason)
    # The report has the notes, too: its reader does not see the log.
    write_report(options.report, dataclasses.replace(report, message="; ".join((report.message, *left_out))))
    return _add_profile(options, Result(json.loads(report.to_json()), render.report_lines(report)), collector)


def _add_profile(options: argparse.Namespace, result: Result, collector: Collector) -> Result:
    """Add the profile of a run to its result, and draw it, as far as the options ask for it."""
    if not options.profile and options.profile_svg is None:
        return result
    from reshard.cli.profile import svg, table

    profile = collector.profile()
    if options.profile_svg is not None:
        _write_picture(Path(options.profile_svg), svg.draw(profile))
    if not options.profile:
        return result
    return Result({**result.value, "profile": profile.to_dict()}, [*result.lines, *table.lines(profile)])


def _plan_to_choose(options: argparse.Namespace, conversion: api.Conversion) -> tuple[Plan | None, Choice]:
    """Choose the mode; return the plan as well if the choice needed one."""
    from reshard.virtual.auto_mode import MATERIALIZE, Choice

    if options.mode == MATERIALIZE or (options.mode == "auto" and options.loader is None):
        return None, Choice(mode=MATERIALIZE, reason="")
    plan = _make_plan(options, conversion)
    return plan, _choose_mode(options, plan)


def _choose_mode(options: argparse.Namespace, plan: Plan) -> Choice:
    from reshard.virtual.auto_mode import Choice, parse_loader
    from reshard.virtual.conversion import choose_mode

    if options.mode != "auto":
        return Choice(mode=options.mode, reason="asked for")
    return choose_mode(plan, parse_loader(options.loader))


def _make_plan(options: argparse.Namespace, conversion: api.Conversion) -> Plan:
    memory_bytes = arguments.parse_memory_bytes(options.memory)
    return api.plan_conversion(conversion, memory_bytes=memory_bytes, num_threads=options.threads)


def _run_materialize(
    options: argparse.Namespace, conversion: api.Conversion, plan: Plan | None, on_plan: Callable[[Plan], None]
) -> ReshardReport:
    worker = arguments.parse_worker(options.worker)
    run_options = api.RunOptions(
        memory_bytes=arguments.parse_memory_bytes(options.memory),
        num_threads=options.threads,
        reread=options.reread,
        sync=not options.no_sync,
        bytes_per_second=arguments.parse_size("--limit-rate", options.limit_rate),
        sharing=Sharing.TOGETHER if worker else Sharing.RESUMABLE if options.resume else Sharing.ALONE,
        worker=worker or (0, 1),
        latest=options.latest,
    )
    line = ProgressLine(quiet=options.quiet)
    try:
        return api.convert(conversion, run_options, hooks=_hooks(options, run_options, on_plan, line), plan=plan)
    finally:
        line.close()


def _hooks(
    options: argparse.Namespace, run_options: api.RunOptions, tell: Callable[[Plan], None], line: ProgressLine
) -> api.Hooks:
    """Return hooks that tell notes and drive the progress line."""
    num_bytes_expected = 0

    def on_plan(plan: Plan) -> None:
        nonlocal num_bytes_expected
        tell(plan)
        num_bytes_expected = plan.bytes_to_read // run_options.worker[1]
        line.expect(num_bytes_expected)

    def on_resume(before: Resumed) -> None:
        _tell_notes(options, [f"--resume: {before}"])
        line.expect(num_bytes_expected - before.num_bytes)

    return api.Hooks(on_plan=on_plan, on_resume=on_resume, on_progress=line)


def _tell_plan_notes(options: argparse.Namespace, plan: Plan, choice: Choice) -> None:
    notes = list(plan.summary()["notes"])
    if names := sorted(set(options.allow_global)):
        notes.append(f"--allow-global: pickles of the result may name {', '.join(names)}, as COMMIT.json says")
    if choice.mode == VIRTUAL and plan.bytes_to_compare:
        notes.append(
            f"copies of tensors ({plan.bytes_to_compare} bytes) are not compared in a virtual commit, which loads one"
            " of each: reshard verify compares them"
        )
    _tell_notes(options, notes)


def _tell_notes(options: argparse.Namespace, notes: Sequence[str]) -> None:
    write_log(f"reshard: note: {note}" for note in notes if not options.quiet)


def _verify(options: argparse.Namespace) -> Result:
    states, names = arguments.parse_states(options.states), _path(options.names)
    indexes = [_index(options.first, options.patterns)]
    indexes += [] if options.second is None else [_index(options.second, None)]
    if absent := sorted(set(states) - {tensor.key.state for index in indexes for tensor in index.tensors}):
        raise UsageError(f"--states {options.states}: no checkpoint holds {', '.join(absent)}")
    views = [_view(index, states, names if at == 0 else None) for at, index in enumerate(indexes)]
    is_first_changed = names is not None or options.patterns is not None
    line = ProgressLine(quiet=options.quiet)
    line.expect(sum(map(_stored_bytes, views)))
    differences = [Differences() for _ in views]
    try:
        digests = [
            _digests(view, line, differences[at], only_file_checksums=at == 0 and is_first_changed)
            for at, view in enumerate(views)
        ]
    finally:
        line.close()
    value = {"ok": True, "first": options.first, "tensors": len(digests[0]), "digest": total_digest(digests[0])}
    value["averaged"] = {key: None if math.isinf(size) else size for key, size in differences[0].averaged.items()}
    _tell_notes(options, [text for own in differences for text in own.describe()])
    if len(views) > 1:
        return _report_agreement(options, value, _compare(views, digests))
    value["committed"] = (views[0].root / COMMIT_FILE).exists()
    proof = "as committed" if value["committed"] else "no COMMIT.json: copies agree, the files' own checksums hold"
    return Result(value, [f"{options.first}: {value['tensors']} tensors, digest {value['digest']}: {proof}"])


def _view(index: Index, states: tuple[str, ...], names: Path | None) -> Index:
    """Return the part of a checkpoint that is compared: the states that it holds of those asked for."""
    held = tuple(state for state in states if any(tensor.key.state == state for tensor in index.tensors))
    return api.view_of(keep_tensors(index, []) if states and not held else index, states=held, names=names)


def _compare(views: Sequence[Index], digests: Sequence[dict[str, str]]) -> Agreement:
    from reshard.execution import compare
    from reshard.execution.rounded_digests import rounded_digests

    first, second = (compare.make_side(view, own) for view, own in zip(views, digests, strict=True))
    rounded = [
        rounded_digests(view, keys)
        for view, keys in zip(views, compare.find_types_to_round(first, second), strict=True)
    ]
    return compare.compare_sides(
        dataclasses.replace(first, rounded=rounded[0]), dataclasses.replace(second, rounded=rounded[1])
    )


def _digests(
    index: Index, line: ProgressLine, differences: Differences, *, only_file_checksums: bool
) -> dict[str, str]:
    """Read all of a checkpoint, compare it with its commit marker if it has one, and return the tensors' digests.

    Args:
        index: the checkpoint.
        line: shows the progress.
        differences: gets the tensors whose copies differ where they may.
        only_file_checksums: compare the marker's checksums of files, not its digests of tensors: the index has other
            names or cuts than the marker.
    """
    if not only_file_checksums:
        return verify_commit(index, progress=line, differences=differences)
    with contextlib.suppress(UncommittedError):
        return read_digests(index, commit=read_commit(index.root), progress=line, differences=differences)
    return read_digests(index, progress=line, differences=differences)


def _stored_bytes(index: Index) -> int:
    """Count the bytes of all copies of all tensors."""
    item = np.array([tensor.item_bytes for tensor in index.tensors], dtype=np.int64)
    return int((index.shards.num_elements * item[index.shards.tensor]).sum())


def _report_agreement(options: argparse.Namespace, value: dict[str, Any], agreement: Agreement) -> Result:
    """Return what two checkpoints have in common.

    Raises:
        VerificationError: tensors differ, or there is nothing to compare.
    """
    _check_agreement(options, agreement)
    facts = agreement.to_dict()
    first, second, states = options.first, options.second, ", ".join(facts["states"])
    if agreement.not_compared:
        lines = [f"{first} and {second} agree in the {facts['tensors']} tensors that both hold: {states}"]
    else:
        lines = [f"{first} and {second} hold the same {facts['tensors']} tensors: {states}"]
    if facts["across_states"]:
        lines.append(
            f"  {len(facts['across_states'])} of them: weights on one side, master weights (fp32) on the other"
        )
    if agreement.rounded:
        lines.append(f"  {agreement.rounded} of them: of another type, equal when rounded to nearest even")
    lines += [f"  not compared: {note}" for note in agreement.not_compared]
    return Result({**value, "second": str(options.second), **facts}, lines)


def _check_agreement(options: argparse.Namespace, agreement: Agreement) -> None:
    different = agreement.different
    if different:
        more = [f"and {len(different) - _MOST_PROBLEMS} more"] if len(different) > _MOST_PROBLEMS else []
        raise VerificationError(
            f"{len(different)} tensors differ between {options.first} and {options.second}",
            problems=[*different[:_MOST_PROBLEMS], *more],
            hint="verify each of the two alone, which tells a damaged one; if both are well, they are different"
            " checkpoints (another step, another run), or the map of names is wrong: reshard explain shows each byte",
        )
    if not agreement.same:
        raise VerificationError(
            f"{options.first} and {options.second} have no tensor in common: nothing could be compared",
            problems=agreement.not_compared[:_MOST_PROBLEMS],
            hint="give --names FILE where the second has other names",
        )


def _explain(options: argparse.Namespace) -> Result:
    from reshard.cli import explain

    source = location(options.source).absolute()
    plan = None
    if options.to or options.format:
        plan = api.plan_conversion(_conversion(options, None), num_threads=1)
        index = plan.index
    else:
        check_source(source)
        index = api.index_of(source, patterns=_path(options.patterns))
        index = api.view_of(index, states=arguments.parse_states(options.states), names=_path(options.names))
    explanations = explain.explain(index, explain.find(index, options.tensor), plan)
    if options.svg is not None:
        _draw(Path(options.svg), explanations)
    lines = [line for item in explanations for line in explain.to_lines(item, index.aliases)]
    tensors = [explain.to_dict(item) for item in explanations]
    return Result({"ok": True, "source": str(source), "tensors": tensors}, lines)


def _draw(path: Path, explanations: Sequence[Explanation]) -> None:
    from reshard.cli import svg

    if len(explanations) > svg.MAX_TENSORS:
        raise UsageError(
            f"{len(explanations)} tensors match: a picture shows at most {svg.MAX_TENSORS}", hint="name fewer tensors"
        )
    _write_picture(path, svg.draw(explanations))


def _write_picture(path: Path, document: str) -> None:
    try:
        path.write_text(document, encoding="utf-8")
    except OSError as error:
        raise TargetError(f"cannot be written: {error.strerror}", path=str(path)) from error


def _conversion(options: argparse.Namespace, target: Path | None, *, is_run: bool = False) -> api.Conversion:
    """Return the conversion that the options ask for.

    Args:
        options: of the command line.
        target: folder to make, or None.
        is_run: accept a source that was removed after a run converted it.
    """
    source = location(options.source).absolute()
    source = find_newest(source) if getattr(options, "newest", False) else source
    topology = arguments.parse_topology(options.to)
    is_committed = getattr(options, "require_commit", False)
    if topology is None or not is_run:
        check_source(source, is_committed=is_committed)
    like = None if options.like is None else location(options.like).absolute()
    if like is not None:
        check_source(like)
    conversion = api.Conversion(
        source=source,
        target=target if target is not None else source,
        topology=topology
        or api.index_of(
            source,
            patterns=_path(options.patterns),
            ds_config=None if options.model is not None else _path(options.ds_config),
        ).topology,
        target_format=options.format,
        weight_dtype=options.dtype,
        states=arguments.parse_states(options.states),
        like=like,
        names=_path(options.names),
        patterns=_path(options.patterns),
        ds_config=_path(options.ds_config),
        model=_path(options.model),
        file_bytes=arguments.parse_size("--file-size", options.file_size),
        attempt=getattr(options, "attempt", 0),
        require_commit=getattr(options, "require_commit", False),
        keeps_stage="zero" not in (options.to or ("zero" if options.model is None else "")),
        allow_differences=options.allow_differences,
        allow_globals=tuple(options.allow_global),
    )
    if is_run and find_commit_without_source(conversion) is None:
        check_source(source, is_committed=is_committed)
    if options.format != "safetensors" and options.states != "weight" and source.is_dir():
        refuse_weights_beside(source)
    return conversion


def _index(text: str, patterns: str | None) -> Index:
    path = location(text)
    check_source(path)
    return api.index_of(path, patterns=_path(patterns))


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text).absolute()


VERBS: Mapping[str, Callable[[argparse.Namespace], Result]] = {
    "inspect": _inspect,
    "plan": _plan,
    "run": _run,
    "verify": _verify,
    "explain": _explain,
}
"""Function of each verb; every one may raise a `ReshardError`."""

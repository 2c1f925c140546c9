"""Pretrain with DeepSpeed, go on at another topology, fine-tune with the Hugging Face Trainer, and generate text.

Nothing is downloaded, and no GPU is needed. Each hand-over is a `reshard run`, and each is checked: the next framework
must compute the training loss that the one before has computed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from demo.curves import Point, read_points
from demo.lifecycle.picture import Evaluation, Stage, draw
from demo.options import LAUNCH
from elastic_trainer.retention import find_commits
from reshard.topology import Topology

ROOT = Path(__file__).parents[2]
NAMES = ROOT / "examples/name_maps/gpt-llama.yaml"
PRETRAINED_ON, RESUMED_ON, FINE_TUNED_ON = "tp=1,pp=4,dp=2,zero=1", "tp=2,pp=1,dp=1,zero=1", "dp=2,zero=1"
LARGEST_DIFFERENCE = 1e-5
"""Relative difference of a training loss that two frameworks compute with the same fp32 weights."""


def main() -> int:
    """Run all stages; exit code 1 if a hand-over changes the training loss."""
    options = parse()
    shutil.rmtree(options.output, ignore_errors=True)
    options.output.mkdir(parents=True)
    story = Story(options)
    stages, evaluations = story.pretrain()
    model = story.export(story.commit(2, options.resumed), "pretrained", names=NAMES)
    checked = [story.check_hand_over(model)]
    tuned = story.fine_tune(model)
    stages.append(tuned)
    final = story.export(story.newest(options.output / "finetune"), "finetuned")
    evaluations.append(story.evaluate(final, "fine-tuned", tuned.points[-1].samples))
    checked.append(story.check_fine_tuned(tuned, model))
    text = story.generate(final)
    draw(options.picture, stages=stages, evaluations=evaluations, text=text)
    report = {
        "checks": checked,
        "evaluations": {item.name: item.loss for item in evaluations},
        "losses": {stage.name: [point.loss for point in stage.points] for stage in stages},
        "text": text,
    }
    (options.output / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    failed = [check for check in checked if not check["relative"] <= LARGEST_DIFFERENCE]
    for check in failed:
        story.say(f"{check['name']}: expected loss {check['expected']}, found {check['found']}")
    story.say(f"picture {options.picture}, report {options.output / 'report.json'}")
    return 1 if failed else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo.lifecycle", description=__doc__.splitlines()[0])
    parser.add_argument("--pretrained", type=int, default=150, help="optimizer steps on 8 ranks")
    parser.add_argument("--resumed", type=int, default=250, help="optimizer steps after the change of topology, in all")
    parser.add_argument("--finetuned", type=int, default=60, help="optimizer steps of the fine-tuning")
    parser.add_argument("--output", type=Path, default=Path("demo/output/lifecycle"))
    parser.add_argument("--picture", type=Path, default=Path("demo/lifecycle.png"))
    return parser.parse_args()


class Story:
    """The stages. Each one reads what the one before has left in a folder.

    Args:
        options: command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._root: Path = options.output.absolute()
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        sys.stdout.write(f"[{time.monotonic() - self._started:6.1f}s] {text}\n")
        sys.stdout.flush()

    def pretrain(self) -> tuple[list[Stage], list[Evaluation]]:
        """Train on 8 ranks, go on at another topology, and evaluate a commit while the second attempt trains."""
        first, last = self._options.pretrained, self._options.resumed
        self.say(f"pretrain: DeepSpeed, {PRETRAINED_ON}, {first} steps")
        self._train(1, PRETRAINED_ON, "--steps", str(first)).check()
        self.say(f"reshard: {PRETRAINED_ON} to {RESUMED_ON}")
        source, target = self.commit(1, first), self.commit(2, first)
        self._reshard(source, target, "--to", RESUMED_ON)
        self.say(f"pretrain: DeepSpeed, {RESUMED_ON}, to step {last}")
        # One step more than the commit that is exported: its loss is computed with the weights of that commit.
        training = self._train(
            2, RESUMED_ON, "--steps", str(last + 1), "--save-every", str(last), ETJ_RESUME=str(target)
        )
        self.say("evaluate the commit that the attempt has resumed from, while it trains")
        model = self.export(target, "evaluated", names=NAMES)
        samples = read_points(self._root / "pretrain")[1][-1].samples
        evaluations = [self.evaluate(model, "pretrained, first topology", samples)]
        training.check()
        curves = read_points(self._root / "pretrain")
        stages = [
            Stage(name=f"DeepSpeed, {degrees}", points=tuple(curves[attempt]))
            for attempt, degrees in ((1, PRETRAINED_ON), (2, RESUMED_ON))
        ]
        return stages, evaluations

    def commit(self, attempt: int, step: int) -> Path:
        return self._root / "pretrain" / f"a{attempt}" / f"step-{step:08d}"

    def newest(self, root: Path) -> Path:
        return max(find_commits(root.absolute()))[2]

    def export(self, commit: Path, name: str, *, names: Path | None = None) -> Path:
        """Write a folder that `from_pretrained` of transformers loads."""
        folder = self._root / "models" / name
        renamed = () if names is None else ("--names", str(names))
        self.say(f"reshard: {commit.relative_to(self._root)} to safetensors")
        self._reshard(commit, folder, "--format", "safetensors", "--states", "weight", *renamed)
        self._measure("describe", folder)
        return folder

    def check_hand_over(self, model: Path) -> dict[str, Any]:
        """Compare the loss of transformers with that of DeepSpeed, with the same weights and the same global batch."""
        step = self._options.resumed
        expected = read_points(self._root / "pretrain")[2][-1]
        if expected.step != step + 1:
            raise RuntimeError(f"expected the loss of step {step + 1}, found that of step {expected.step}")
        found = float(self._measure("loss", model, step))
        return self._check(f"step {step + 1}, DeepSpeed and transformers", expected.loss, found)

    def fine_tune(self, model: Path) -> Stage:
        """Fine-tune with the Trainer on another text."""
        self.say(f"fine-tune: Hugging Face Trainer with DeepSpeed, {FINE_TUNED_ON}, {self._options.finetuned} steps")
        root = self._root / "finetune"
        root.mkdir()
        steps = str(self._options.finetuned)
        self._launch(
            root, FINE_TUNED_ON, [str(Path(__file__).with_name("finetune_rank.py")), str(model), steps]
        ).check()
        offset = read_points(self._root / "pretrain")[2][-1].samples
        points = [
            Point(attempt=3, step=item["step"], samples=offset + item["samples"], loss=item["loss"], time=0.0)
            for item in map(json.loads, (root / "losses.jsonl").read_text(encoding="utf-8").splitlines())
        ]
        return Stage(name=f"Hugging Face Trainer, {FINE_TUNED_ON}", points=tuple(points))

    def check_fine_tuned(self, tuned: Stage, model: Path) -> dict[str, Any]:
        """Compare the first loss of the Trainer with that of transformers alone, with the same weights and rows."""
        found = float(self._measure("first-loss", model))
        return self._check("first step of the fine-tuning, Trainer and transformers", tuned.points[0].loss, found)

    def evaluate(self, model: Path, name: str, samples: int) -> Evaluation:
        """Compute the loss on documentation that no stage trains on."""
        loss = float(self._measure("documentation", model))
        self.say(f"{name}: loss on Python's documentation {loss:.3f}")
        return Evaluation(name=name, samples=samples, loss=loss)

    def generate(self, model: Path) -> str:
        """Let the fine-tuned model write."""
        text = str(self._measure("generate", model))
        self.say(f"the fine-tuned model writes: {text!r}")
        return text

    def _check(self, name: str, expected: float, found: float) -> dict[str, Any]:
        relative = abs(found - expected) / abs(expected)
        self.say(f"{name}: losses {expected:.6f} and {found:.6f}, {relative:.1e} apart")
        return {"name": name, "expected": expected, "found": found, "relative": relative}

    def _train(self, attempt: int, topology: str, *arguments: str, **environment: str) -> Process:
        root = self._root / "pretrain"
        script = str(ROOT / "examples/gpt_deepspeed/train.py")
        return self._launch(root, topology, [script, *arguments], ETJ_ATTEMPT=str(attempt), **environment)

    def _launch(self, root: Path, topology: str, command: Sequence[str], **environment: str) -> Process:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        settings = {
            "ETJ_TOPOLOGY": topology,
            "ETJ_CHECKPOINT_ROOT": str(root),
            "PET_MASTER_PORT": port,
            "MASTER_PORT": port,
            **environment,
        }
        words = [*LAUNCH, "--nproc", str(Topology.parse(topology).world_size), *command]
        return Process(words, self._root / "processes.log", settings)

    def _reshard(self, source: Path, target: Path, *arguments: str) -> None:
        words = [sys.executable, "-c", "import sys; from reshard.cli.main import main; sys.exit(main())", "run"]
        Process([*words, str(source), str(target), *arguments], self._root / "processes.log", {}).check()

    def _measure(self, what: str, model: Path, step: int = 0) -> Any:
        """Run `measure` and return what it has found."""
        answer = self._root / "answer.json"
        words = [sys.executable, "-m", "demo.lifecycle.measure", what, str(model), str(step), str(answer)]
        Process(words, self._root / "processes.log", {}).check()
        return json.loads(answer.read_text(encoding="utf-8"))


class Process:
    """A process that writes into the log.

    Args:
        words: command.
        log: file for its output.
        settings: variables of its environment.
    """

    def __init__(self, words: Sequence[str], log: Path, settings: Mapping[str, str]) -> None:
        self._words, self._log = words, log
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu", **os.environ}
        environment = {**own, "PYTHONPATH": paths, **settings}
        with open(log, "ab") as stream:
            self._process = subprocess.Popen(words, env=environment, cwd=ROOT, stdout=stream, stderr=stream)

    def check(self) -> None:
        """Wait for its end.

        Raises:
            RuntimeError: it has failed.
        """
        if code := self._process.wait():
            raise RuntimeError(f"{' '.join(self._words)} ended with {code}: see {self._log}")


if __name__ == "__main__":
    sys.exit(main())

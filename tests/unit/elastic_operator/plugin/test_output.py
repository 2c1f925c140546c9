"""What pods, nodes and tenants wrote never commands the terminal of whoever runs `kubectl etj`."""

from __future__ import annotations

import ast
import contextlib
import copy
import json
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unicodedata import category

import pytest
import yaml

from elastic_operator.plugin.pages.text import escape, make_printable
from tests.randomness import some

PLUGIN = Path(__file__).parents[4] / "operator/elastic_operator/plugin"
RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "data/recorded_recovery.json").read_text())

ATTACK = "\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b1A\x90q\x9c\u202eevil\u2066\u2028\x7f\r\nJob:  forged\n"
"""Sets the clipboard, clears the screen, goes a line up, turns the text around, begins lines of its own."""

OBEYED = [chr(code) for code in range(0x110000) if category(chr(code)) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
JOINERS = "\u200c\u200d"


def poisoned(value: Any, keep: frozenset[str]) -> Any:
    """Return a copy in which every text ends with the attack, but for those that have to mean something."""
    if isinstance(value, dict):
        return {key: item if key in keep else poisoned(item, keep) for key, item in value.items()}
    if isinstance(value, list):
        return [poisoned(item, keep) for item in value]
    return value + ATTACK if isinstance(value, str) else value


MEANING = frozenset({
    "metadata", "involvedObject", "creationTimestamp", "lastTimestamp", "eventTime", "resource", "template", "batch",
    "parallelism", "checkpoint_path", "mode", "format", "claimName", "path", "onFailure", "labels", "startFrom", "kind",
    "strategy", "activationCheckpointing", "state", "apiVersion", "topology", "capacity", "allocatable", "requests",
    "limits", "resources", "containers", "spec",
})  # fmt: skip


FINISHED = {"complete": "drained"}
"""Stages that end a `watch`, and the recorded stages that they are made of."""


def job(stage: str) -> dict[str, Any]:
    """Return a recorded job whose whole status is poisoned, but for its times."""
    found = copy.deepcopy(RECORDED[FINISHED.get(stage, stage)]["job"])
    found["status"] = {
        key: value if key.endswith("Time") else poisoned(value, MEANING | times(value))
        for key, value in found["status"].items()
    }
    found["status"]["phase"] = "Complete" if stage in FINISHED else found["status"]["phase"].removesuffix(ATTACK)
    return found


def times(value: Any) -> frozenset[str]:
    """Return the names of all fields below that hold a time, which would not be read otherwise."""
    if isinstance(value, dict):
        here = {key for key in value if key.endswith(("Time", "Until", "until", "since"))}
        return frozenset(here).union(*map(times, value.values()))
    return frozenset().union(*map(times, value)) if isinstance(value, list) else frozenset()


@contextlib.contextmanager
def api(answers: Callable[[str], tuple[str, bytes]]) -> Iterator[str]:
    """Serve GET requests of the API over HTTP."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            kind, body = answers(self.path)
            self.send_response(404 if kind == "missing" else 200)
            self.send_header("Content-Type", "application/json" if kind != "text" else "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def answers(stage: str) -> Callable[[str], tuple[str, bytes]]:
    recorded, one = RECORDED[FINISHED.get(stage, stage)], job(stage)
    events = [
        {**item, "reason": item["reason"] + ATTACK, "message": item["message"] + ATTACK} for item in recorded["events"]
    ]
    nodes = copy.deepcopy(recorded["nodes"])
    for node in nodes:
        node["metadata"]["name"] += ATTACK
    log = f"step 1\t{ATTACK}step 2\r\ncafé \u05d0\n".encode()

    def answer(path: str) -> tuple[str, bytes]:
        match path.partition("?")[0].split("/")[1:]:
            case [*_, "pods", _, "log"]:
                return "text", log
            case [*_, "elastictrainingjobs", "gpt"]:
                return "object", json.dumps(one).encode()
            case [*_, "elastictrainingjobs", _]:
                details = {"name": "other", "kind": "elastictrainingjobs"}
                status = {
                    "kind": "Status",
                    "code": 404,
                    "message": f"no {ATTACK}",
                    "reason": "NotFound",
                    "details": details,
                }
                return "missing", json.dumps(status).encode()
            case [*_, plural]:
                items = {"elastictrainingjobs": [one], "events": events, "nodes": nodes, "pods": pods()}[plural]
                return "list", json.dumps({"metadata": {}, "items": items}).encode()
        raise AssertionError(path)

    def pods() -> list[dict[str, Any]]:
        # Another tenant's pod has the attack in every text that the API server does not check.
        found = copy.deepcopy(recorded["pods"])
        for pod in found:
            pod["status"] = {**pod.get("status", {}), "message": ATTACK, "reason": ATTACK}
        return found

    return answer


def config(tmp_path: Path, server: str) -> Path:
    """Write a kubeconfig."""
    document = {
        "clusters": [{"name": "one", "cluster": {"server": server}}],
        "users": [{"name": "one", "user": {"token": "token"}}],
        "contexts": [{"name": "one", "context": {"cluster": "one", "user": "one", "namespace": "demo"}}],
        "current-context": "one",
    }
    path = tmp_path / "config"
    path.write_text(yaml.safe_dump(document))
    return path


def run(tmp_path: Path, server: str, *arguments: str, encoding: str = "utf-8") -> tuple[int, str, str]:
    program = "import sys; from elastic_operator.plugin.main import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "--kubeconfig", str(config(tmp_path, server)), *arguments]
    environment = {"PYTHONPATH": ":".join(sys.path), "PYTHONIOENCODING": encoding, "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, check=False, env=environment, timeout=60)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def obeyed(text: str) -> set[str]:
    return {item for item in text if category(item) in ("Cc", "Cf", "Cs", "Zl", "Zp") and item not in "\n" + JOINERS}


VERBS = [
    (("list",), "drained"),
    (("list", "-A"), "drained"),
    (("top", "-A"), "drained"),
    (("status", "gpt"), "drained"),
    (("status", "gpt"), "resharding"),
    (("status", "gpt"), "growing"),
    (("why", "gpt"), "resharding"),
    (("watch", "gpt"), "complete"),
    (("report", "gpt"), "drained"),
    (("plan", "gpt", "--lose", "gpt-2"), "running"),
    (("plan", "gpt", "--gpus", "2"), "growing"),
    (("logs", "gpt"), "running"),
    (("drain", "gpt"), "resharding"),
    (("resume", "gpt"), "running"),
    (("retry", "gpt"), "running"),
    (("status", "absent"), "running"),
]


@pytest.mark.parametrize(
    ("arguments", "stage"),
    some(VERBS, every=2),
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else value,
)
def test_no_verb_prints_what_a_terminal_obeys(arguments, stage, tmp_path):
    with api(answers(stage)) as server:
        _, out, err = run(tmp_path, server, *arguments)
    assert obeyed(out) <= {"\t"}
    assert obeyed(err) == set()
    assert "Traceback" not in err
    forged = [line for line in (out + err).splitlines() if line.startswith("Job:  forged")]
    assert not forged or arguments[0] == "logs"


def test_the_attack_is_shown_and_what_is_readable_stays_readable(tmp_path):
    with api(answers("drained")) as server:
        code, out, _ = run(tmp_path, server, "status", "gpt")
        assert code == 0
        assert "\\x1b]52;c;ZXZpbA==\\x07\\x1b[2J\\x9b1A\\x90q\\x9c\\u202eevil\\u2066\\u2028\\x7f" in out
        assert out.startswith("Job:      demo/gpt, created ")
        code, out, _ = run(tmp_path, server, "logs", "gpt")
    assert code == 0
    assert out.splitlines()[-1] == "café \u05d0"
    assert out.startswith("step 1\t\\x1b]52")


def test_a_log_is_printed_as_it_is_where_that_is_asked_for(tmp_path):
    with api(answers("running")) as server:
        _, out, _ = run(tmp_path, server, "logs", "gpt", "--raw")
        _, value, _ = run(tmp_path, server, "logs", "gpt", "-o", "json")
    assert "\x1b]52;c;ZXZpbA==\x07" in out
    assert obeyed(value) == set()
    assert "\x1b]52;c;ZXZpbA==\x07" in json.loads(value)["lines"][0]


@pytest.mark.parametrize("verb", [["status", "gpt"], ["list"]])
def test_json_holds_every_text_unchanged_and_no_control_character(verb, tmp_path):
    with api(answers("drained")) as server:
        code, out, _ = run(tmp_path, server, *verb, "-o", "json")
    assert code == 0
    assert obeyed(out) == set()
    value = json.loads(out)
    first = value["items"][0] if "items" in value else value
    assert first["reason"].endswith(ATTACK)


SGR = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize("verb", [["status", "gpt"], ["list"]])
def test_colours_are_the_only_thing_that_a_terminal_obeys_and_change_no_text(verb, tmp_path):
    with api(answers("drained")) as server:
        _, plain, _ = run(tmp_path, server, *verb, "--color", "never")
        _, coloured, _ = run(tmp_path, server, *verb, "--color", "always")
    assert SGR.sub("", coloured) == plain
    assert SGR.search(coloured)


def test_a_watch_prints_nothing_but_its_lines_of_json(tmp_path):
    with api(answers("complete")) as server:
        code, out, err = run(tmp_path, server, "watch", "gpt", "-o", "json")
    assert (code, err) == (0, "")
    assert json.loads(out)["phase"] == "Complete"
    assert obeyed(out) == set()


def test_the_screen_of_a_watch_obeys_no_text_of_the_cluster(tmp_path):
    with api(answers("complete")) as server:
        text = run_on_terminal(tmp_path, server, "watch", "gpt")
    assert "demo/gpt" in text
    assert "\\x1b]52" in text
    assert obeyed(re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)) <= {"\r"}


def run_on_terminal(tmp_path: Path, server: str, *arguments: str) -> str:
    """Run a command on a terminal of 100 columns; return what it wrote."""
    ours, theirs = pty.openpty()
    with open(ours, "rb", buffering=0) as reader:
        program = "import sys; from elastic_operator.plugin.main import main; sys.exit(main())"
        command = [sys.executable, "-c", program, "--kubeconfig", str(config(tmp_path, server)), *arguments]
        environment = {"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin", "TERM": "xterm", "COLUMNS": "100",
                       "LINES": "40", "PYTHONIOENCODING": "utf-8"}  # fmt: skip
        with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
            os.close(theirs)
            written = b""
            with contextlib.suppress(OSError):  # the end of a terminal is an error on Linux
                while chunk := reader.read(65536):
                    written += chunk
            assert process.wait(timeout=60) == 0, written.decode()
    return written.decode()


def test_yaml_says_the_same_as_json_and_no_text_begins_a_line(tmp_path):
    with api(answers("drained")) as server:
        _, text, _ = run(tmp_path, server, "status", "gpt", "-o", "yaml")
        _, value, _ = run(tmp_path, server, "status", "gpt", "-o", "json")
    assert yaml.safe_load(text) == json.loads(value)
    assert text.isascii()
    assert obeyed(text) == set()
    assert not [line for line in text.splitlines() if line.lstrip().startswith("Job:")]


def test_a_terminal_that_cannot_show_a_letter_gets_its_escape(tmp_path):
    with api(answers("running")) as server:
        code, out, _ = run(tmp_path, server, "logs", "gpt", encoding="ascii")
    assert code == 0
    assert out.splitlines()[-1] == "caf\\xe9 \\u05d0"


@pytest.mark.parametrize(
    "character", ["\x00", "\x1b", "\x7f", "\x85", "\x9b", "\xad", "\u061c", "\u200e", "\u2028", "\ud800"]
)
def test_a_control_character_is_written_as_its_number(character):
    shown = escape(f"a{character}b")
    assert shown == f"a{character.encode('unicode_escape').decode()}b"
    assert shown.encode("utf-8")


def test_everything_that_a_terminal_obeys_or_hides_is_escaped_and_no_letter_is():
    assert [item for item in OBEYED if escape(item) == item] == list(JOINERS)
    letters = "".join(chr(code) for code in range(0x20, 0x30000) if category(chr(code))[0] in "LMNPS")
    assert escape(letters + " \xa0" + JOINERS) == letters + " \xa0" + JOINERS


def test_escaping_twice_is_escaping_once():
    assert escape(escape(ATTACK)) == escape(ATTACK)


def test_text_anywhere_in_data_becomes_one_line():
    value = {"a\n": [ATTACK, ("x\ty",)], "n": 1}
    shown = make_printable(value)
    assert shown["n"] == 1
    assert shown["a "][1] == ("x y",)
    assert obeyed(json.dumps(shown, ensure_ascii=False)) == set()


@pytest.mark.parametrize("path", sorted(PLUGIN.glob("*.py")), ids=lambda path: path.stem)
def test_only_one_module_prints(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute)}
    writing = names & {"print", "sys.stdout.write", "sys.stderr.write", "sys.stdout.buffer", "os.write"}
    assert not writing or path.stem == "output"

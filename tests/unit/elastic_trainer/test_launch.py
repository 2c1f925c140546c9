"""The launcher with real, small processes."""

import os
import signal
import subprocess
import sys

import pytest

from elastic_trainer.launch import obstacle_to_forks, rank_environments


def test_ranks_are_numbered_over_all_nodes():
    env = {"PET_NNODES": "3", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "gpt-a1-0.gpt-a1", "PET_MASTER_PORT": "29501"}
    found = rank_environments(env, num_local=2)
    assert [(item["RANK"], item["LOCAL_RANK"], item["WORLD_SIZE"]) for item in found] == [
        ("4", "0", "6"),
        ("5", "1", "6"),
    ]
    assert {(item["MASTER_ADDR"], item["MASTER_PORT"]) for item in found} == {("gpt-a1-0.gpt-a1", "29501")}


LAUNCHER = [sys.executable, "-m", "elastic_trainer.launch"]
PRELOADED = "--preload=shared"
"""Loads the module beside the script, and forks the ranks."""


def launch(tmp_path, code, *options, num_local=2, shared="", stderr=None):
    (tmp_path / "shared.py").write_text(shared)
    script = tmp_path / "script.py"
    script.write_text("import os, sys, time\nrank = int(os.environ['RANK'])\n" + code)
    command = [*LAUNCHER, "--nproc", str(num_local), *options, str(script)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env={**os.environ})


def output(tmp_path, code, *options, **settings):
    """Run to the end; return the lines of standard output and error, sorted."""
    process = launch(tmp_path, code, *options, stderr=subprocess.STDOUT, **settings)
    found, _ = process.communicate(timeout=60)
    return process.returncode, sorted(found.splitlines())


both_ways = pytest.mark.parametrize("options", [(), (PRELOADED,)], ids=["started", "forked"])


@both_ways
@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("pass", 0),
        ("sys.exit(75)", 75),  # drained: all ranks end alike
        ("time.sleep(0.2 * rank); sys.exit(76)", 76),
        ("sys.exit(3) if rank == 1 else time.sleep(3600)", 3),  # the first failure ends the others
        ("os.kill(os.getpid(), 9) if rank == 0 else time.sleep(3600)", 128 + signal.SIGKILL),
    ],
)
def test_the_exit_code_is_the_first_failures(tmp_path, code, exit_code, options):
    process = launch(tmp_path, code, *options)
    process.communicate(timeout=60)
    assert process.returncode == exit_code


@both_ways
def test_sigterm_reaches_every_rank(tmp_path, options):
    process = launch(tmp_path, "os.write(1, b'up\\n'); time.sleep(3600)", *options)
    assert [process.stdout.readline(), process.stdout.readline()] == ["up\n", "up\n"]
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)  # returns only when nobody holds the pipe any more
    assert process.returncode == 128 + signal.SIGTERM


def test_a_preloaded_module_is_imported_once_and_its_ranks_are_as_if_started(tmp_path):
    code = """
import multiprocessing, shared

def double(number):
    return 2 * number

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        doubled = pool.map(double, [rank])
    same = [__file__ == sys.argv[0], sys.path[0] == os.path.dirname(__file__), shared.pid == os.getppid()]
    os.write(1, f"{rank} {os.environ['LOCAL_RANK']} {sys.argv[1:]} {same} {doubled}\\n".encode())
"""
    shared = "import os\npid = os.getpid()\nif 'RANK' not in os.environ: print('imported')"
    process = launch(tmp_path, code, PRELOADED, num_local=3, shared=shared)
    found, _ = process.communicate(timeout=60)
    expected = [f"{rank} {rank} [] [True, True, True] [{2 * rank}]" for rank in range(3)]
    assert (process.returncode, sorted(found.splitlines())) == (0, [*expected, "imported"])


def test_forked_ranks_draw_different_random_numbers(tmp_path):
    code = "import random, numpy\nos.write(1, f'{random.random()}\\n{numpy.random.rand()}\\n'.encode())"
    exit_code, lines = output(tmp_path, code, "--preload=numpy", "--preload=random")
    assert (exit_code, len(set(lines))) == (0, 4), lines


@pytest.mark.parametrize(
    ("num_started", "open_files", "obstacle"),
    [
        (0, ["/dev/null", "/usr/lib/libcuda.so", "pipe:[7]"], ""),
        (2, [], "the import started 2 thread(s)"),
        (0, ["/dev/nvidiactl"], "the import opened /dev/nvidiactl"),
        (0, ["/dev/kfd", "/dev/dri/renderD128"], "the import opened /dev/dri/renderD128"),
    ],
)
def test_no_rank_is_forked_beside_threads_or_open_devices(num_started, open_files, obstacle):
    assert obstacle_to_forks(num_started=num_started, open_files=open_files) == obstacle


def test_ranks_are_started_if_a_preloaded_module_has_started_a_thread(tmp_path):
    shared = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    exit_code, lines = output(tmp_path, "os.write(1, b'rank %d\\n' % rank)", PRELOADED, shared=shared)
    note = "elastic_trainer.launch: every rank imports shared itself: the import started 1 thread(s)"
    assert (exit_code, lines) == (0, [note, "rank 0", "rank 1"])


def test_a_module_that_cannot_be_preloaded_is_named(tmp_path):
    exit_code, lines = output(tmp_path, "print('rank', rank)", "--preload=shard")
    assert exit_code == 1
    expected = f"No module named 'shard': expected modules that {tmp_path}/script.py can import"
    assert lines == [f"elastic_trainer.launch: --preload: {expected}"]


def test_sigterm_during_the_import_starts_no_rank(tmp_path):
    shared = "import os, time; os.write(1, b'importing\\n'); time.sleep(1)"
    process = launch(tmp_path, "os.write(1, b'rank\\n')", PRELOADED, shared=shared)
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGTERM)
    found, _ = process.communicate(timeout=60)
    assert (process.returncode, found) == (128 + signal.SIGTERM, "")


@both_ways
def test_a_script_sees_its_absolute_path_however_it_was_named(tmp_path, options):
    code = "os.chdir('/'); print(__file__, os.path.exists(__file__), sys.argv, sys.modules['__main__'].__file__)"
    launch(tmp_path, code).communicate(timeout=60)
    command = [*LAUNCHER, *options, "script.py", "an argument"]
    found = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=60).stdout
    path = tmp_path / "script.py"
    assert found == f"{path} True ['script.py', 'an argument'] {path}\n"


@both_ways
def test_threads_and_exit_handlers_of_a_script_find_its_classes(tmp_path, options):
    code = """
import atexit, pickle, threading

class State:
    pass

def save(when):
    time.sleep(0.2)
    print(when, type(pickle.loads(pickle.dumps(State()))).__name__, flush=True)

threading.Thread(target=save, args=["late"]).start()
atexit.register(save, "exit")
"""
    assert output(tmp_path, code, *options, num_local=1) == (0, ["exit State", "late State"])


@both_ways
def test_exit_codes_are_seen_if_the_parent_ignored_the_end_of_its_children(tmp_path, options):
    launch(tmp_path, "sys.exit(3)", num_local=1).communicate(timeout=60)
    command = [*LAUNCHER, *options, str(tmp_path / "script.py")]
    ignore = (
        f"import os, signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv({sys.executable!r}, {command!r})"
    )
    process = subprocess.Popen([sys.executable, "-c", ignore])
    try:
        assert process.wait(timeout=60) == 3
    finally:
        process.kill()


@both_ways
def test_sigterm_reaches_every_rank_if_a_module_ignores_it_when_it_is_imported(tmp_path, options):
    shared = "import os, signal\nif 'RANK' not in os.environ:\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    code = "print('up', flush=True); time.sleep(3600)"
    process = launch(tmp_path, code, *options, num_local=1, shared=shared)
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM


@both_ways
def test_a_script_that_is_not_there_ends_as_python_ends(tmp_path, options):
    (tmp_path / "shared.py").write_text("")
    command = [*LAUNCHER, *options, str(tmp_path / "none.py")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"can't open file '{tmp_path / 'none.py'}'" in done.stderr


@both_ways
def test_ranks_run_without_standard_output(tmp_path, options):
    launch(tmp_path, "(open(f'{__file__}.{rank}', 'w')).close()").communicate(timeout=60)
    command = [*LAUNCHER, *options, str(tmp_path / "script.py")]
    (tmp_path / "script.py.0").unlink()
    subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *command], check=True, timeout=60)
    assert (tmp_path / "script.py.0").exists()

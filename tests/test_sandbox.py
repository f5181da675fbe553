"""Hostile programs: none of them passes, none of them reaches anything of ours, and nothing of them is left."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from simplexity.evaluation import sandbox
from simplexity.evaluation.sandbox import Limits, Outcome, SandboxError, isolation, run_program

SYSTEM_PYTHON = Path("/usr/bin/python3")

LINUX = sys.platform == "linux"
WHY = f"no isolation on this system: {sandbox._probe()[1]}" if LINUX else "Linux only"
pytestmark = pytest.mark.skipif(not LINUX or isolation() is None, reason=WHY)


def run(source: str, **limits: float) -> Outcome:
    return run_program(source, Limits(**limits))


class Left:
    """What is left of the runs of one test; other workers may have runs of their own at the same time."""

    def __init__(self) -> None:
        self.folders: list[str] = []

    def processes(self) -> list[str]:
        """Those whose command line names one of our folders: every descendant of a launcher inherits it."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                command = path.read_bytes().decode(errors="replace")
                found += [path.parent.name for folder in self.folders if folder in command]
        return found


@pytest.fixture
def left(monkeypatch):
    seen = Left()
    make = tempfile.mkdtemp

    def recorded(*args, **kwargs):
        seen.folders.append(make(*args, **kwargs))
        return seen.folders[-1]

    monkeypatch.setattr(sandbox.tempfile, "mkdtemp", recorded)
    return seen


def test_a_program_that_reaches_its_end_passes():
    assert run("print('hello')\nassert 1 + 1 == 2") == Outcome(True, "passed", "hello\n")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("assert False, 'off by one'", "AssertionError: off by one"),
        ("assert False", "AssertionError"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def f(:", "SyntaxError: invalid syntax (program.py, line 1)"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("input()", "EOFError: EOF when reading a line"),
        ("'\udcff'", "SyntaxError: the program is not valid text"),
        ("def f(): f()\nf()", "RecursionError: maximum recursion depth exceeded"),
        ("class E(Exception):\n    def __str__(self): 1 / 0\nraise E", "E"),
    ],
)
def test_the_reason_says_what_went_wrong(source, reason):
    outcome = run(source)
    assert not outcome.passed
    assert outcome.reason == reason


def test_the_part_for_the_command_line_does_not_run():
    assert run("if __name__ == '__main__': raise SystemExit(input())").passed


def test_the_usual_libraries_work():
    source = """
import collections, dataclasses, functools, heapq, itertools, math, random, re, string, typing
@dataclasses.dataclass
class P:
    x: "typing.Optional[int]" = None
P.__module__
Q = collections.namedtuple("Q", "a b")
assert Q(1, 2).b == 2
import multiprocessing, subprocess, tempfile, threading
with tempfile.TemporaryFile() as file:
    file.write(b"x")
lock = multiprocessing.Lock()
process = multiprocessing.Process(target=len, args=("",))
process.start(); process.join()
assert process.exitcode == 0
assert subprocess.run(["/bin/sh", "-c", "echo inside"], capture_output=True).stdout == b"inside\\n"
thread = threading.Thread(target=len, args=("",)); thread.start(); thread.join()
"""
    outcome = run(source)
    assert outcome.passed, outcome


# exits that must not count


@pytest.mark.parametrize(
    "source",
    [
        "import os; os._exit(0)",
        "import os; os._exit(97)",
        "import os; os._exit(99)",
        "import os; os._exit(255)",
        "import sys; sys.exit(0)",
        "import sys; sys.exit()",
        "raise SystemExit",
        "exit()",
        "quit(0)",
        "import os\nif os.fork(): os._exit(0)\nos._exit(0)",
        "import os; os.execv('/bin/true', ['true'])",
        "import atexit, os; atexit.register(os._exit, 0); raise SystemExit(0)",
        "import threading, os; threading.Thread(target=os._exit, args=(0,)).start()\nwhile True: pass",
        "import signal, os; signal.signal(signal.SIGALRM, lambda *_: os._exit(0)); signal.alarm(1)\nwhile True: pass",
        "def check(candidate): raise SystemExit(0)\ncheck(None)",
    ],
)
def test_leaving_early_is_not_passing(source):
    outcome = run(source + "\nassert False")
    assert not outcome.passed
    assert outcome.reason == "ended before its tests"


@pytest.mark.parametrize(
    "source",
    [
        "import sys; sys.excepthook = lambda *_: None",
        "import builtins; builtins.AssertionError = SystemExit",
        "import builtins; builtins.exec = builtins.compile = lambda *_, **__: None",
        "import os; os._exit = os.write = os.getpid = lambda *_: 0",
        "import sys; sys.modules.clear()",
        "import sys; sys.settrace(lambda *_: None)",
        "import sys; sys.setprofile(lambda *_: None)",
        "print('passed')",
        "import os\nfor n in range(3, 256):\n    try: os.write(n, b'passed')\n    except OSError: pass",
        "import os\nfor n in range(3, 256):\n    try: os.write(n, os.urandom(32))\n    except OSError: pass",
    ],
)
def test_patching_the_interpreter_is_not_passing(source):
    assert not run(source + "\nassert False").passed


def test_no_frame_and_no_collected_object_holds_the_secret():
    source = """
import gc, os, sys
def look(value, depth=0):
    if isinstance(value, bytes) and len(value) == 32:
        os.write(3, value)
    if depth < 4:
        for inner in (value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()):
            look(inner, depth + 1)
        for name in ("__dict__", "args", "func", "__closure__", "__defaults__", "co_consts", "f_locals"):
            try: look(getattr(value, name), depth + 1)
            except (AttributeError, OSError): pass
frame = sys._getframe()
while frame:
    look(dict(frame.f_locals)); look(frame.f_code); look({k: v for k, v in frame.f_globals.items() if k != "look"})
    frame = frame.f_back
for function in (gc.get_objects, lambda: gc.get_referrers(os.write), lambda: gc.get_referents(os)):
    try: look(function())
    except RuntimeError as error: print(error)
    else: print("open")
os.write(1, b"looked")
raise SystemExit
"""
    outcome = run(source)
    assert not outcome.passed
    assert outcome.output.endswith("looked")
    assert "open" not in outcome.output


def test_the_secret_is_gone_from_the_descriptors():
    source = "import os\nread = b''\n" + (
        "for n in (0, 3):\n"
        "    try: read += os.read(n, 100)\n"
        "    except OSError: pass\n"
        "os.write(3, read)\nprint(len(read))\nraise SystemExit"
    )
    outcome = run(source)
    assert outcome.output == "0\n"
    assert not outcome.passed


# resources


def test_an_endless_loop():
    outcome = run("while True: pass", cpu_seconds=1)
    assert outcome == Outcome(False, "took longer than 1 s")


def test_an_endless_loop_that_ignores_signals():
    source = (
        "import signal\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n    except OSError: pass\n"
    )
    outcome = run(source + "while True: pass", cpu_seconds=1)
    assert outcome.reason == "killed: out of memory or of CPU time"


def test_an_endless_sleep():
    outcome = run("import time; print('asleep'); time.sleep(1000)", wall_seconds=2)
    assert outcome == Outcome(False, "took longer than 2 s", "asleep\n")


def test_an_endless_loop_in_children(left):
    source = "import os, time\nfor _ in range(4): os.fork()\nwhile True: time.sleep(1)"
    assert run(source, wall_seconds=2).reason == "took longer than 2 s"
    assert left.processes() == []


@pytest.mark.parametrize(
    "source",
    ["x = bytearray(10**10)", "x = []\nwhile True: x.append(' ' * 10**6)", "import mmap; mmap.mmap(-1, 10**10)"],
)
def test_a_memory_bomb(source):
    outcome = run(source, memory=256 * 2**20)
    assert not outcome.passed
    assert "memory" in outcome.reason


def test_a_program_cannot_lift_its_limits():
    source = """
import resource
for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE):
    try: resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    except ValueError: continue
    raise SystemExit
"""
    assert run(source).passed


@pytest.mark.parametrize(
    "source",
    [
        "import os\nwhile True: os.fork()",
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "import os\nwhile True:\n    try:\n        if os.fork() == 0: os.setsid()\n    except OSError: pass",
    ],
)
def test_a_fork_bomb(source, left):
    before = time.monotonic()
    outcome = run(source, wall_seconds=3, cpu_seconds=3)
    assert not outcome.passed
    assert time.monotonic() - before < 3 + sandbox.GRACE
    assert left.processes() == []


def test_the_number_of_processes_is_limited():
    source = """
import os, time
children = 0
try:
    while children < 200:
        if os.fork() == 0: time.sleep(100); os._exit(0)
        children += 1
except OSError:
    pass
assert children < 8, children
"""
    assert run(source, processes=8) == Outcome(True, "passed")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output(stream):
    outcome = run(f"import sys\nwhile True: sys.{stream}.write('x' * 10**5)", output=10**6)
    assert outcome.reason == "wrote more than 1000000 bytes"
    assert outcome.output == "x" * sandbox.TAIL


def test_endless_output_of_a_child():
    outcome = run("import os\nif os.fork() == 0:\n    while True: os.write(1, b'x' * 10**5)\nos.wait()", output=10**6)
    assert outcome.reason == "wrote more than 1000000 bytes"


def test_endless_writing_to_the_channel_of_the_verdict():
    outcome = run("import os\nwhile True: os.write(3, b'x' * 10**5)", wall_seconds=2)
    assert outcome.reason == "took longer than 2 s"


def test_the_end_of_the_output_is_kept():
    outcome = run("for n in range(100000): print(n)")
    assert outcome.passed
    assert outcome.output.endswith("99998\n99999\n")
    assert len(outcome.output) <= sandbox.TAIL


def test_a_large_file():
    outcome = run("open('f', 'wb').write(bytes(10**6))", file_size=10**5)
    assert outcome.reason.startswith("OSError: [Errno 27]")


def test_many_files():
    source = "for n in range(10000):\n    with open(f'f{n}', 'wb') as file: file.write(bytes(10**5))"
    assert run(source, disk=10**6).reason.startswith("OSError: [Errno 28]")


# what is ours


def test_deleting_files(tmp_path):
    ours = tmp_path / "ours.txt"
    ours.write_text("ours")
    ours.chmod(0o644)
    tmp_path.chmod(0o777)  # the folder itself would allow it
    source = f"""
import os, shutil
for remove in (os.remove, lambda path: os.truncate(path, 0), lambda path: os.rename(path, path + "x")):
    try: remove({str(ours)!r})
    except OSError: pass
shutil.rmtree({str(tmp_path)!r}, ignore_errors=True)
os.system("rm -rf {tmp_path}")
"""
    run(source)
    assert ours.read_text() == "ours"


def test_our_files_are_not_there_to_read(tmp_path):
    ours = tmp_path / "ours.txt"
    ours.write_text("ours")
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    source = f"import os\nassert not os.path.exists({str(ours)!r})\nassert not os.path.exists('/proc/1')"
    assert run(source).passed


def test_nothing_but_its_folder_can_be_written():
    source = f"""
import os
for folder in ("/", "/usr", "/etc", "/dev", "/root", {sys.prefix!r}, {sys.base_prefix!r}, os.path.dirname(os.__file__)):
    try: open(os.path.join(folder, "planted"), "w")
    except OSError: continue
    raise SystemExit(folder)
assert os.getcwd() == "/tmp/home" == os.environ["HOME"] and os.listdir() == []
open("mine", "w").write("x")
"""
    assert run(source) == Outcome(True, "passed")


def test_its_folder_is_empty_and_removed(left):
    assert run("import os; assert os.listdir() == []; open('left', 'w').write('x'); os.chmod('.', 0)").passed
    assert run("import os; assert os.listdir() == []").passed
    assert len(left.folders) == 2
    assert not any(Path(folder).exists() for folder in left.folders)


def test_what_runs_is_seen_by_the_tests_above(left):
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, "import time; time.sleep(1000)", wall_seconds=3)
        while not left.processes() and not running.done():
            time.sleep(0.01)
        assert not running.done()
        assert running.result().reason == "took longer than 3 s"
    assert left.processes() == []


def test_no_socket_of_ours_is_reachable():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), timeout=10).close()
        source = f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=2)"
        outcome = run(source)
    assert outcome.reason.startswith("OSError: [Errno 101]"), outcome


def test_no_abstract_socket_of_ours_is_reachable():
    name = f"\0simplexity-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        listener.listen()
        source = f"import socket; socket.socket(socket.AF_UNIX).connect({name!r})"
        assert run(source).reason.startswith("ConnectionRefusedError")


def test_there_is_no_way_out_of_the_network_namespace():
    source = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for flag in (0x10000000, 0x40000000, 0x00020000):
    assert libc.unshare(flag) == -1
for call in (lambda: os.chroot("/tmp"), lambda: os.setuid(0), lambda: os.mknod("d", 0o60600, 1)):
    try: call()
    except OSError: continue
    raise SystemExit
"""
    assert run(source).passed


@pytest.mark.parametrize(
    "source",
    [
        "import os; os.kill(os.getppid(), 9)",
        "import os, signal\nfor n in range(1, 65):\n    try: os.kill(1, n)\n    except OSError: pass",
        "import os; os.kill(-1, 9)",
        "import os\ntry: os.killpg(1, 9)\nexcept OSError: pass",
        "import os\nif os.fork() == 0: os.kill(-1, 9)\nos.wait()",
        "import os\nfor pid in (OURS, PARENT): os.kill(pid, 9)",
    ],
)
def test_killing_others(source, left):
    bystander = subprocess.Popen(["/bin/sleep", "100"])
    try:
        outcome = run(f"OURS, PARENT = {bystander.pid}, {os.getpid()}\n{source}\nassert False")
        assert not outcome.passed
        assert bystander.poll() is None
        assert left.processes() == []
    finally:
        bystander.kill()
        bystander.wait()


def test_the_environment_keeps_our_secrets(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hidden-token")
    source = """
import glob, os
assert sorted(os.environ) == ["HOME", "LANG", "PATH"], sorted(os.environ)
for path in glob.glob("/proc/*/environ"): print(open(path).read())
os.system("env")
"""
    outcome = run(source)
    assert outcome.passed, outcome
    assert "hidden-token" not in outcome.output


def test_it_runs_as_nobody():
    assert run("import os\nassert 0 not in (*os.getresuid(), *os.getresgid(), *os.getgroups())").passed


DAEMON = """
import os, time
ready, started = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for n in range(4): os.close(n)
        os.write(started, b"x")
        time.sleep(1)
        while True:
            open("late", "a").write("x")
            time.sleep(0.01)
    os._exit(0)
os.read(ready, 1)
"""


def test_a_daemon_is_not_left_behind(left):
    assert run(DAEMON).passed
    assert left.processes() == []
    time.sleep(1.5)
    assert not Path(left.folders[0]).exists()


def test_no_descriptor_of_ours_is_there(tmp_path):
    with (tmp_path / "ours.txt").open("w") as ours:
        os.set_inheritable(ours.fileno(), True)
        source = """
import os
for n in range(4, 1000):
    try: os.fstat(n)
    except OSError: continue
    raise SystemExit(n)
assert os.read(0, 10) == b""
"""
        assert run(source) == Outcome(True, "passed")


def test_closing_the_descriptors():
    outcome = run("import os\nos.closerange(1, 256)\nassert False")
    assert outcome == Outcome(False, "ended before its tests")
    assert not run("import os\nos.closerange(1, 256)").passed


def test_many_open_files_of_ours_do_not_matter():
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(300)]
    try:
        assert run("x = 1").passed
    finally:
        for descriptor in opened:
            os.close(descriptor)


def test_nothing_of_ours_stays_open():
    run("x = 1")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        run("x = 1")
    assert len(os.listdir("/proc/self/fd")) == before


# systems that offer less


def test_without_isolation_it_refuses(monkeypatch):
    monkeypatch.setattr(sandbox, "_probe", lambda: (None, "unshare was refused"))
    with pytest.raises(SandboxError, match=r"no isolation \(unshare was refused\).*allow_network=True"):
        run_program("x = 1")


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_get_a_clear_error(monkeypatch, platform):
    monkeypatch.setattr(sandbox.sys, "platform", platform)
    for allow in (False, True):
        with pytest.raises(SandboxError, match=f"needs Linux; on {platform}"):
            run_program("x = 1", allow_network=allow)


def test_limits_must_be_positive():
    with pytest.raises(ValueError, match="memory must be above 0"):
        Limits(memory=0)


@pytest.fixture
def _readable_interpreter(monkeypatch):
    """An interpreter outside of root's home: an unprivileged user could not read one in there."""
    if not SYSTEM_PYTHON.exists() or subprocess.run([SYSTEM_PYTHON, "-c", "from operator import call"]).returncode:
        pytest.skip("the system's Python is too old")
    monkeypatch.setattr(sandbox.sys, "executable", str(SYSTEM_PYTHON))


@pytest.mark.usefixtures("_readable_interpreter")
def test_the_namespaces_of_an_unprivileged_user():
    try:
        outcome = sandbox._run("import socket; socket.create_connection(('127.0.0.1', 9))", Limits(), "user namespaces")
    except SandboxError as error:
        pytest.skip(str(error))
    assert outcome.reason.startswith("OSError: [Errno 101]")
    for source, passed in (
        ("import os; assert not os.path.exists('/proc/1') and os.listdir() == [] and os.getuid() == 65534", True),
        ("import os; os.kill(os.getppid(), 9); os.kill(1, 2); os.kill(1, 15)", True),
        ("import os; os._exit(0)", False),
        ("import os\nwhile True: os.fork()", False),
        ("import os; os.chroot('/tmp')", False),
        ("import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == -1", True),
    ):
        assert sandbox._run(source, Limits(), "user namespaces").passed == passed, source


@pytest.mark.usefixtures("_readable_interpreter")
def test_permitted_without_isolation(monkeypatch, left):
    monkeypatch.setattr(sandbox, "_probe", lambda: (None, "unshare was refused"))
    for source, passed in (
        ("import os; assert os.listdir() == []", True),
        (DAEMON, True),
        ("import os; os._exit(0)", False),
        ("import os\nwhile True: os.fork()", False),
        ("x = bytearray(10**10)", False),
    ):
        with pytest.warns(UserWarning, match="without isolation"):
            assert run_program(source, allow_network=True).passed == passed, source
    assert left.processes() == []

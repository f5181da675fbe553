"""Runs a Python program that a language model wrote, in a process that can reach nothing of ours.

Such a program may do anything: loop for ever, fork, delete files, open sockets, or exit with status 0 before its tests
ran. Linux namespaces take away the network, the file system and the other processes; a secret that is written only when
the last statement has run carries the verdict, so that no exit status and no printed text can stand in for it.

What runs in one interpreter with its own tests can still deceive those tests (an object that equals everything), and
native code could search the interpreter's memory for the secret. The sandbox keeps the machine safe from the program;
it does not make weak tests strong.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import py_compile
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

from simplexity.evaluation import jail
from simplexity.evaluation.jail import STOPPED, TIMED_OUT
from simplexity.evaluation.limits import Isolation, Limits

TAIL = 4096  # bytes of output that an outcome keeps

GRACE = 20.0  # seconds after the wall time until the launcher itself counts as stuck


class SandboxError(RuntimeError):
    """The program could not be run safely on this system; says nothing about the program."""


@dataclass(frozen=True)
class Outcome:
    """How a program ended: `passed` where its last statement ran, otherwise `reason` says what stopped it."""

    passed: bool
    reason: str
    output: str = ""  # the end of what it printed


def run_program(source: str, limits: Limits = Limits(), *, allow_network: bool = False) -> Outcome:  # noqa: B008
    """Run a program in a process of its own; it passed where it ran to the end of its last statement.

    Its `__name__` is not `"__main__"`, so a part meant for the command line does not run. `allow_network` permits to go
    on where the system offers no isolation; where it does, the program has no network all the same.
    """
    found = require_isolation(allow_network)
    if found is None:
        warnings.warn("the program runs without isolation: it has the network and its user's files", stacklevel=2)
    return _run(source, limits, found)


def require_isolation(allow_network: bool = False) -> Isolation | None:
    """What `isolation` finds; a `SandboxError` where that is nothing, unless `allow_network` permits it."""
    found = isolation()
    if found is None and not allow_network:
        raise SandboxError(
            f"this system offers no isolation ({_probe()[1]}), so a program could reach the network and the files of "
            "its user; allow_network=True runs it anyway"
        )
    return found


def isolation() -> Isolation | None:
    """What this system allows: namespaces made as root, those of an unprivileged user, or None.

    Any other system than Linux has no sandbox at all, and gets a `SandboxError`.
    """
    if sys.platform != "linux":
        raise SandboxError(f"running a model's programs needs Linux; on {sys.platform} there is no sandbox")
    return _probe()[0]


@functools.cache
def _probe() -> tuple[Isolation | None, str]:
    complaints = []
    modes: tuple[Isolation, ...] = ("namespaces", "user namespaces")
    for mode in modes:
        try:
            outcome = _run("import socket", Limits(), mode)
        except SandboxError as error:
            complaints.append(f"{mode}: {error}")
            continue
        if outcome.passed:
            return mode, ""
        complaints.append(f"{mode}: {outcome.reason}")
    return None, "; ".join(complaints)


def _run(source: str, limits: Limits, mode: Isolation | None) -> Outcome:
    try:
        job = json.dumps({"source": source, "limits": asdict(limits), "mode": mode}).encode()
        source.encode()
    except UnicodeEncodeError:
        return Outcome(False, "SyntaxError: the program is not valid text")
    folder = tempfile.mkdtemp(prefix="simplexity-sandbox-")
    secret = secrets.token_bytes(jail.SECRET)
    try:
        status, verdict, output = _talk(job, secret, folder, limits)
    finally:
        with contextlib.suppress(RecursionError):
            shutil.rmtree(folder, ignore_errors=True)
    text = output.decode(errors="replace")
    if secret in verdict:
        return Outcome(True, "passed", text)
    return Outcome(False, _reason(status, verdict.decode(errors="replace"), limits, text), text)


def _reason(status: int, said: str, limits: Limits, output: str) -> str:
    if status == TIMED_OUT:
        return f"took longer than {limits.wall_seconds:g} s"
    if status == STOPPED:
        return f"wrote more than {limits.output} bytes"
    if status > 128 or status < 0:  # below 0 the launcher itself was killed
        number = status - 128 if status > 0 else -status
        if number == signal.SIGXCPU:
            return f"took longer than {limits.cpu_seconds} s"
        if number == signal.SIGKILL:
            return "killed: out of memory or of CPU time"
        return f"killed: {signal.strsignal(number) or number}"
    if status != 0:
        raise SandboxError(said.strip() or output.strip() or f"the launcher ended with status {status}")
    return said or "ended before its tests"


def _talk(job: bytes, secret: bytes, folder: str, limits: Limits) -> tuple[int, bytes, bytes]:
    """The launcher's exit status, what came through the verdict's pipe, and the end of the output."""
    verdict, theirs = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", _launcher(), str(theirs), str(len(job)), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs],
            cwd="/",
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"},
            start_new_session=True,
            bufsize=0,
        )
    except BaseException:
        os.close(verdict)
        raise
    finally:
        os.close(theirs)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with process.stdin as stdin, contextlib.suppress(BrokenPipeError):
            _write_all(stdin.fileno(), job + secret)
        reader = _Reader(process, verdict, limits)
        return reader.read(time.monotonic() + limits.wall_seconds + GRACE)
    finally:
        process.kill()  # its namespace goes with it
        process.wait()
        process.stdout.close()
        os.close(verdict)


@functools.cache
def _launcher() -> str:
    """The launcher's file, compiled: that takes as long as several programs run."""
    folder = tempfile.mkdtemp(prefix="simplexity-launcher-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return str(py_compile.compile(jail.__file__, str(Path(folder) / "jail.pyc"), doraise=True))


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


class _Reader:
    """Reads both pipes until the launcher has ended, and never keeps more than the limits allow."""

    def __init__(self, process: subprocess.Popen[bytes], verdict: int, limits: Limits) -> None:
        assert process.stdout is not None
        self.process, self.limits = process, limits
        self.output, self.verdict = process.stdout.fileno(), verdict
        self.tail, self.said = b"", b""
        self.written = 0
        self.stopped = False

    def read(self, deadline: float) -> tuple[int, bytes, bytes]:
        with selectors.DefaultSelector() as selector:
            for descriptor in (self.output, self.verdict):
                os.set_blocking(descriptor, False)
                selector.register(descriptor, selectors.EVENT_READ)
            while self.process.poll() is None:
                if time.monotonic() > deadline:
                    raise SandboxError("the sandbox did not end its program")
                self._once(selector, timeout=0.05)
            while self._once(selector, timeout=0) and time.monotonic() < deadline:  # what still lies in the pipes
                pass
        return STOPPED if self.stopped else self.process.returncode, self.said, self.tail

    def _once(self, selector: selectors.BaseSelector, timeout: float) -> bool:
        if not selector.get_map():
            time.sleep(min(timeout, 0.01))
            return False
        ready = [key.fd for key, _ in selector.select(timeout)]
        for descriptor in ready:
            data = os.read(descriptor, 1 << 16)
            if not data:
                selector.unregister(descriptor)
            elif descriptor == self.output:
                self._printed(data)
            else:
                self.said += data
                if len(self.said) > 1 << 16:  # a flood: whoever writes more has to wait
                    selector.unregister(descriptor)
        return bool(ready)

    def _printed(self, data: bytes) -> None:
        self.tail = (self.tail + data)[-TAIL:]
        self.written += len(data)
        if self.written > self.limits.output and not self.stopped:
            self.stopped = True
            self.process.terminate()  # the launcher takes it as an order to end the program

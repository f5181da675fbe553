"""Mathematical answers, graded by math-verify in processes of their own.

Processes, because sympy can take for ever over a number that a model makes up, and only a process can be stopped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Lock
from typing import Self

from simplexity.evaluation.graders import answers
from simplexity.evaluation.task import Grade, Question

START = 120.0  # seconds a worker may take to start: the disk may be cold and the machine busy
TRIES = 2  # a worker may be killed for no fault of its answer


class MathGrader:
    """Compares a text's answer with the reference, LaTeX or a plain number, as mathematics.

    Workers start with the first answers and stay until the `with` block ends. An answer that takes longer than
    `timeout` seconds is wrong, and its worker is replaced.
    """

    def __init__(self, workers: int | None = None, timeout: float = 5.0) -> None:
        if workers is not None and workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        if not timeout > 0:
            raise ValueError(f"timeout must be positive, got {timeout}")
        self.workers = workers or min(len(os.sched_getaffinity(0)) if sys.platform == "linux" else 4, 16)
        self.timeout = timeout
        self._crew: list[_Worker] = []
        self._lock = Lock()
        self._failures = 0
        weakref.finalize(self, _end, self._crew)  # also at exit, for those who do without the block

    def __enter__(self) -> Self:
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("grading mathematics needs one more package: pip install 'simplexity[eval]'")
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:  # another thread may still be grading
            _end(self._crew)

    def grade(self, pairs: Sequence[tuple[Question, str]]) -> list[Grade]:
        """One grade for each (question, text), in their order; threads take turns."""
        with self._lock:
            try:
                return self._grade([(str(question.reference), text) for question, text in pairs])
            except BaseException:  # Ctrl-C included: a worker in the middle of an answer is of no more use
                _end(self._crew)
                raise

    def _grade(self, jobs: list[tuple[str, str]]) -> list[Grade]:
        grades: dict[int, Grade] = {}
        losses = [0] * len(jobs)
        waiting = deque(range(len(jobs)))
        while len(grades) < len(jobs):
            while len(self._crew) < min(self.workers, len(jobs) - len(grades)):
                self._crew.append(_Worker(self.timeout))
            for worker in [w for w in self._crew if w.ready and w.job is None]:
                if waiting and not worker.take(waiting[0], jobs[waiting[0]], self.timeout):
                    self._dismiss(worker)
                elif waiting:
                    waiting.popleft()
            for worker, message in self._heard():
                job = worker.job
                if message is None:
                    self._dismiss(worker)
                    if job is not None:
                        losses[job] += 1
                        if losses[job] < TRIES:
                            waiting.appendleft(job)
                        else:
                            grades[job] = Grade(False, None, "the process that graded it died")
                elif job is not None:
                    grades[job] = Grade(*json.loads(message))
                worker.hear(message)
            for worker in [w for w in self._crew if w.deadline <= time.monotonic()]:
                self._dismiss(worker)
                if worker.job is not None:
                    grades[worker.job] = Grade(False, None, f"took longer than {self.timeout:g} s")
        return [grades[i] for i in range(len(jobs))]

    def _heard(self) -> list[tuple[_Worker, bytes | None]]:
        """What the workers say until the next deadline; None from one that died."""
        by_pipe = {w.pipe: w for w in self._crew if w.deadline < float("inf")}
        patience = min((w.deadline for w in by_pipe.values()), default=0.0) - time.monotonic()
        heard = wait(list(by_pipe), max(patience, 0.0))
        return [(by_pipe[pipe], by_pipe[pipe].listen()) for pipe in heard if isinstance(pipe, Connection)]

    def _dismiss(self, worker: _Worker) -> None:
        self._crew.remove(worker)
        worker.end()
        self._failures = 0 if worker.ready else self._failures + 1
        if self._failures > 2 + self.workers:
            raise RuntimeError(f"the grading processes do not start; see {sys.executable} -P {answers.__file__} 0 1")


class _Worker:
    """A process that grades one answer at a time, and what it is doing.

    A fresh interpreter on one file: a forked one would inherit torch's threads and locks, and one that multiprocessing
    spawns would run the caller's script again and load torch.
    """

    def __init__(self, timeout: float) -> None:
        self.pipe, theirs = Pipe()
        self.ready = False
        self.job: int | None = None
        self.deadline = time.monotonic() + START
        command = [sys.executable, "-P", str(Path(answers.__file__)), str(theirs.fileno()), str(timeout)]
        # one hash seed, so that sympy writes an answer in the same way in every worker and every run
        environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            self.process = subprocess.Popen(
                command,
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the parent, which ends its workers itself
            )
        except BaseException:
            self.pipe.close()
            raise
        finally:
            theirs.close()

    def take(self, number: int, job: tuple[str, str], timeout: float) -> bool:
        """Begin an answer; False where the process is dead."""
        try:
            self.pipe.send_bytes(json.dumps(job).encode())
        except OSError:
            return False
        self.job, self.deadline = number, time.monotonic() + timeout
        return True

    def listen(self) -> bytes | None:
        """What the process says, None where it is dead."""
        try:
            return self.pipe.recv_bytes()
        except (EOFError, OSError):
            return None

    def hear(self, message: bytes | None) -> None:
        """Be free for the next answer."""
        if message is not None:
            self.ready, self.job, self.deadline = True, None, float("inf")

    def end(self) -> None:
        """Kill the process and wait for it."""
        self.process.kill()
        self.process.wait()
        self.pipe.close()


def _end(crew: list[_Worker]) -> None:
    while crew:
        crew.pop().end()

"""A run's folder: the plan, and one line for each finished sample, appended a batch at a time and never lost."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from simplexity.evaluation.arms import Arm
from simplexity.evaluation.plan import RunPlan, Work
from simplexity.files import whole_file


@dataclass(frozen=True)
class Record:
    """One sample."""

    decoder: str
    batch: int
    question: str
    sample: int
    seed: int  # of the sample, or of its whole group where it is coupled
    text: str
    tokens: int
    finish: str  # stop: the model ended the text; length: the limit did
    entropy: float  # of q, nats, mean over the text
    effective_temperature: float | None
    correct: bool
    answer: str | None
    reason: str
    seconds: float  # the batch's, divided by its rows
    coupled: int = 1  # the size of its group; 1: independent
    group: int | None = None  # which of the question's groups it belongs to

    @property
    def arm(self) -> Arm:
        """What drew it."""
        return Arm(self.decoder, self.coupled)


class Ledger:
    """The records of a run, open for appending; one process at a time."""

    def __init__(self, folder: Path, plan: RunPlan, questions: str, about: dict[str, Any]) -> None:
        self.folder, self.plan, self.questions, self.about = folder, plan, questions, about
        self.file = folder / "records.jsonl"
        self.records: list[Record] = []

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self.folder / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise ValueError(f"another run is writing in {self.folder}") from None
        try:
            self._begin()
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)
        self._lock.close()

    def _begin(self) -> None:
        path, packed = self.folder / "plan.json", self.folder / "records.jsonl.gz"
        if packed.exists():
            raise ValueError(f"{packed} holds records of a run: unpack them to go on there, or take another folder")
        if path.exists():
            found = json.loads(path.read_text())
            difference = self.plan.difference(found["plan"])
            if not difference and found["questions"] != self.questions:
                difference = ["the questions themselves are not the same"]
            if difference:
                raise ValueError(
                    f"{self.folder} holds a run with other settings; {'; '.join(difference)}. "
                    "Take another folder, or the same settings"
                )
        elif self.file.exists():
            raise ValueError(f"{self.folder} holds records without a plan: it is not one of our runs")
        else:
            with whole_file(path) as draft:
                content = {"plan": self.plan.to_json(), "questions": self.questions, "about": self.about}
                draft.write_text(json.dumps(content, indent=1) + "\n")
        self._drop_torn()
        self._descriptor = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self.records = read_lines(self.file)

    def _drop_torn(self) -> None:
        """Take back what a killed process left half written: the last line, and batches that are not whole."""
        if not self.file.exists():
            return
        lines = self.file.read_bytes().split(b"\n")[:-1]  # after the last newline nothing is whole
        found = [_parsed(line, number, self.file) for number, line in enumerate(lines, 1)]
        batches = [(values["decoder"], values.get("coupled", 1), values["batch"]) for values in found]
        rows = Counter(batches)
        whole = [
            line for line, values, batch in zip(lines, found, batches, strict=True) if rows[batch] == values["rows"]
        ]
        content = b"".join(line + b"\n" for line in whole)
        if content != self.file.read_bytes():
            with whole_file(self.file) as draft:
                draft.write_bytes(content)

    def done(self) -> set[tuple[Arm, int]]:
        """The (arm, batch) that need no more work."""
        return {(record.arm, record.batch) for record in self.records}

    def append(self, work: Work, records: Sequence[Record]) -> None:
        """Write a batch; when this returns, it is on disk."""
        lines = [json.dumps(asdict(record) | {"rows": len(records)}) + "\n" for record in records]
        data = "".join(lines).encode()
        while data:
            data = data[os.write(self._descriptor, data) :]
        os.fsync(self._descriptor)
        self.records.extend(records)


def read_run(folder: Path) -> tuple[RunPlan, dict[str, Any], list[Record]]:
    """(plan, what it was made with, records) of a run's folder, finished or not."""
    path = folder / "plan.json"
    if not path.exists():
        raise ValueError(f"{folder} holds no run: there is no plan.json in it")
    found = json.loads(path.read_text())
    plan = RunPlan(**found["plan"] | {"decoders": tuple(found["plan"]["decoders"])})
    files = [file for file in (folder / "records.jsonl", folder / "records.jsonl.gz") if file.exists()]
    return plan, found["about"], read_lines(files[0]) if files else []


def read_lines(file: Path) -> list[Record]:
    """The records of a file, compressed or not; a last line without its end is left out."""
    names = {f.name for f in fields(Record)}
    lines = _content(file).split(b"\n")[:-1]
    found = [_parsed(line, number, file) for number, line in enumerate(lines, 1)]
    return [Record(**{name: value for name, value in line.items() if name in names}) for line in found]


def _content(file: Path) -> bytes:
    return gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()


def _parsed(line: bytes, number: int, file: Path) -> dict[str, Any]:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"line {number} of {file} is damaged: {error}") from error

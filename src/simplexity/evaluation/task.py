"""A task: questions, how to ask them, and who grades the answers.

A new one is a small file in `tasks/` with a subclass of `Task`; every tool then finds it by its name.
"""

from __future__ import annotations

import gzip
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

TASKS: dict[str, type[Task]] = {}


@dataclass(frozen=True)
class Question:
    """One problem: what the model is asked, and what its answer is compared with."""

    id: str
    prompt: str
    reference: Any


@dataclass(frozen=True)
class Grade:
    """Whether a text is right, and the answer read from it; votes are counted on equal answers."""

    correct: bool
    answer: str | None
    reason: str = ""


class Grader(Protocol):
    """Grades many texts at once; used in a `with` block, because it may keep processes of its own."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...

    def grade(self, pairs: Sequence[tuple[Question, str]]) -> list[Grade]:
        """One grade for each (question, text), in their order."""
        ...


class Task(ABC):
    """Questions from the hub or from a file, and their grader."""

    name: ClassVar[str]
    hub: ClassVar[tuple[str, str | None, str]]  # dataset, configuration, split
    system: ClassVar[str | None] = None  # what the system message says
    max_new_tokens: ClassVar[int] = 3072
    runs_code: ClassVar[bool] = False  # whether grading executes what the model wrote
    allow_code_execution: bool = False  # whether it may: the caller's to say

    def __init_subclass__(cls, name: str = "", **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if name:
            cls.name = name
            TASKS[name] = cls

    @abstractmethod
    def question(self, record: dict[str, Any], number: int) -> Question:
        """The question that a record of the data set holds; a KeyError where a field is missing."""

    @abstractmethod
    def grader(self) -> Grader:
        """Who grades the answers."""

    def load(self, data: Path | None = None, limit: int | None = None) -> list[Question]:
        """The first `limit` questions, from a .json or .jsonl file (.gz or not), or from the hub."""
        records = self._from_hub() if data is None else read_records(data)
        questions = []
        for number, record in enumerate(records):
            if limit is not None and number >= limit:
                break
            try:
                questions.append(self.question(record, number))
            except KeyError as error:
                there = ", ".join(record)
                raise ValueError(f"{self.name}: record {number} has no field {error}, only {there}") from error
        if not questions:
            raise ValueError(f"{self.name}: no questions in {data or self.hub[0]}")
        if len({q.id for q in questions}) < len(questions):
            raise ValueError(f"{self.name}: two questions share an id in {data or self.hub[0]}")
        return questions

    def _from_hub(self) -> Iterable[dict[str, Any]]:
        try:
            import datasets  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ImportError("reading the hub needs one more package: pip install 'simplexity[eval]'") from error
        path, configuration, split = self.hub
        return datasets.load_dataset(path, configuration, split=split)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a .json list or a .jsonl file, compressed or not."""
    if not path.is_file():
        raise ValueError(f"no such file: {path}")
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    try:
        records = (
            json.loads(text)
            if text.lstrip().startswith("[")
            else [json.loads(x) for x in text.split("\n") if x.strip()]
        )
    except ValueError as error:
        raise ValueError(f"{path} is neither a JSON list nor JSON lines: {error}") from error
    if not all(isinstance(record, dict) for record in records):
        raise ValueError(f"{path} must hold objects, one for each question")
    return records

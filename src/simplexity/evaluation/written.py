"""What a writer hands back: a batch of texts, and what was measured while they were written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Text:
    """One text, and what was measured while it was written."""

    question: int  # its place in the batch
    sample: int
    seed: int
    text: str
    tokens: int
    finish: str
    entropy: float
    effective_temperature: float | None


@dataclass(frozen=True)
class Written:
    """A batch of texts; `forward` of the `seconds` were the model's own, `looking` went into q's entropy.

    Tokens become texts when they are first asked for: by who grades them, while the model writes on.
    """

    read: Callable[[], list[Text]]
    seconds: float
    forward: float
    looking: float

    @cached_property
    def texts(self) -> list[Text]:
        """The texts, by question and sample."""
        return self.read()

    def __reduce__(self) -> tuple[Any, ...]:
        return _of, (self.texts, self.seconds, self.forward, self.looking)  # another process has no tokenizer


def _of(texts: list[Text], *seconds: float) -> Written:
    return Written(lambda: texts, *seconds)

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

    Of the `rows` that fused kernels of a GPU solved, `swept` had to be read again and again.

    Tokens become texts when they are first asked for: by who grades them, while the model writes on.
    """

    read: Callable[[], list[Text]]
    seconds: float
    forward: float
    looking: float
    swept: int = 0
    rows: int = 0

    @cached_property
    def texts(self) -> list[Text]:
        """The texts, by question and sample."""
        return self.read()

    def __reduce__(self) -> tuple[Any, ...]:
        numbers = (self.seconds, self.forward, self.looking, self.swept, self.rows)
        return _of, (self.texts, *numbers)  # another process has no tokenizer


def _of(texts: list[Text], *numbers: Any) -> Written:
    return Written(lambda: texts, *numbers)

"""What a writer hands back: a batch of texts, and what was measured while they were written."""

from __future__ import annotations

from dataclasses import dataclass


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
    """A batch of texts; `forward` of the `seconds` were the model's own, `looking` went into q's entropy."""

    texts: list[Text]
    seconds: float
    forward: float
    looking: float

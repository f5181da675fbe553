"""Multiple choice: the letter a text settles on.

The surest signs come first, because a text that weighs every option names every letter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Self

from simplexity.evaluation.graders.answers import boxes
from simplexity.evaluation.task import Grade, Question

# what may stand around the letter: bold, brackets, \text{…}, $…$
_BEFORE = r"[\s*_$\"'`]*(?:\\(?:text|textbf|mathrm|mathbf|boldsymbol)\s*\{\s*|\\\(\s*)?[*(\[$\"'`]*"
_AFTER = r"(?![A-Za-z0-9'’-]|\s*[+/=^]|\.\d)"
# "the answer is A because" is the letter, "the answer is A long story" the article
_NOT_ARTICLE = r"(?!(?<=\bA)\s+(?!because|since|as\b|is\b|and\b|which|due\b|for\b|so\b|with\b|based|\()[a-z])"
_ANNOUNCED = (
    r"(?i:\b(?:answer|choice|option)\b[^.\n]{0,60}?(?:\bis\b|\b(?:would|must) be\b|:|=)\s*(?:option|choice|letter)?)",
    r"(?i:\b(?:choose|select|pick|go with)\s+(?:(?:the\s+)?(?:option|choice|answer|letter)\s+)?)",
    r"(?i:\b(?:answer|choice|option)\s+)",
)


class ChoiceGrader:
    """Reads the letter of an option from a text; `letters` are those that can be chosen."""

    def __init__(self, letters: str = "ABCD") -> None:
        self.letters = letters.upper()
        letter = rf"{_BEFORE}([{self.letters}]){_AFTER}{_NOT_ARTICLE}"
        self._boxed = re.compile(
            rf"(?i:(?:option|choice|answer)\s*:?\s*)?{_BEFORE}([{self.letters}{self.letters.lower()}])"
            r"(?:[\s})\]*$.\"'`]*|[\s}\]*]*[).:][\s}*]*.*|\s*\}?\s*\\?[,;].*)",
            re.DOTALL,
        )
        self._announced = re.compile("|".join(f"{words}{letter}" for words in _ANNOUNCED))
        self._correct = re.compile(
            rf"{_BEFORE}(?<![A-Za-z])([{self.letters}])[)\]*]*\s+(?:is|must be)\s+(?:\w+\s+)?correct\b"
        )
        self._alone = re.compile(
            rf"^\s*(?:\*\*|[(\[\"'`])*([{self.letters}])[)\].*\"'`]*\s*$|\*\*\(?([{self.letters}])[).:]?\*\*",
            re.MULTILINE,
        )
        self._leading = re.compile(rf"^\s*\**\(?([{self.letters}])(?:[).:]\**|\**[).:])(?=\s)", re.MULTILINE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def grade(self, pairs: Sequence[tuple[Question, str]]) -> list[Grade]:
        """One grade for each (question, text), in their order."""
        return [self._grade(str(question.reference), text) for question, text in pairs]

    def _grade(self, reference: str, text: str) -> Grade:
        answer = self.letter(text)
        if answer is None:
            return Grade(False, None, "no letter in the text")
        correct = answer == reference.strip().strip("()").upper()
        return Grade(correct, answer, "" if correct else "another letter")

    def letter(self, text: str) -> str | None:
        """The letter a text settles on.

        >>> ChoiceGrader().letter("A closer look at B shows that the answer is (C).")
        'C'
        """
        found, _ = boxes(text)
        for _, _, content in reversed(found):
            if match := self._boxed.fullmatch(content):
                return match[1].upper()
        for pattern in (self._announced, self._correct, self._alone):
            if matches := list(pattern.finditer(text)):
                return next(group for group in matches[-1].groups() if group)
        # a text that repeats the list of options leads with every letter and chooses none
        leading = {match[1] for match in self._leading.finditer(text)}
        return leading.pop() if len(leading) == 1 else None

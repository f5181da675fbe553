"""GPQA Diamond: 198 questions in the sciences that experts agree on (Rein et al., 2023).

The data are gated, and their authors ask that no example appear in the clear, so there is none here.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

from simplexity.evaluation.graders.choice import ChoiceGrader
from simplexity.evaluation.task import Grader, Question, Task

LETTERS = "ABCD"


class GpqaDiamond(Task, name="gpqa-diamond"):
    """Four options, in an order that depends on the question's id alone and so is the same in every run.

    The system message is Qwen2.5-Math's for chains of thought, with the letter in place of the answer.
    """

    hub = ("Idavidrein/gpqa", "gpqa_diamond", "train")
    system = "Please reason step by step, and put the letter of your final choice within \\boxed{}."

    def question(self, record: dict[str, Any], number: int) -> Question:
        """The question with its options below it; the reference is the letter of the correct one."""
        id, correct = str(record["Record ID"]), record["Correct Answer"]
        options = [correct, *(record[f"Incorrect Answer {i}"] for i in (1, 2, 3))]
        order = list(range(4))
        random.Random(int.from_bytes(hashlib.sha256(id.encode()).digest()[:8])).shuffle(order)
        listed = "\n".join(f"({letter}) {options[i].strip()}" for letter, i in zip(LETTERS, order, strict=True))
        return Question(id, f"{record['Question'].strip()}\n\n{listed}", LETTERS[order.index(0)])

    def grader(self) -> Grader:
        """The letter the text settles on."""
        return ChoiceGrader(LETTERS)

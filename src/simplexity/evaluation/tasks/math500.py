"""MATH-500: the problems of MATH (Hendrycks et al., 2021) that PRM800K tests on (Lightman et al., 2023)."""

from __future__ import annotations

from typing import Any

from simplexity.evaluation.graders.mathematics import MathGrader
from simplexity.evaluation.task import Grader, Question, Task


class Math500(Task, name="math500"):
    """Competition mathematics with a short answer.

    The system message is the one Qwen2.5-Math recommends for chains of thought (its model card, "Quick Start"). Files
    with the fields prompt, answer and id are read too.
    """

    hub = ("HuggingFaceH4/MATH-500", None, "test")
    system = "Please reason step by step, and put your final answer within \\boxed{}."

    def question(self, record: dict[str, Any], number: int) -> Question:
        """The problem as it stands; its id is its place in MATH."""
        local = "prompt" in record
        prompt, id = record["prompt" if local else "problem"], record["id" if local else "unique_id"]
        return Question(str(id), prompt, str(record["answer"]))

    def grader(self) -> Grader:
        """Equality as mathematics."""
        return MathGrader()

"""GSM8K: the 1,319 test problems of grade-school mathematics (Cobbe et al., 2021)."""

from __future__ import annotations

from typing import Any

from simplexity.evaluation.graders.mathematics import MathGrader
from simplexity.evaluation.task import Grader, Question, Task


class Gsm8k(Task, name="gsm8k"):
    """Word problems whose answer is a number.

    The system message is the one Qwen2.5-Math recommends for chains of thought (its model card, "Quick Start").
    """

    hub = ("openai/gsm8k", "main", "test")
    system = "Please reason step by step, and put your final answer within \\boxed{}."
    max_new_tokens = 320  # its solutions are short

    def question(self, record: dict[str, Any], number: int) -> Question:
        """The reference is the number after the solution's "####"; records have no id, so it is their number."""
        prompt, solution = record["question"], record["answer"]
        _, mark, answer = solution.rpartition("####")
        if not mark:
            raise ValueError(f"{self.name}: record {number} has no '####' before its answer")
        return Question(f"gsm8k/{number}", prompt, answer.strip().replace(",", ""))

    def grader(self) -> Grader:
        """Equality as mathematics, so that $1,200.00 is 1200."""
        return MathGrader()

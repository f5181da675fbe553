"""HumanEval: 164 Python functions to write from their docstrings, each with tests (Chen et al., 2021).

Grading runs what the model wrote, so the caller has to permit it.
"""

from __future__ import annotations

from typing import Any

from simplexity.evaluation.graders.code import CodeGrader
from simplexity.evaluation.task import Question, Task

PROMPT = """Below is the start of a Python file. Write the function `{name}` so that it does what its docstring says.
Answer with the complete function, signature and imports included, in one ```python block.

```python
{prompt}
```"""


class HumanEval(Task, name="humaneval"):
    """Set `allow_code_execution` on the instance before asking for its grader."""

    hub = ("openai/openai_humaneval", None, "test")
    runs_code = True
    allow_code_execution: bool = False

    def question(self, record: dict[str, Any], number: int) -> Question:
        """The question that a record of the data set holds."""
        fields = {name: record[name] for name in ("prompt", "entry_point", "test")}
        prompt = PROMPT.format(name=record["entry_point"], prompt=record["prompt"].strip("\n"))
        return Question(id=str(record["task_id"]), prompt=prompt, reference=fields)

    def grader(self) -> CodeGrader:
        """Who runs the programs; a ValueError without the permission."""
        return CodeGrader(allow_code_execution=self.allow_code_execution)

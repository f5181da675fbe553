"""Grades programs by running them with their tests, in the sandbox.

Chat models answer with a fenced block and models without a chat format continue the prompt, so the program is looked
for in both; what is run is always prompt, program, tests and the call of the tests, in this order.
"""

from __future__ import annotations

import ast
import os
import re
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from simplexity.evaluation.sandbox import Limits, Outcome, require_isolation, run_program
from simplexity.evaluation.task import Grade, Question

STOPS = ("\nclass ", "\ndef ", "\n#", "\n@", "\nif ", "\nprint(", "\nassert ", "\n```", "<|endoftext|>", "<|im_end|>")
LONGEST = 100_000  # characters of a text; a longer one is no program
UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)  # what the parser raises on hostile text

_FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_FUTURE = re.compile(r"^from __future__ import [^\n]*\n?", re.MULTILINE)
_CODE_LINE = re.compile(r"(?:def|async|class|import|from) |[ \t@#)\]}]|$")  # how a line of bare definitions starts


class CodeGrader:
    """Right is what passes the tests of its question; its `reference` has a `prompt`, an `entry_point` and a `test`."""

    def __init__(
        self,
        *,
        allow_code_execution: bool = False,
        allow_network: bool = False,
        limits: Limits = Limits(),  # noqa: B008
        workers: int | None = None,
    ) -> None:
        if not allow_code_execution:
            raise ValueError(
                "grading this task runs programs that the model wrote; --allow-code-execution "
                "(allow_code_execution=True) permits it"
            )
        require_isolation(allow_network)  # now, rather than after hours of generating
        self.allow_network = allow_network
        self.limits = limits
        self.workers = workers or os.cpu_count() or 1
        self._pool: ThreadPoolExecutor | None = None
        self._known: dict[str, Outcome] = {}

    def __enter__(self) -> Self:
        self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="sandbox")
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def grade(self, pairs: Sequence[tuple[Question, str]]) -> list[Grade]:
        """One grade for each (question, text), in their order; equal programs run once, also over several calls."""
        if self._pool is None:
            raise RuntimeError("a CodeGrader grades inside its with block")
        programs = [program(question.reference, text) for question, text in pairs]
        # the parser is not asked in the threads, because hiding its warnings is a setting of the whole process
        answers = [normal_form(source) for source in programs]
        tested = [
            None if answer is None else with_tests(source, question.reference)
            for (question, _), source, answer in zip(pairs, programs, answers, strict=True)
        ]
        new = list(dict.fromkeys(source for source in tested if source is not None and source not in self._known))
        self._known.update(zip(new, self._pool.map(self._run, new), strict=True))
        return [
            _unreadable(source) if whole is None else _grade(self._known[whole], answer)
            for source, answer, whole in zip(programs, answers, tested, strict=True)
        ]

    def _run(self, source: str) -> Outcome:
        return run_program(source, self.limits, allow_network=self.allow_network)


def _grade(outcome: Outcome, answer: str | None) -> Grade:
    return Grade(outcome.passed, answer, outcome.reason)


def _unreadable(source: str) -> Grade:
    try:
        _parse(source)
    except UNREADABLE as error:
        return Grade(False, None, f"{type(error).__name__}: {error}")
    return Grade(False, None, "the program is nested too deeply")


def with_tests(source: str, reference: dict[str, str]) -> str:
    """The program, its tests and their call."""
    entry_point = reference["entry_point"]
    if not entry_point.isidentifier():
        raise ValueError(f"the entry point must be the name of a function, not {entry_point!r}")
    return f"{source}\n\n{reference['test']}\n\ncheck({entry_point})\n"


def program(reference: dict[str, str], text: str) -> str:
    """The program in a model's text, without tests; it need not be valid Python.

    >>> reference = {"prompt": "import math\\n\\ndef area(r):\\n", "entry_point": "area"}
    >>> print(program(reference, "Sure: ```python\\ndef area(r):\\n    return math.pi * r * r\\n``` Done."))
    import math
    <BLANKLINE>
    def area(r):
        return math.pi * r * r
    <BLANKLINE>
    >>> print(program(reference, "    return math.pi * r * r\\n\\nprint(area(2))"))
    import math
    <BLANKLINE>
    def area(r):
        return math.pi * r * r
    """
    prompt, entry_point = reference["prompt"], reference["entry_point"]
    text = text[:LONGEST].rpartition("</think>")[2].replace("\r\n", "\n")
    blocks = [match.group(1) for match in _FENCE.finditer(_fences_on_own_lines(text))]
    for block in reversed(blocks):  # a later one corrects an earlier one
        if _defines(entry_point, textwrap.dedent(block)):
            return _after_preamble(prompt, entry_point, textwrap.dedent(block))
    bare = _bare_definition(entry_point, text)
    if not blocks and bare is not None:
        return _after_preamble(prompt, entry_point, bare)
    choices = (choice for part in (*blocks, text) for choice in _continued(prompt, part))
    return next((choice for choice in choices if _fills(entry_point, choice)), _continued(prompt, text)[0])


def _fences_on_own_lines(text: str) -> str:
    return re.sub(r"(?<=\S)[ \t]*```(?=[A-Za-z]*[ \t]*\n)", "\n```", text)


def _continued(prompt: str, text: str) -> tuple[str, ...]:
    """Prompt and text; a chat format may have stripped the indentation, of the first line or of all."""
    body = text[: min((at for stop in STOPS if (at := text.find(stop)) >= 0), default=len(text))]
    indented = textwrap.indent(textwrap.dedent(body), "    ")
    return prompt + body, f"{prompt}    {body.lstrip()}", prompt + indented


def _after_preamble(prompt: str, entry_point: str, block: str) -> str:
    """The block below the imports and helpers of the prompt; what comes from the future has to stay first."""
    preamble = prompt[: match.start()] if (match := _definition(entry_point).search(prompt)) else ""
    whole = preamble + block
    return "".join(line.rstrip("\n") + "\n" for line in _FUTURE.findall(whole)) + _FUTURE.sub("", whole)


def _definition(entry_point: str) -> re.Pattern[str]:
    return re.compile(rf"^(?:async )?def {re.escape(entry_point)}\b", re.MULTILINE)


def _bare_definition(entry_point: str, text: str) -> str | None:
    """The function in a text without fences, with the definitions around it and without the prose."""
    if not _definition(entry_point).search(text):
        return None
    if _defines(entry_point, text):
        return text
    for part in _code_parts(text):
        if _defines(entry_point, part):
            return part
    return None


def _code_parts(text: str) -> Iterator[str]:
    part: list[str] = []
    for line in text.split("\n"):
        if _CODE_LINE.match(line):
            part.append(line)
        elif part:
            yield "\n".join(part)
            part = []
    yield "\n".join(part)


def _defines(entry_point: str, source: str) -> bool:
    try:
        return entry_point in _defined(_parse(source))
    except UNREADABLE:
        return False


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def _fills(entry_point: str, source: str) -> bool:
    """Whether the function has more of a body than its docstring."""
    try:
        tree = _parse(source)
    except UNREADABLE:
        return False
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return any(f.name == entry_point and (len(f.body) > 1 or ast.get_docstring(f) is None) for f in functions)


def _parse(source: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source, "program.py")


def normal_form(source: str) -> str | None:
    """The program without comments, docstrings, repeated statements and layout; None where it does not parse.

    >>> normal_form("def f(x):\\n    '''Doc.'''\\n    return (x)  # as it is")
    'def f(x):\\n    return x'
    """
    try:
        tree = _parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                _drop_docstring(node)
        return "\n".join(dict.fromkeys(ast.unparse(statement) for statement in tree.body))
    except UNREADABLE:
        return None


def _drop_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module) -> None:
    if node.body and isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant):
        rest = node.body[1:]
        node.body[:] = rest or ([] if isinstance(node, ast.Module) else [ast.Pass()])

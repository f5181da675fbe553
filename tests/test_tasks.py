"""Tasks: reading files, what goes wrong with them, and each task's prompts and references on made-up records."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from simplexity.evaluation.tasks import task, tasks

MATH = [
    {"problem": "What is $1+1$?", "answer": "2", "unique_id": "test/a/1.json", "subject": "Algebra", "level": 1},
    {"problem": "Halve $1$.", "answer": "\\frac{1}{2}", "unique_id": "test/a/2.json", "subject": "Algebra", "level": 2},
    {"problem": "Name a prime.", "answer": "3", "unique_id": "test/a/3.json", "subject": "Algebra", "level": 3},
]
GSM = [
    {"question": "Tom has 2 pens and buys 3. How many has he?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"},
    {"question": "A car costs twice $600. How much is that?", "answer": "It is 2 * 600 = $1,200.\n#### 1,200"},
]
GPQA = [
    {
        "Record ID": f"rec{number}",
        "Question": f"Which colour has the made-up thing number {number}?\n",
        "Correct Answer": "red\n",
        "Incorrect Answer 1": "green",
        "Incorrect Answer 2": " blue",
        "Incorrect Answer 3": "grey",
        "Explanation": "It is made up.",
    }
    for number in range(12)
]
RECORDS = {"math500": MATH, "gsm8k": GSM, "gpqa-diamond": GPQA}


def write(path: Path, records: list[dict]) -> Path:
    """The records in the format of the file's name."""
    lines = "\n".join(json.dumps(record) for record in records) + "\n"
    text = json.dumps(records, indent=1) if ".jsonl" not in path.name else lines
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("ending", ["json", "jsonl", "jsonl.gz", "json.gz"])
@pytest.mark.parametrize("name", RECORDS)
def test_every_format_gives_the_same_questions(tmp_path, name, ending):
    questions = task(name).load(write(tmp_path / f"data.{ending}", RECORDS[name]))
    assert len(questions) == len(RECORDS[name])
    assert questions == [task(name).question(record, i) for i, record in enumerate(RECORDS[name])]


def test_empty_lines_are_passed_over(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("\n\n".join(json.dumps(record) for record in GSM) + "\n\n")
    assert len(task("gsm8k").load(path)) == 2


def test_a_limit_takes_the_first(tmp_path):
    path = write(tmp_path / "data.jsonl", MATH)
    everything = task("math500").load(path)
    assert task("math500").load(path, limit=2) == everything[:2]
    assert task("math500").load(path, limit=50) == everything


@pytest.mark.parametrize(
    ("name", "field"), [("math500", "answer"), ("gsm8k", "question"), ("gpqa-diamond", "Record ID")]
)
def test_a_missing_field_is_named(tmp_path, name, field):
    records = [dict(record) for record in RECORDS[name]]
    del records[1][field]
    with pytest.raises(ValueError, match=rf"{name}: record 1 has no field '{field}', only "):
        task(name).load(write(tmp_path / "data.json", records))


def test_two_questions_with_one_id(tmp_path):
    with pytest.raises(ValueError, match="math500: two questions share an id"):
        task("math500").load(write(tmp_path / "data.json", [*MATH, MATH[0]]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "no questions"),
        ("", "no questions"),
        ("{not json}", "neither a JSON list nor JSON lines"),
        ("[1, 2]", "must hold objects"),
    ],
)
def test_files_that_hold_no_questions(tmp_path, text, message):
    path = tmp_path / "data.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        task("math500").load(path)
    with pytest.raises(ValueError, match="no such file"):
        task("math500").load(tmp_path / "absent.json")


def test_an_unknown_task_suggests_the_nearest():
    with pytest.raises(ValueError, match="unknown task 'math50', did you mean 'math500'"):
        task("math50")
    assert set(RECORDS) <= set(tasks())


def test_every_task_says_what_it_is():
    for name, kind in tasks().items():
        assert kind.name == name
        assert kind.__doc__
        assert len(kind.hub) == 3
        assert kind.max_new_tokens > 0


def test_math500():
    first, second, _ = (task("math500").question(record, i) for i, record in enumerate(MATH))
    assert (first.id, first.prompt, first.reference) == ("test/a/1.json", "What is $1+1$?", "2")
    assert second.reference == "\\frac{1}{2}"
    local = task("math500").question({"prompt": "What is $1+1$?", "answer": 2, "id": "test/a/1.json"}, 0)
    assert local == first
    assert task("math500").system == "Please reason step by step, and put your final answer within \\boxed{}."


def test_gsm8k():
    first, second = (task("gsm8k").question(record, i) for i, record in enumerate(GSM))
    assert (first.prompt, first.reference, second.reference) == (GSM[0]["question"], "5", "1200")
    assert first.id != second.id
    with pytest.raises(ValueError, match="record 3 has no '####'"):
        task("gsm8k").question({"question": "How many?", "answer": "5"}, 3)
    assert task("gsm8k").system == task("math500").system


def gpqa() -> list[tuple[str, str]]:
    questions = (task("gpqa-diamond").question(record, i) for i, record in enumerate(GPQA))
    return [(question.prompt, question.reference) for question in questions]


def test_gpqa_options_are_a_permutation_and_the_letter_points_at_the_correct_one():
    for number, (prompt, letter) in enumerate(gpqa()):
        asked, _, listed = prompt.partition("\n\n")
        options = dict(line.split(" ", 1) for line in listed.split("\n"))
        assert asked == f"Which colour has the made-up thing number {number}?"
        assert list(options) == ["(A)", "(B)", "(C)", "(D)"]
        assert sorted(options.values()) == ["blue", "green", "grey", "red"]
        assert options[f"({letter})"] == "red"
    assert len({letter for _, letter in gpqa()}) > 1
    assert "letter" in str(task("gpqa-diamond").system)


def test_gpqa_options_keep_their_order_elsewhere():
    # in another process, with another hash seed, and from another place in the file
    code = "import json, test_tasks; test_tasks.GPQA.reverse(); print(json.dumps(test_tasks.gpqa()[::-1]))"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parent
    )
    assert [tuple(pair) for pair in json.loads(run.stdout)] == gpqa()


@pytest.mark.parametrize(
    ("name", "text"), [("gpqa-diamond", "\\boxed{{{}}}"), ("gsm8k", "#### {}"), ("math500", "so \\boxed{{{}}}")]
)
def test_a_task_grades_its_own_references(name, text):
    if name != "gpqa-diamond":
        pytest.importorskip("math_verify")
    questions = [task(name).question(record, i) for i, record in enumerate(RECORDS[name])][:3]
    with task(name).grader() as grader:
        assert all(g.correct for g in grader.grade([(q, text.format(q.reference)) for q in questions]))
        assert not any(g.correct for g in grader.grade([(q, "I do not know.") for q in questions]))

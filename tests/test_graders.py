"""Graders on awkward answers, labelled by hand, and the mathematics grader's processes under attack."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("math_verify")

from simplexity.evaluation.graders.choice import ChoiceGrader
from simplexity.evaluation.graders.mathematics import MathGrader
from simplexity.evaluation.task import Question

pytestmark = pytest.mark.xdist_group("graders")

BOXED = [  # what stands in the box, the reference, whether a careful reader calls it right
    # fractions and decimals
    (r"\frac{3}{4}", r"\frac{3}{4}", True),
    (r"\dfrac{3}{4}", r"\frac34", True),
    (r"\tfrac12", r"\frac{1}{2}", True),
    ("3/4", r"\frac{3}{4}", True),
    ("0.75", r"\frac{3}{4}", True),
    (".75", "3/4", True),
    (r"\frac{6}{8}", r"\frac{3}{4}", True),
    (r"\frac{-1}{2}", r"-\frac{1}{2}", True),
    (r"\frac{1}{2}", r"-\frac{1}{2}", False),
    (r"\frac{4}{3}", r"\frac{3}{4}", False),
    ("0.33", r"\frac{1}{3}", False),
    ("½", r"\frac{1}{2}", True),
    # mixed numbers
    (r"1\frac{4}{5}", r"\frac{9}{5}", True),
    (r"137 \frac{1}{2}", "137.5", True),
    ("1 1/2", r"\frac{3}{2}", True),
    (r"1\frac{4}{5}", r"\frac{4}{5}", False),
    # intervals
    ("(3,4]", r"\left( 3, 4 \right]", True),
    ("[3,4]", "(3,4]", False),
    ("(3,4)", "[3,4]", False),
    (r"(-\infty, 0]", r"(-\infty,0]", True),
    (r"x \in [-2,7]", "[-2,7]", True),
    (r"-2 \le x \le 7", "[-2,7]", True),
    ("-2 < x < 7", "[-2,7]", False),
    # sets and unions
    (r"\{3, 1, 2\}", r"\{1,2,3\}", True),
    (r"\{1,2\}", r"\{1,2,3\}", False),
    ("-2, 1", "1,-2", True),
    (r"5 \text{ or } 6", "6, 5", True),
    ("100,200", "200, 100", True),
    (r"(9,36) \cup (0,9)", r"(0,9) \cup (9,36)", True),
    (r"(0,36)", r"(0,9) \cup (9,36)", False),
    (r"1+\sqrt{19}, 1-\sqrt{19}", r"1 \pm \sqrt{19}", True),
    (r"\varnothing", r"\emptyset", True),
    # units, degrees, percentages, money
    (r"15\text{ cm}^2", "15", True),
    (r"15 \, \mathrm{cm^2}", r"15\mbox{ cm}^2", True),
    ("12 books", "12", True),
    ("5 m", "5", True),
    ("2t", "2", False),
    ("2", "2k", False),
    (r"\frac{270}{7}^\circ", r"\frac{270}7\text{ degrees}", True),
    (r"90^{\circ}", "90", True),
    ("90", r"90^\circ", True),
    ("90°", r"90^\circ", True),
    (r"20\%", "20", True),
    ("12.5%", "12.5", True),
    (r"16\%", "0.16", True),
    (r"0.2\%", "0.2", False),
    (r"\$18.90", "18.9", True),
    (r"\$32,348", r"\$32,\!348", True),
    ("$5", "5 dollars", True),
    (r"2.5 \text{ million}", "2500000", True),
    (r"3 \text{ million}", "3", False),
    (r"60 \frac{\text{km}}{\text{h}}", "60", True),
    (r"\text{Total: } 12", "12", True),
    (r"\approx 3.14", "3.14", True),
    ("3:00", "5:00", False),
    # typography
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\pi/2)", True),
    (r"11,\! 111,\! 111,\! 100", "11111111100", True),
    (r"10{,}080", "10080", True),
    (r"10\,080", r"10,\!080", True),
    ("10 080", "10080", True),
    ("10,080", "10.080", False),
    (r"\displaystyle 7 .", "7", True),
    (r"\text{7}", "7", True),
    ("−5", "-5", True),
    ("1,234,567.89", "1234567.89", True),
    ("3.00", "3", True),
    # matrices
    (r"\begin{bmatrix} 1 \\ 2 \end{bmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", True),
    (r"\begin{pmatrix}0.2\\-3.6\end{pmatrix}", r"\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix}", True),
    (r"\begin{pmatrix} 1 & 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", False),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}", False),
    # complex numbers
    ("-5i + 6", "6 - 5i", True),
    ("(2+i)^2", "3+4i", True),
    ("6 + 5i", "6 - 5i", False),
    # expressions
    ("ab + 2a + 5b + 10", "(a+5)(b+2)", True),
    (r"\frac{\cos x}{\sin x}", r"\cot x", True),
    ("q - p", "p - q", False),
    ("2t+3", "2x+3", False),
    # tuples
    ("(-2, 1)", "(-2,1)", True),
    ("(1, -2)", "(-2,1)", False),
    ("(2,1)", "(1,2)", False),
    ("(6,31,-1)", "(6, 31, -1)", True),
    ("(6,-1,31)", "(6, 31, -1)", False),
    # equations
    ("x = 5", "5", True),
    ("5", "x=5", True),
    ("y = 5", "x = 5", False),
    ("2x+3", "y = 2x + 3", True),
    ("10x - 14y + 22z + 8 = 0", "5x - 7y + 11z + 4 = 0", True),
    ("2 + 3 = 5", "5", True),
    ("y = 2x - 3", "y = 2x + 3", False),
    # inequalities
    ("5 < x", "x > 5", True),
    (r"x \ge 5", "x > 5", False),
    (r"(5, \infty)", "x > 5", True),
    ("x > 5", r"(5,\infty)", True),
    # radicals
    (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}", True),
    (r"\sqrt{18}", r"3\sqrt2", True),
    ("3√2", r"3\sqrt{2}", True),
    (r"\sqrt[3]{2}", r"\sqrt{2}", False),
    ("4.24", r"3\sqrt{2}", False),
    # other functions and notations
    ("5!", "120", True),
    ("5", "120", False),
    (r"\binom{5}{2}", "10", True),
    (r"6.72 \times 10^{-5}", ".0000672", True),
    ("0.0000671", ".0000672", False),
    ("1.5e3", "1500", True),
    (r"3 \times 10^8", "3 \\times 10^7", False),
    ("52_{8}", "52_8", True),
    ("52", "52_8", True),
    ("52_9", "52_8", False),
    ("42", "52_8", False),
    ("a_2", "a_1", False),
    ("-0", "0", True),
    ("1000001", "1000000", False),
    (r"-\infty", r"\infty", False),
    # words
    ("Evelyn", r"\text{Evelyn}", True),
    (r"\text{evelyn}", r"\text{Evelyn}", True),
    (r"\text{Navin}", r"\text{Evelyn}", False),
    ("neve", r"\text{even}", False),  # a product of the same letters
    ("C", r"\text{(C)}", True),
    (r"\textbf{(C)}", r"\text{(C)}", True),
    ("B", r"\text{(C)}", False),
    (r"\textbf{(B)}\ 12", "12", True),
    (r"\textbf{(B)}\ 12", r"\text{(B)}", True),
    (r"\textbf{(B)}\ 12", r"\text{(C)}", False),
    (r"\text{No solution.}", r"\text{no solution}", True),
]

TEXTS = [  # a whole text, the reference, whether it is right
    (r"So the answer is $\boxed{\frac{a}{b^{2}}}$, as claimed.", r"\frac{a}{b^2}", True),
    (r"We get \boxed{4}, no wait, it must be \boxed{5}.", "5", True),
    (r"We get \boxed{4}, no wait, it must be \boxed{5}.", "4", False),
    (r"The roots are $\boxed{3}$ and $\boxed{4}$.", "4, 3", True),
    (r"\boxed{\boxed{7}}", "7", True),
    (r"So \boxed 7 it is.", "7", True),
    (r"\[\boxed{x^2 - 1}\] which has the roots 1 and -1.", "(x-1)(x+1)", True),
    (r"\boxed{\{1, 2\}}", "1, 2", True),
    (r"Thus \fbox{12}.", "12", True),
    (r"The total is 125, so \boxed{12", "12", False),  # cut off: nobody knows how it goes on
    (r"First \boxed{8}. Let me check: \boxed{", "8", True),
    (r"I put the answer within \boxed{}. The answer is 9.", "9", True),
    ("The answer is 42.", "42", True),
    ("The final answer is: $\\frac{1}{2}$. I hope it is correct.", "0.5", True),
    ("So the answer is \\frac{3}{4}.", "0.75", True),
    ("**Answer:** 17", "17", True),
    ("The answer is 3 and the check gives 4 = 4.", "3", True),
    ("The answer is 15 + 20 = 35 dollars.", "35", True),
    ("The answers are $3$ and $5$.", "3, 5", True),
    ("The answer is Evelyn.", r"\text{Evelyn}", True),
    ("She earns 9 * 2 = $18 a day.\n#### 18", "18", True),
    ("#### 1,450,000", "1450000", True),
    ("#### -5", "-5", True),
    ("#### 18 dollars", "81", False),
    ("The answer is $70,000.00.", "70000", True),
    ("He paid $5 and then $7, so he paid $12 in total.", "12", True),
    ("The price rose by 20%.", "20", True),
    ("Therefore $x = 5$.", "5", True),
    ("In the end 3/4 of the cake are left.", r"\frac{3}{4}", True),
    ("There are 12 eggs left over for 4 people.", "12", False),  # the last number is all there is to go by
    ("I cannot solve this.", "0", False),
    ("", "0", False),
    ("   \n", "", False),
]

HANGS = r"\boxed{9^{9^{9^{9}}}}"


def asked(reference: object) -> Question:
    return Question("q", "?", reference)


@pytest.fixture(scope="module")
def grader():
    with MathGrader(workers=2, timeout=30) as grader:
        yield grader


@pytest.fixture(scope="module")
def table(grader):
    """Every case graded in one call, as it is used."""
    cases = [(f"Hence the answer is $\\boxed{{{box}}}$.", reference) for box, reference, _ in BOXED]
    cases += [(text, reference) for text, reference, _ in TEXTS]
    return dict(zip(cases, grader.grade([(asked(reference), text) for text, reference in cases]), strict=True))


@pytest.mark.parametrize(("box", "reference", "correct"), BOXED)
def test_a_boxed_answer(table, box, reference, correct):
    grade = table[f"Hence the answer is $\\boxed{{{box}}}$.", reference]
    assert grade.correct == correct, grade
    assert grade.answer


@pytest.mark.parametrize(("text", "reference", "correct"), TEXTS)
def test_an_answer_in_a_text(table, text, reference, correct):
    assert table[text, reference].correct == correct, table[text, reference]


@pytest.mark.parametrize("text", ["", "  ", "I cannot solve this.", r"so 125 and \boxed{12", r"\boxed{}"])
def test_no_answer_is_none(grader, text):
    grade = grader.grade([(asked("12"), text)])[0]
    assert (grade.correct, grade.answer) == (False, None)
    assert grade.reason


@pytest.mark.parametrize(
    "equal",
    [
        ["3/4", r"\frac{3}{4}", "0.75", r"\dfrac{6}{8}", r"x = \frac34"],
        [r"\$1,200", "1200", "1200.00", "1200 dollars", r"1,\!200"],
        ["(x+1)^2", "x^2+2x+1"],
        [r"\frac{1}{\sqrt2}", r"\frac{\sqrt2}{2}"],
        ["2, 1", r"\{1,2\}", r"1 \text{ and } 2"],
        [r"\text{East}", "east"],
        [r"90^\circ", "90"],
        [r"\begin{pmatrix} 0.5 \\ 1 \end{pmatrix}", r"\begin{bmatrix} 1/2 \\ 1 \end{bmatrix}"],
    ],
)
def test_equal_answers_share_a_name(grader, equal):
    named = {grade.answer for grade in grader.grade([(asked("0"), f"\\boxed{{{box}}}") for box in equal])}
    assert len(named) == 1
    assert grader.grade([(asked("0"), r"\boxed{17}")])[0].answer not in named


def test_a_reference_may_be_a_number(grader):
    assert [g.correct for g in grader.grade([(asked(18), "#### 18"), (asked(0.5), r"\boxed{1/2}")])] == [True, True]


def test_nothing_to_grade():
    with MathGrader() as grader:
        assert grader.grade([]) == []
        assert not grader._crew


@pytest.mark.parametrize("box", ["9^{9^{9^{9}}}", "(10^{9})!"])
def test_a_hanging_answer_is_wrong_and_the_others_are_graded(box):
    pairs = [(asked("5"), r"\boxed{5}"), (asked("5"), f"\\boxed{{{box}}}"), (asked("7"), r"\boxed{7}")]
    with MathGrader(workers=1, timeout=3) as grader:
        began = time.monotonic()
        grades = grader.grade(pairs)
        assert [g.correct for g in grades] == [True, False, True]
        assert grades[1].reason
        assert time.monotonic() - began < 60  # two starts on a busy machine, and the limit
        assert grader.grade(pairs[:1])[0].correct


@pytest.mark.parametrize("huge", ["2^{2^{235423522}}", "2^{470846047}", "10^{3^{100}}"])
def test_a_number_too_large_to_write_out_is_compared_as_it_is_written(huge):
    with MathGrader(workers=1, timeout=60) as grader:  # a failure would take that long
        right, wrong = grader.grade([(asked(huge), f"\\boxed{{{huge}}}"), (asked("4"), f"\\boxed{{{huge}}}")])
    assert right.correct
    assert (wrong.correct, wrong.answer, wrong.reason) == (False, huge, "not equal to the reference")


@pytest.mark.parametrize(
    ("power", "value"), [("1^{2^{235423523}}", "1"), ("2^{1^{500}}", "2"), ("2^{2^{3}}", "256"), ("2^{00000003}", "8")]
)
def test_powers_that_only_look_large_are_worked_out(power, value):
    with MathGrader(workers=1, timeout=60) as grader:
        assert grader.grade([(asked(value), f"\\boxed{{{power}}}")])[0].correct


def test_the_reason_names_the_limit():
    with MathGrader(workers=1, timeout=0.5) as grader:
        grade = grader.grade([(asked("5"), HANGS)])[0]
    assert (grade.correct, grade.answer, grade.reason) == (False, None, "took longer than 0.5 s")


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/stat")
        return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] in "ZX")
    except (ProcessLookupError, FileNotFoundError):
        return False


def pids(grader: MathGrader) -> list[int]:
    return [worker.process.pid for worker in list(grader._crew)]


def until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_worker_killed_from_outside_loses_no_answer():
    pairs = [(asked(str(n)), f"\\boxed{{{n}}}") for n in range(3000)]
    with MathGrader(workers=2, timeout=30) as grader:
        grader.grade(pairs[:2])
        victims = pids(grader)
        grades = []
        thread = threading.Thread(target=lambda: grades.extend(grader.grade(pairs)))
        thread.start()
        until(lambda: any(worker.job is not None for worker in list(grader._crew)))
        os.kill(victims[0], signal.SIGKILL)
        thread.join()
        assert [g.answer for g in grades] == [str(n) for n in range(3000)]
        assert all(g.correct for g in grades)
        assert victims[0] not in pids(grader)


def test_an_idle_worker_killed_from_outside_is_replaced():
    with MathGrader(workers=1, timeout=30) as grader:
        assert grader.grade([(asked("1"), r"\boxed{1}")])[0].correct
        os.kill(pids(grader)[0], signal.SIGKILL)
        grader._crew[0].process.wait()
        assert grader.grade([(asked("2"), r"\boxed{2}")])[0].correct


def test_an_answer_that_always_kills_its_worker_is_wrong():
    with MathGrader(workers=1, timeout=60) as grader:
        grader.grade([(asked("1"), r"\boxed{1}")])
        grades = []
        thread = threading.Thread(
            target=lambda: grades.extend(grader.grade([(asked("5"), HANGS), (asked("1"), r"\boxed{1}")]))
        )
        thread.start()
        killed: list[int] = []
        for _ in range(2):
            until(lambda: any(w.job == 0 and w.process.pid not in killed for w in list(grader._crew)))
            killed.append(pids(grader)[0])
            os.kill(killed[-1], signal.SIGKILL)
        thread.join()
    assert [g.correct for g in grades] == [False, True]
    assert "died" in grades[0].reason


def test_threads_take_turns(grader):
    found = {}

    def work(n: int) -> None:
        found[n] = grader.grade([(asked(str(n)), f"\\boxed{{{n}}}"), (asked(str(n)), r"\boxed{-1}")])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [[g.correct for g in found[n]] for n in range(4)] == [[True, False]] * 4


def test_processes_stay_between_calls_and_end_with_the_block():
    with MathGrader(workers=2, timeout=30) as grader:
        pairs = [(asked("1"), r"\boxed{1}")] * 20
        grader.grade(pairs)
        first = pids(grader)
        grader.grade(pairs)
        assert pids(grader) == first
        assert len(first) == 2
    assert not any(alive(pid) for pid in first)


SCRIPT = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from simplexity.evaluation.graders.mathematics import MathGrader
from simplexity.evaluation.task import Question
grader = MathGrader(workers=1, timeout=100)
grader.grade([(Question("q", "?", "1"), "1")])
print(grader._crew[0].process.pid, flush=True)
if sys.argv[1] == "wait":
    time.sleep(100)
if sys.argv[1] == "hang":
    grader.grade([(Question("q", "?", "1"), {hangs!r})])
"""


def script(*arguments: str) -> tuple[subprocess.Popen, int]:
    """A script without a guard around its main part, and the process its grader keeps."""
    command = [sys.executable, "-c", SCRIPT.format(hangs=HANGS), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout
    return process, int(process.stdout.readline())


def test_a_grader_that_was_never_closed_ends_with_the_interpreter():
    process, worker = script("leave")
    process.communicate(timeout=60)
    assert process.returncode == 0
    until(lambda: not alive(worker))


def test_a_worker_does_not_outlive_a_parent_that_was_killed():
    process, worker = script("wait")
    process.kill()
    process.communicate(timeout=60)
    until(lambda: not alive(worker))


def test_ctrl_c_in_the_middle_of_an_answer():
    process, worker = script("hang")
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    until(lambda: not alive(worker))


def test_workers_that_never_start_are_an_error(monkeypatch):
    monkeypatch.setattr("simplexity.evaluation.graders.answers.__file__", "/nowhere.py")
    with MathGrader(workers=1) as grader, pytest.raises(RuntimeError, match="do not start"):
        grader.grade([(asked("1"), "1")])


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="workers"):
        MathGrader(workers=0)
    with pytest.raises(ValueError, match="timeout"):
        MathGrader(timeout=0)


CHOICES = [  # a text and the letter it settles on
    (r"\boxed{C}", "C"),
    (r"\boxed{c}", "C"),
    (r"Thus $\boxed{\text{C}}$.", "C"),
    (r"\boxed{(C)}", "C"),
    (r"\boxed{\textbf{(C)}}", "C"),
    (r"\boxed{C) 42 kJ}", "C"),
    (r"\boxed{\text{C. A large one}}", "C"),
    (r"\boxed{A}? No: \boxed{D}", "D"),
    (r"The answer is B, that is \boxed{42}.", "B"),
    (r"\boxed{E}", None),
    (r"\boxed{42}", None),
    (r"\boxed{CD}", None),
    ("The answer is (C).", "C"),
    ("The correct answer is C because of the spin.", "C"),
    ("The answer is A because of the spin.", "A"),
    ("Answer: C", "C"),
    ("**Answer:** C", "C"),
    ("**Answer: C**", "C"),
    ("Answer: **(B)** as shown", "B"),
    ("The answer is $C$.", "C"),
    ("The answer is option D.", "D"),
    ("The best choice would be B.", "B"),
    ("I would go with D.", "D"),
    ("I choose option (A).", "A"),
    ("(B) is correct.", "B"),
    ("At first B. But the answer is A. Yes, the answer is D.", "D"),
    ("**C**", "C"),
    ("C", "C"),
    ("(D)", "D"),
    ("C) because the field vanishes", "C"),
    ("C. The field vanishes.", "C"),
    ("The reasoning is long.\n\nB", "B"),
    ("A molecule has two atoms.", None),
    ("A closer look shows nothing.", None),
    ("The answer is A long story.", None),
    ("The answer is a matter of taste.", None),
    ("A) one\nB) two\nC) three\nD) four", None),
    ("A) one\nB) two\nC) three\nD) four\nThe answer is (B).", "B"),
    ("Carbon and Boron differ.", None),
    ("The answer is Boron.", None),
    ("I do not know.", None),
    ("", None),
]


@pytest.mark.parametrize(("text", "letter"), CHOICES)
def test_the_letter_of_a_text(text, letter):
    with ChoiceGrader() as grader:
        right, wrong = grader.grade([(asked(letter or "A"), text), (asked("B" if letter != "B" else "C"), text)])
    assert right.answer == wrong.answer == letter
    assert right.correct == (letter is not None)
    assert not wrong.correct
    assert wrong.reason


def test_more_letters_than_four():
    assert ChoiceGrader("ABCDEFGHIJ").letter("The answer is (J).") == "J"
    assert ChoiceGrader().letter("The answer is (J).") is None

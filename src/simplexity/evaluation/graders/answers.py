"""What answer a text gives, and whether it equals a reference: the part of the mathematics grader that its workers run.

Imports nothing of this package: a worker runs this file alone, and starts without torch.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from functools import lru_cache
from typing import Any

MEMORY = 4 << 30  # bytes of address space for a worker: a giant number ends it, not the machine

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_JOINED = re.compile(r"[\s$.]*(?:,|;|and|or|,\s*and|,\s*or|\\text\{\s*(?:and|or)\s*\}|\\\)|\\\()[\s$]*")
_ANNOUNCED = re.compile(r"####|\banswers?\b[^.\n:=#]{0,60}?(?:\bis\b|\bare\b|:|=)\s*\**:?", re.IGNORECASE)
_SEGMENT = re.compile(r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|(?<!\\)\$((?:\\.|[^$\n\\])+)(?<!\\)\$", re.DOTALL)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_TEXT = re.compile(r"\\(?:text|mbox|mathrm|textbf|textit|textrm|textnormal|mathbf|mathit|operatorname)\s*\{([^{}]*)\}")
_FRACTION = r"\\[dt]?frac\{-?\d+\}\{\d+\}"
_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    rf"(?<![\w.)\]])-?[$€£]?-?(?:{_FRACTION}|(?:{_DECIMAL})(?:/\d+)?)(?:\s*\\?%|\s*percent\b)?(?!\w*\}})", re.IGNORECASE
)
_PLAIN = rf"-?(?:\d+\s*)?(?:{_FRACTION}|\\[dt]?frac\s*\d\s*\d|(?:{_DECIMAL})(?:/\d+)?)"
_UNIT = r"cm|mm|km|kg|mg|lb|lbs|oz|ft|in|mi|yd|hr|hrs|mph|am|pm|sq|cu|m/s|km/h|[A-Za-z]{3,}"
_UNITS = re.compile(rf"({_PLAIN})\s*(?:(?:{_UNIT})\.?(?:\s+[A-Za-z]+\.?)*)(?:\^?\{{?[23]\}}?)?")
_ONE_LETTER_UNIT = re.compile(rf"({_PLAIN})\s*[msghlLANJWVKCF](?:\^\{{?[23]\}}?)?")
_POWER = r"(?!0*[01]\s*\^)\d+\s*\^\s*\{?\s*0*"  # of 2 at least: those of 1 are no trouble
# 2^{470846047}, 2^{2^{100}}: not to be written out
_HUGE = re.compile(rf"{_POWER}(?:[1-9]\d{{7,}}|{_POWER}[1-9]\d{{2,}})[\s}}]*")
_NOT_UNITS = re.compile(r"\b(?:pi|sqrt|sin|cos|tan|cot|sec|csc|log|exp|mod|and|or|to|base|infinity|inf|choose)\b")
_RATIO_UNIT = re.compile(r"\s*\\[dt]?frac\{\\(?:text|mathrm)\{[^{}]*\}\}\{\\(?:text|mathrm)\{[^{}]*\}\}$")
_LABEL = re.compile(r"^(?:\\text\{[^{}]*(?:\bis|[:=])\s*\}|\\approx|(?:approximately|about|roughly)\b)\s*(?=\S)")
_OPTION = re.compile(r"(?:\\(?:text|textbf|mathrm)\{\s*)?\(([A-J])\)\s*\}?\s*(?=[^\s}])(.+)")
_BASED = re.compile(r"((?=[A-Fa-f]*\d)[0-9A-Fa-f]+)_\{?\(?(\d+)\)?\}?")
_BASES = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_UNICODE = {
    **{"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "∕": "/", "⁄": "/", "\u00a0": " ", "\u202f": " "},
    **{"°": r"^\circ", "π": r"\pi ", "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset "},
    **{"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "€": "", "£": "", "²": "^{2}", "³": "^{3}"},
    **{"½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}"},
}


def boxes(text: str) -> tuple[list[tuple[int, int, str]], bool]:
    """The filled boxes of a text as (start, end, content), and whether one was begun and never closed."""
    found, open_ended, position = [], False, 0
    while match := _BOX.search(text, position):
        end = closing(text, match.end()) if text[match.end() : match.end() + 1] == "{" else None
        if end is not None:
            content, position = text[match.end() + 1 : end].strip(), end + 1
        elif text[match.end() : match.end() + 1] in ("{", ""):
            open_ended, position = True, match.end()
            continue
        else:  # \boxed 5
            content = re.match(r"[^\s$\\{}]*", text[match.end() :])[0].rstrip(".,;")  # type: ignore[index]
            position = match.end() + len(content)
        inner, _ = boxes(content) if "\\boxed" in content else ([], False)
        content = inner[-1][2] if inner else content
        if content:
            found.append((match.start(), position, content))
    return found, open_ended


def closing(text: str, opening: int) -> int | None:
    """Where the brace opened at `opening` is closed; escaped braces are characters."""
    depth, position = 0, opening
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1
        elif character in "{}":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return position
        position += 1
    return None


def given(text: str) -> str | None:
    r"""The answer a text gives, as it is written there.

    The last box counts; boxes with only "and", "or" or a comma between them are one answer. Without a box it is what
    follows the last "the answer is" or "####", and without those the last formula or number. A box that was cut off is
    no answer, and neither is a number left over inside it.

    >>> print(given(r"First \boxed{3}, but then \boxed{\frac{1}{2}}."))
    \frac{1}{2}
    >>> given("It costs $1,200 in all."), given("I give up.")
    ('$1,200', None)
    """
    found, open_ended = boxes(text)
    if found:
        return _together(text, found)
    if open_ended:
        return None
    for match in reversed(list(_ANNOUNCED.finditer(text))):
        if answer := _first(text[match.end() :]):
            return answer
    return _last(text)


def _together(text: str, found: list[tuple[int, int, str]]) -> str:
    parts = [found[-1]]
    for box in reversed(found[:-1]):
        if not _JOINED.fullmatch(text, box[1], parts[0][0]):
            break
        parts.insert(0, box)
    return ", ".join(dict.fromkeys(content for _, _, content in parts))


def _formulas(text: str) -> list[re.Match[str]]:
    """Formulas between delimiters; what stands between two amounts in dollars has words in it and is none."""
    found, position = [], 0
    while match := _SEGMENT.search(text, position):
        if _WORD.search(_TEXT.sub("", _inside(match))):
            position = match.start() + 1
        else:
            found.append(match)
            position = match.end()
    return found


def _inside(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None).strip()


def _first(rest: str) -> str | None:
    """The answer at the beginning of what follows its announcement."""
    rest = rest.lstrip(" \t\n*:")
    line = re.split(r"\n|(?<=[^.\d])\.(?:\s|$)|(?<=\d)\.\s", rest, maxsplit=1)[0].strip(" *.`")
    formulas = [m for m in _formulas(rest) if m.start() <= len(line)]
    if formulas:
        joined = [formulas[0]]
        for match in formulas[1:]:
            if not _JOINED.fullmatch(rest, joined[-1].end(), match.start()):
                break
            joined.append(match)
        percent = re.match(r"\s*\\?%", rest[joined[-1].end() :])
        return ", ".join(_inside(m) for m in joined) + ("%" if percent else "")
    if "\\" in line or not re.search(r"\d", line) or not _WORD.search(line):
        return line.rstrip(".,;! ") or None
    number = _NUMBER.search(line)
    run = re.search(r"[-+(\[$€£]*\.?\d(?:(?!(?<![A-Za-z])[A-Za-z]{2}).)*", line)
    if number and run and re.search(r"[=+*/^]", run[0]):
        return re.sub(r"\s+[A-Za-z]$", "", run[0].strip(" .,;")) or None
    return number[0] if number else line


def _last(text: str) -> str | None:
    """The last formula or number of a text."""
    formulas, numbers = _formulas(text), list(_NUMBER.finditer(text))
    if formulas and (not numbers or formulas[-1].end() >= numbers[-1].end()):
        return _inside(formulas[-1])
    return numbers[-1][0] if numbers else None


def tidy(answer: str) -> str:
    """An answer without what does not change it: typography, currency, units, a full stop."""
    answer = "".join(_UNICODE.get(c, c) for c in answer)
    answer = re.sub(r"√\s*(\w+|\([^()]*\))", r"\\sqrt{\1}", answer)
    answer = re.sub(r"\\\$|\$|\\displaystyle|\\left\.|\\right\.|\\(?:USD|EUR)\b", "", answer)
    answer = re.sub(r"(?<=\d)\s*(?:\\[,;:!]|\{,\}|,\\!|\\ )\s*(?=\d{3}(?!\d))", ",", answer)
    answer = re.sub(r"(?<!\\)\\[,;:! ]|\\q?quad\b|~", " ", answer).replace("\\degree", "^\\circ")
    answer = re.sub(r"(?<=\d)\s*,\s+(?=\d{3},\s+\d{3}(?!\d))", ",", answer) if "," in answer else answer
    answer = re.sub(r"\s+", " ", answer).strip().rstrip(".,;").strip().replace("\\varnothing", "\\emptyset")
    answer = _plain_forms(answer)
    answer = _LABEL.sub("", answer)
    for word, power in _SCALES.items():
        answer = re.sub(rf"(?<=\d)\s*(?:\\text\{{\s*{word}\s*\}}|{word}\b)", rf" \\times 10^{{{power}}}", answer)
    return _without_units(answer)


def _plain_forms(answer: str) -> str:
    """The ways to write a number outside LaTeX: 1 1/2, 10 080, 1.5e3."""
    answer = re.sub(r"^(-?\d+)\s+(\d+)/(\d+)(?!\d)", r"\1\\frac{\2}{\3}", answer)
    if re.fullmatch(r"-?\d{1,3}(?: \d{3})+(?:\.\d+)?", answer):
        return answer.replace(" ", "")
    return re.sub(r"^(-?\d+(?:\.\d+)?)[eE]([+-]?\d+)$", r"\1 \\times 10^{\2}", answer)


def _without_units(answer: str) -> str:
    while (match := list(_TEXT.finditer(answer))) and re.search(r"\d|\\pi", answer[: match[-1].start()]):
        unit, rest = match[-1], answer[match[-1].end() :]
        joining = re.fullmatch(r"\s*,?\s*(?:and|or|if|when|for)\s*", unit[1])
        if joining or "percent" in unit[1] or not re.fullmatch(r"\s*(?:\^\s*\{?\d\}?)?[\s.]*", rest):
            break
        answer = answer[: unit.start()].strip()
    if re.search(r"\d", answer):
        answer = _RATIO_UNIT.sub("", answer)
    match = _UNITS.fullmatch(answer)
    if match and not _NOT_UNITS.search(answer) and "percent" not in answer:
        answer = match[1].strip()
    return re.sub(r"\s*\^\s*\{?\\circ\}?\s*[CF]?$", "", answer)


def words(answer: str) -> str | None:
    r"""The plain words an answer consists of, in lower case, or None where there is more to it than words.

    >>> words(r"\text{No solution.}"), words("(C)"), words("2x")
    ('no solution', 'c', None)
    """
    plain = _TEXT.sub(r"\1", answer)
    plain = re.sub(r"[\"'`*().,:!]|\\ ", " ", plain)
    return " ".join(plain.split()).casefold() if re.fullmatch(r"[\sA-Za-z-]*[A-Za-z][\sA-Za-z-]*", plain) else None


def based(answer: str) -> tuple[str, str] | None:
    """The digits and the base of a number such as 52_8."""
    answer = re.sub(r"_\{?\\text\{\s*(?:base\s*)?(\w+)\s*\}\}?", r"_{\1}", answer).replace(" ", "")
    for base, name in enumerate(_BASES, 2):
        answer = answer.replace(f"_{{{name}}}", f"_{{{base}}}")
    match = _BASED.fullmatch(answer)
    return (match[1].upper(), match[2]) if match else None


def without_percent(answer: str) -> str | None:
    """An answer given as a percentage, without the sign."""
    bare = re.sub(r"\s*(?:\\?%|\\text\{\s*percent\s*\}|percent)\s*$", "", answer)
    return bare if bare != answer else None


@lru_cache(maxsize=256)
def parsed(answer: str) -> Any:
    """The sympy object an answer stands for, or None."""
    if _HUGE.fullmatch(answer):
        return None
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    # its own list of units takes 2t for two tonnes, so units are ours to remove
    rules = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="last")
    config = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=rules)]
    found = parse(f"\\boxed{{{answer}}}", config, fallback_mode="no_fallback", parsing_timeout=None)  # type: ignore[arg-type]
    return _imaginary(found[0]) if found else None


def _imaginary(found: Any) -> Any:
    """With i as the imaginary unit, which the parser leaves a symbol."""
    import sympy

    with contextlib.suppress(Exception):
        return found.subs({symbol: sympy.I for symbol in found.free_symbols if symbol.name == "i"})
    return found


def same(reference: str, answer: str) -> bool:
    """Whether two tidy answers are equal."""
    squeezed = reference.replace(" ", "")
    if squeezed == answer.replace(" ", ""):
        return True
    if (numbers := _same_based(reference, answer)) is not None:
        return numbers
    if option := _OPTION.fullmatch(answer):  # (B) 12 names an option and what it says
        return same(reference, option[1]) or same(reference, option[2])
    if (name := words(reference)) is not None:
        if name == words(answer):
            return True
        if _TEXT.search(reference) or _WORD.search(reference):
            return False
    if equal(parsed(reference), parsed(answer)):
        return True
    if "," in answer and ", " in reference + answer:  # 100,200 may be a list where the other is one
        return equal(*(parsed(re.sub(r",\s*", ", ", side)) for side in (reference, answer)))
    if not re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", reference)) and (m := _ONE_LETTER_UNIT.fullmatch(answer)):
        return equal(parsed(reference), parsed(m[1]))
    return _same_percent(reference, answer)


def _same_based(reference: str, answer: str) -> bool | None:
    """Digits in a base: the base may be left out, because the question names it, but may not be another one."""
    left, right = based(reference), based(answer)
    if left is None and right is None:
        return None
    if left and right:
        return left == right
    digits, _ = left or right or ("", "")
    return digits == (answer if left else reference).replace(" ", "").upper()


def _same_percent(reference: str, answer: str) -> bool:
    """12.5% is 12.5 where percentages are asked for; 0.2% for 0.2 is a mistake, so small numbers do not count."""
    bare_reference, bare_answer = without_percent(reference), without_percent(answer)
    if bare_reference is None and bare_answer is None:
        return False
    left, right = parsed(bare_reference or reference), parsed(bare_answer or answer)
    with contextlib.suppress(Exception):
        return bool(abs(left.doit()) >= 1) and equal(left, right)
    return False


def equal(reference: Any, answer: Any) -> bool:
    """math-verify's verdict, except that small numbers must agree in their leading digits too."""
    from math_verify import verify

    if reference is None or answer is None:
        return False
    if not verify(reference, answer, allow_set_relation_comp=True, timeout_seconds=None):
        return False
    with contextlib.suppress(Exception):
        left, right = reference.doit(), answer.doit()
        if left.is_number and right.is_number and left.is_real and abs(left) < 0.01:
            return bool(abs(left - right) <= abs(left) * 1e-4) or bool(abs(left - 100 * right) == 0)
    return True


def name(answer: str) -> str:
    """A string that equal answers share, as far as possible: votes are counted on it."""
    if number := based(answer):
        return number[0]
    plain = words(answer)
    if plain is not None and (_TEXT.search(answer) or _WORD.search(answer) or len(plain) == 1):
        return plain
    bare = without_percent(answer) or answer
    with contextlib.suppress(Exception):
        if (found := canonical(parsed(bare))) is not None:
            return found
    return " ".join(answer.split())


def canonical(found: Any) -> str | None:
    """A sympy object written in one way: evaluated, decimals as fractions, x = 5 and f(x) = 5 as 5."""
    import sympy

    if found is None or (isinstance(found, sympy.Basic) and found.has(sympy.zoo, sympy.nan)):  # 3:00 is no ratio
        return None
    if isinstance(found, sympy.Eq) and (found.lhs.is_Symbol or found.lhs.is_number or found.lhs.is_Function):
        found = found.rhs
    if isinstance(found, sympy.MatrixBase):
        return str(found.applyfunc(_simple).tolist())
    if isinstance(found, sympy.Tuple):
        return str(tuple(_simple(part) for part in found))
    if isinstance(found, sympy.FiniteSet):
        return "{" + ", ".join(sorted(str(_simple(part)) for part in found)) + "}"
    return str(_simple(found))


def _simple(expression: Any) -> Any:
    import sympy

    expression = expression.doit()
    if isinstance(expression, sympy.Expr):
        expression = sympy.nsimplify(expression, rational=True)
        if expression.count_ops() <= 60:  # simplifying a long one takes longer than a vote is worth
            expression = sympy.simplify(sympy.expand(expression))
    return expression


def judge(reference: str, text: str) -> tuple[bool, str | None, str]:
    """Whether a text gives the reference answer, the answer it gives, and why it does not count."""
    answer = given(text)
    tidied = tidy(answer) if answer else ""
    if not tidied:
        return False, None, "no answer in the text"
    correct = same(tidy(reference), tidied)
    return correct, name(tidied), "" if correct else "not equal to the reference"


def serve(descriptor: int, timeout: float) -> None:
    """Grade what comes through the pipe until its other end is closed."""
    import logging
    from multiprocessing.connection import Connection

    logging.disable(logging.CRITICAL)  # math-verify warns that it has no timeout: the parent has
    pipe = Connection(descriptor)
    judge("1", "\\boxed{2}")  # loads sympy, before the first answer's time begins
    _limit_memory()
    with contextlib.suppress(EOFError, OSError):
        pipe.send_bytes(b"ready")
        while True:
            reference, text = json.loads(pipe.recv_bytes())
            _limit_time(timeout)
            try:
                reply = judge(reference, text)
            except Exception as error:
                reply = (False, None, f"{type(error).__name__} while grading")
            pipe.send_bytes(json.dumps(reply).encode())


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _limit_time(timeout: float) -> None:
    """Let the kernel end this process should its parent be gone when an answer takes for ever."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        resource.setrlimit(resource.RLIMIT_CPU, (int(used + timeout) + 5, resource.getrlimit(resource.RLIMIT_CPU)[1]))


if __name__ == "__main__":
    serve(int(sys.argv[1]), float(sys.argv[2]))

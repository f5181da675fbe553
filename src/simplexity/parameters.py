"""A decoder's parameters: what each may be, checked once where a decoder is made."""

from dataclasses import Field, dataclass, field
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from simplexity.rows import in_range, is_number, is_whole


@dataclass(frozen=True)
class Rule:
    """What a parameter may be. Numbers may also be tensors, one value per row, unless they are `shared`."""

    above: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    whole: bool = False
    shared: bool = False  # one number for all rows
    flag: bool = False
    choices: tuple[str, ...] = ()
    function: bool = False  # besides the choices, a callable
    text: bool = False  # any text
    listed: bool = False  # besides a number, a list of numbers or of token ids: not one per row, and not in a spec
    optional: bool = False  # None means "decide for me"
    hint: str = ""
    doc: str = ""
    aliases: tuple[str, ...] = ()  # what engines call it; read, never written

    @property
    def allowed(self) -> str:
        """In words: "in (0, 1]", "a whole number >= 1", "one of probs, rank"."""
        if self.flag:
            return "true or false"
        if self.text:
            return "text"
        if self.choices:
            return f"one of {', '.join(self.choices)}" + (" or a callable" if self.function else "")
        if self.listed and self.at_least is None:
            return "a list, from Python or JSON"
        kind, rows = "a whole number" if self.whole else "a number", " for all rows" if self.shared else ""
        if self.at_most is not None:
            low = f"({self.above:g}" if self.above is not None else f"[{self.at_least:g}"
            return f"in {low}, {self.at_most:g}]{rows}"
        if self.above is not None:
            return f"{kind} above {self.above:g}{rows}"
        return (f"{kind} >= {self.at_least:g}" if self.at_least is not None else kind) + rows

    def expected(self, value: Any) -> str:
        """What is allowed, said to someone who gave this value: what is only of a wrong size is told the sizes."""
        number = is_number(value) or (isinstance(value, Tensor) and value.dtype != torch.bool)
        if not number or bool(torch.as_tensor(in_range(value)).all()):
            return self.allowed
        return f"{self.allowed}, {'0 or ' * self.accepts(0)}from 1e-30 to 1e30 in size"

    def accepts(self, value: Any) -> bool:
        """Whether a value is allowed; for a tensor, whether all of its entries are."""
        if value is None:
            return self.optional
        if self.flag:
            return isinstance(value, bool)
        if self.text:
            return isinstance(value, str)
        if self.choices:
            return value in self.choices if isinstance(value, str) else self.function and callable(value)
        if isinstance(value, (list, tuple)):
            return self.listed
        if isinstance(value, Tensor):
            if value.dtype == torch.bool or self.shared:
                return False
            fits = in_range(value)
            if self.whole:
                fits = fits & (value == value.round())
            for bound, test in (
                (self.above, value.__gt__),
                (self.at_least, value.__ge__),
                (self.at_most, value.__le__),
            ):
                fits = fits & test(bound) if bound is not None else fits
            return bool(fits.all())
        if not (is_whole if self.whole else is_number)(value) or not in_range(value):
            return False
        return (
            (self.above is None or value > self.above)
            and (self.at_least is None or value >= self.at_least)
            and (self.at_most is None or value <= self.at_most)
        )

    def read(self, text: str) -> Any:
        """A value from its text; the text itself where it cannot be read, for `accepts` to refuse."""
        if self.flag:
            return {"true": True, "false": False}.get(text, text)
        if self.choices:
            return text
        if self.text:
            return text
        try:
            number = float(text)
        except ValueError:
            return text
        return int(number) if self.whole and number.is_integer() else number


def plain(value: Any) -> Any:
    """A number of any kind as one of Python's own, which JSON can hold; a tensor without dimensions is one."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain, value))
    value = value.item() if isinstance(value, Tensor) and value.ndim == 0 else value
    if type(value) in (int, float) or not is_number(value) or not in_range(value):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def parameter(default: Any, doc: str, **rule: Any) -> Any:
    """A dataclass field with a rule; see `Rule` for what can be asked of it."""
    flag = isinstance(default, bool)
    return field(default=default, metadata={"rule": Rule(doc=doc, flag=flag, optional=default is None, **rule)})


def rule_of(f: "Field[Any]") -> Rule:
    """The rule of a parameter; one declared without `parameter` takes any value of its kind."""
    default = f.default
    return f.metadata.get("rule") or Rule(
        flag=isinstance(default, bool),
        text=isinstance(default, str),
        whole=f.type in (int, "int"),
        optional=default is None,
    )


def temperature() -> Any:
    """The parameter that most decoders share: what the scores are divided by."""
    return parameter(1.0, "what the scores are divided by", above=0, hint=" (for the limit 0 use greedy)")


def temperature_last() -> Any:
    """Where a cut looks at probabilities: before or after the scores are divided by the temperature."""
    return parameter(False, "cut at temperature 1, then divide (llama.cpp); false: divide, then cut (transformers)")

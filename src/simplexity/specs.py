"""Decoders as text and as plain data: `top-p:p=0.9,temperature=0.7` and `{"decoder": "top-p", "p": 0.9}`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from simplexity.parameters import rule_of

if TYPE_CHECKING:
    from simplexity.decoding import Decoder


def parse(spec: str) -> tuple[str, dict[str, str]]:
    """A name and its parameters, still as text.

    >>> parse("top-p:p=0.9,temperature=0.7")
    ('top-p', {'p': '0.9', 'temperature': '0.7'})
    """
    name, _, rest = spec.partition(":")
    values: dict[str, str] = {}
    for part in rest.split(",") if rest.strip() else []:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not key or not value:
            raise ValueError(f"{spec!r}: expected name:parameter=value,… but found {part.strip()!r}")
        if key in values:
            raise ValueError(f"{spec!r}: {key} is given twice")
        values[key] = value
    return name.strip(), values


def build(kind: type[Decoder], values: dict[str, Any]) -> Decoder:
    """A decoder from its parameters, by their own names or an alias; text is read by each parameter's rule."""
    rules = {f.name: rule_of(f) for f in kind.parameters()}
    names = {alias: name for name, rule in rules.items() for alias in (name, *rule.aliases)}
    given: dict[str, str] = {}
    for key in values:
        if key not in names:
            raise ValueError(f"{kind.name}: unknown parameter {key!r}{nearest(key, rules)}")
        if (name := names[key]) in given:
            raise ValueError(f"{kind.name}: {given[name]} and {key} are the same parameter, give one of them")
        given[name] = key
    return kind(**{n: rules[n].read(v) if isinstance(v := values[k], str) else v for n, k in given.items()})


def nearest(word: Any, known: Iterable[str]) -> str:
    """What was probably meant, and what exists."""
    names = list(known)
    close = difflib.get_close_matches(str(word).lower(), names, 1, 0.5)
    meant = f", did you mean {close[0]!r}?" if close else "."
    return f"{meant} There is: {', '.join(names) or 'none'}"


def to_text(decoder: Decoder) -> str:
    """The shortest spec: parameters at their defaults are left out."""
    parts = [
        f"{f.name}={_text(getattr(decoder, f.name))}"
        for f in decoder.parameters()
        if differs(getattr(decoder, f.name), f.default)
    ]
    return decoder.name + (":" + ",".join(parts) if parts else "")


def to_json(decoder: Decoder) -> dict[str, Any]:
    """Every parameter as plain data; tensors as lists. A function has no such form and is refused."""
    data: dict[str, Any] = {"decoder": decoder.name}
    for f in decoder.parameters():
        value = getattr(decoder, f.name)
        if callable(value) and not isinstance(value, Tensor):
            raise ValueError(f"{decoder.name}: {f.name} is a function and cannot be written as JSON")
        targeted = f.name == "temperature" and (
            decoder.entropy is not None or decoder.effective_temperature is not None
        )
        if value is not None and not targeted:
            data[f.name] = value.tolist() if isinstance(value, Tensor) else value
    return data


def differs(value: Any, default: Any) -> bool:
    """Whether a parameter is not at its default."""
    return isinstance(value, Tensor) or (value is not default and value != default)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Tensor):
        return f"<tensor {list(value.shape)}>"
    return f"<{getattr(value, '__name__', 'function')}>" if callable(value) else str(value)

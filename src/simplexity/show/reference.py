"""The reference of all decoders, written from the code: `python -m simplexity.show.reference > docs/decoders.md`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from typing import Any

from simplexity.decoders import decoders
from simplexity.decoding import Decoder
from simplexity.parameters import rule_of
from simplexity.show.terminal import default_text

HEAD = """# The decoders

<!-- written by `python -m simplexity.show.reference > docs/decoders.md`; a test compares -->

Each poses `max <q, s> − λ·Ω(q)` on a support and draws from the q that solves it. `decoder("name:parameter=value,…")`
makes one; a name under "also" is read too, and the short one written. Any number may be a tensor, one value per row,
unless it is said to be for all rows. p is the model's own distribution, at the decoder's temperature unless
`temperature_last` says otherwise.
"""

SHARED = """## What every decoder takes

The penalties lower the scores of tokens that `context.tokens` holds before the problem is posed, in the order of this
table. A decoder with a temperature takes a target in its place, and the temperature of each row is solved for.
"""


def built_in() -> dict[str, type[Decoder]]:
    """The decoders of this library by name, without plug-ins."""
    return {name: kind for name, kind in sorted(decoders().items()) if kind.__module__.startswith("simplexity.")}


def reference(known: dict[str, type[Decoder]]) -> str:
    """One section a decoder: its objective, what it does, its parameters."""
    shared = [f for f in known["softmax"].parameters() if f.kw_only]
    parts = [HEAD, SHARED, _table(shared)]
    for name, kind in known.items():
        parts += [f"## `{name}`\n", f"    {kind.objective}\n", (inspect.getdoc(kind) or "") + "\n"]
        if kind.needs:
            parts.append(f"It needs {' and '.join(f'`context.{field}`' for field in kind.needs)}.\n")
        parts.append(_table([f for f in kind.parameters() if not f.kw_only]))
    return "\n".join(part for part in parts if part)


def _table(parameters: Iterable[Any]) -> str:
    rows = []
    for f in parameters:
        rule = rule_of(f)
        also = ", ".join(f"`{alias}`" for alias in rule.aliases)
        cells = (f"`{f.name}`", default_text(f.default), rule.allowed, rule.doc, also)
        rows.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    head = ["| parameter | default | allowed | meaning | also |", "|---|---|---|---|---|"]
    return "\n".join([*head, *rows]) + "\n" if rows else ""


if __name__ == "__main__":
    sys.stdout.write(reference(built_in()))

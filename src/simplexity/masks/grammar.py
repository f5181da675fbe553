"""Grammars and JSON schemas, by the llguidance library: after each token it says which may follow.

Where a grammar leaves one way to go on, llguidance allows the usual tokens for that piece of text and no others.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from simplexity.masks import RowMasker
from simplexity.masks.vocabulary import library, vocabulary


class Grammar(RowMasker):
    """Texts that a grammar generates; once one is complete, only the end token may follow.

    `source` is a grammar as llguidance writes it; `json_schema`, `regex` and `lark` make one.
    `end`: the tokens that end a text; the tokenizer's own one where absent.
    """

    def __init__(self, tokenizer: Any, source: str, end: int | Sequence[int] | None = None) -> None:
        super().__init__()
        words = vocabulary(tokenizer, end)
        self.ends, self.size = set(words.eos_tokens), words.vocab_size
        self.first = library().LLMatcher(words, source, log_level=0)
        if self.first.is_error():
            raise ValueError(f"the grammar cannot be used: {self.first.get_error()}")

    @classmethod
    def json_schema(
        cls, tokenizer: Any, schema: dict[str, Any], end: int | Sequence[int] | None = None, spaces: bool = False
    ) -> Grammar:
        """JSON that is valid under a schema; `spaces` lets it have any white space between its parts."""
        if not isinstance(schema, dict):
            raise ValueError(f"a JSON schema is an object, got {type(schema).__name__}")
        style = {"whitespace_flexible": True}
        if not spaces:  # a text could go on with spaces for ever
            style = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        return cls(tokenizer, library().LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=style), end)

    @classmethod
    def regex(cls, tokenizer: Any, pattern: str, end: int | Sequence[int] | None = None) -> Grammar:
        """Texts that match a regular expression as a whole, in the syntax of Rust's regex."""
        return cls(tokenizer, library().LLMatcher.grammar_from_regex(pattern), end)

    @classmethod
    def lark(cls, tokenizer: Any, grammar: str, end: int | Sequence[int] | None = None) -> Grammar:
        """Texts of a context-free grammar, in llguidance's variant of Lark's syntax."""
        return cls(tokenizer, library().LLMatcher.grammar_from_lark(grammar), end)

    def begin(self) -> Any:
        """A matcher at the start; what the grammar's compilation cost is shared."""
        return self.first.deep_copy()

    def follow(self, state: Any, token: int) -> Any:
        """The matcher after the token."""
        if token in self.ends:
            return None
        if not state.consume_token(token):
            raise ValueError(f"the grammar does not allow the token {token} that was written: {state.get_error()}")
        return state

    def masks(self, size: int) -> Tensor:
        """Unpacked from the bits that llguidance gives."""
        width = -(-self.size // 32) * 4
        rows = [b"\xff" * width if state is None else state.compute_bitmask()[:width] for state in self.states]
        for i, state in enumerate(self.states):
            if state is not None and state.is_error():
                raise ValueError(f"row {i}: the grammar failed: {state.get_error()}")
        packed = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).view(len(rows), width, 1)
        bits = packed >> torch.arange(8, dtype=torch.uint8) & 1
        return bits.flatten(1)[:, : self.size].bool()

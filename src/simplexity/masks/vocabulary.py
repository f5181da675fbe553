"""A tokenizer's vocabulary as llguidance sees it: the bytes behind each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def library() -> Any:
    """llguidance."""
    try:
        import llguidance.hf
    except ImportError:
        raise ValueError("masks by text need llguidance; get it with: pip install 'simplexity[grammar]'") from None
    return llguidance


def vocabulary(tokenizer: Any, end: int | Sequence[int] | None = None) -> Any:
    """llguidance's tokenizer for a fast one of transformers; `end` are the tokens that end a text."""
    end = tokenizer.eos_token_id if end is None else end
    if end is None:
        raise ValueError("the tokenizer names no end token: say which with end=")
    try:
        return library().hf.from_tokenizer(tokenizer, eos_token=end if isinstance(end, int) else list(end))
    except ValueError as error:
        raise ValueError(f"llguidance cannot read {type(tokenizer).__name__}: {error}") from None


def token_bytes(tokenizer: Any) -> list[bytes]:
    """What each token adds to the text, by id; nothing for special tokens, which are not shown."""
    words = vocabulary(tokenizer, end=0)  # any end will do: no text is ended here
    hidden = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return [b"" if i in hidden else words.decode_bytes([i]) for i in range(words.vocab_size)]

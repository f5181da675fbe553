"""Strings that must not appear: the tokens that would complete one are forbidden, however it is cut into tokens.

The text is read byte by byte by the automaton of Aho and Corasick (1975), whose state is the longest end of the text
that begins a banned string. A token is forbidden in a state from which its bytes lead through the end of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from simplexity.masks import RowMasker
from simplexity.masks.vocabulary import token_bytes


class BannedStrings(RowMasker):
    """None of these strings in what is written; the prompt is not looked at, and special tokens are no text."""

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        super().__init__()
        if isinstance(strings, str) or not strings or not all(isinstance(s, str) and s for s in strings):
            raise ValueError(f"banned strings: give a list of texts, none of them empty, got {strings!r}")
        if any("\ufffd" in s for s in strings):
            raise ValueError("banned strings: U+FFFD stands for bytes that are no text and cannot be banned")
        self.pieces = token_bytes(tokenizer)
        self.next, self.complete = automaton([s.encode() for s in strings])
        self.order = sorted(range(len(self.pieces)), key=lambda i: -len(self.pieces[i]))
        longest = len(self.pieces[self.order[0]])
        padded = b"".join(self.pieces[i].ljust(longest, b"\0") for i in self.order)
        self.bytes = torch.frombuffer(bytearray(padded), dtype=torch.uint8).view(-1, longest)
        self.known: dict[int | None, Tensor] = {None: torch.ones(len(self.pieces), dtype=torch.bool)}

    def begin(self) -> int:
        """Nothing read."""
        return 0

    def follow(self, state: int, token: int) -> int:
        """Read the bytes of the token; a token the tokenizer does not know is no text."""
        for byte in self.pieces[token] if token < len(self.pieces) else b"":
            state = int(self.next[state, byte])
        return state

    def masks(self, size: int) -> Tensor:
        """Rows in the same state share their mask."""
        for state in set(self.states) - set(self.known):
            self.known[state] = self._harmless(state)
        return torch.stack([self.known[state] for state in self.states])

    def _harmless(self, state: int) -> Tensor:
        """True for the tokens that complete no banned string from this state, `[V]`."""
        lengths = [len(self.pieces[i]) for i in self.order]
        states, harmless = torch.full((len(lengths),), state), torch.ones(len(lengths), dtype=torch.bool)
        count = len(lengths)
        for place in range(self.bytes.shape[1]):
            while count and lengths[count - 1] <= place:  # the longest come first
                count -= 1
            states[:count] = self.next[states[:count], self.bytes[:count, place].long()]
            harmless[:count] &= ~self.complete[states[:count]]
        return torch.empty_like(harmless).scatter_(0, torch.tensor(self.order), harmless)


def automaton(words: Sequence[bytes]) -> tuple[Tensor, Tensor]:
    """(the next state by state and byte, `[states, 256]`; whether a word ends in a state, `[states]`)."""
    children: list[dict[int, int]] = [{}]
    complete = [False]
    for word in words:
        state = 0
        for byte in word:
            if byte not in children[state]:
                children[state][byte] = len(children)
                children.append({})
                complete.append(False)
            state = children[state][byte]
        complete[state] = True
    table = [[0] * 256 for _ in children]
    shorter, queue = [0] * len(children), [0]  # where the next shorter end of the text that begins a word leads
    for state in queue:
        complete[state] |= complete[shorter[state]]
        if state:
            table[state] = table[shorter[state]].copy()
        for byte, child in children[state].items():
            shorter[child] = table[shorter[state]][byte] if state else 0
            table[state][byte] = child
            queue.append(child)
    return torch.tensor(table), torch.tensor(complete)

"""Text as it is written: a streamer for `model.generate` that prints one sample and counts the steps of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TextIO

from torch import Tensor
from transformers.generation.streamers import BaseStreamer


class Stream(BaseStreamer):
    """Prints the first row to `out` while it is being written, if `show`; calls `advance` at every step."""

    def __init__(self, tokenizer: Any, out: TextIO | None, advance: Callable[[], None], show: bool = True) -> None:
        self.tokenizer, self.out, self.advance = tokenizer, out if show else None, advance
        self.ids: list[int] = []
        self.printed = 0
        self.prompt = True
        self.ended = False

    def put(self, value: Tensor) -> None:
        """The prompt first, then the next token of every row."""
        if self.prompt:
            self.prompt = False
            return
        self.advance()
        if self.out is None or self.ended:
            return
        token = int(value.reshape(-1)[0])
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        if not text.endswith("\ufffd"):  # half a character waits for its other half
            self.out.write(text[self.printed :])
            self.out.flush()
            self.printed = len(text)

    def end(self) -> None:
        """The last characters, and a line break."""
        if self.out is not None and not self.ended:
            self.out.write(self.tokenizer.decode(self.ids, skip_special_tokens=True)[self.printed :] + "\n")
            self.out.flush()
        self.ended = True

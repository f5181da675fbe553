"""A few recorded rows of a real language model's next-token logits, to try decoders on without a model."""

import base64
import json
import zlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Recorded:
    """The model's scores for the next token after a chat prompt and the start of a reply.

    prompt: what the user asked, put through the model's chat template
    so_far: the start of the reply, possibly empty
    model:  the name of the model
    tokens: the text of the 40 likeliest tokens by id, likeliest first
    scores: `[V]` the logits, float32, recorded in float16: within 2⁻⁷ of the model's, near ties may be exact ties
    """

    prompt: str
    so_far: str
    model: str
    tokens: dict[int, str]
    scores: Tensor


@cache
def recorded_rows() -> list[Recorded]:
    """The recorded rows: nearly settled, open, a fork, nearly flat. Read once and shared, so not to be changed.

    >>> for row in recorded_rows():
    ...     p = torch.softmax(row.scores, -1)
    ...     best = int(p.argmax())
    ...     print(f"{row.so_far!r} then {row.tokens[best]!r} with {p[best]:.2f}")
    'The capital of France is' then ' Paris' with 0.95
    '' then 'The' with 0.36
    '91 is' then ' a' with 0.54
    '1.' then ' "' with 0.01
    """
    text = (files("simplexity") / "data" / "recorded.json").read_text(encoding="utf-8")
    return [
        Recorded(
            prompt=row["prompt"],
            so_far=row["so_far"],
            model=row["model"],
            tokens={token: shown for token, shown, _ in row["top"]},
            scores=_unpack(row["float16"]),
        )
        for row in json.loads(text)
    ]


def _unpack(packed: str) -> Tensor:
    raw = bytearray(zlib.decompress(base64.b64decode(packed)))
    return torch.frombuffer(raw, dtype=torch.float16).float()

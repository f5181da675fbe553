"""A serving batch: logits `[B, V]` in which each row has its own decoder, or none, turned into log q in place.

Rows with the same decoder are solved together. A row that cannot be solved stays as the engine made it and is counted:
an exception inside a serving engine would end it for everyone.
"""

from __future__ import annotations

import json
import logging
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from simplexity.context import NEEDED, Context
from simplexity.decoders import decoder as as_decoder
from simplexity.draw import as_seeds
from simplexity.engines.request_codes import Drawing, RequestCode
from simplexity.problem import COMPLAINTS, Status

if TYPE_CHECKING:
    from simplexity.decoding import Decoder

log = logging.getLogger(__name__)

# What may become of a row, beside what a `Status` says.
NO_DECODER = -1  # none was asked for: untouched
FAILED = -2  # its decoder could not be made, raised, or found no distribution: untouched

_WORDS = {**COMPLAINTS, FAILED: "the decoder failed"}
_told: set[tuple[str, str]] = set()  # decoders and exceptions whose traceback is in the log
_TOLD_AT_MOST = 1000  # specs come from strangers


def reshape(
    logits: Tensor,
    decoders: Sequence[Decoder | str | None],
    context: Context | None = None,
    seeds: Sequence[int | None] | None = None,
    codes: Sequence[RequestCode | None] | None = None,
) -> Tensor:
    """Write log q over the logits `[B, V]`, −inf where q = 0; what became of each row, int8 `[B]`, on their device.

    decoders: one for each row, or its spec as text or JSON text; None leaves the row alone. Equal ones are solved
              together.
    context:  of the whole batch; its tensors have one row for each row, or one for all.
    seeds:    where a row has one, its token is drawn here, at the context's step, and only that token is left.
    codes:    the same for rows that are samples of a group.

    The result holds a `Status`, NO_DECODER or FAILED. Nothing is raised, and nothing is read from the device. The
    logits should be float32: in half precision log q is rounded, and with it the distribution.

    >>> logits = torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0]])
    >>> reshape(logits, ["top-k:k=1", None])
    tensor([ 0, -1], dtype=torch.int8)
    >>> logits
    tensor([[0., -inf, -inf],
            [2., 1., 0.]])
    """
    status = _filled(logits, NO_DECODER)
    try:
        drawn: Sequence[Any] = [None] * len(decoders) if seeds is None else seeds
        drawn = drawn if codes is None else [d if c is None else c for d, c in zip(drawn, codes, strict=True)]
        if not len(decoders) == len(drawn) == len(logits):
            raise ValueError(f"{len(logits)} rows of logits, {len(decoders)} decoders and {len(drawn)} seeds")
        groups: dict[Any, tuple[Any, list[int]]] = {}
        for row, (decoder, by) in enumerate(zip(decoders, drawn, strict=True)):
            if decoder is not None:
                groups.setdefault((_key(decoder), type(by)), (decoder, []))[1].append(row)
    except Exception as error:
        _tell("a batch", error)
        return status.fill_(FAILED)
    for decoder, rows in groups.values():
        where = _place(rows, logits.device)
        try:
            made = parsed(decoder) if isinstance(decoder, str) else decoder
            own = _of_rows(context, where, len(logits))
            status[where] = _reshape_group(logits, made, where, own, [drawn[row] for row in rows])
        except Exception as error:
            _tell(decoder if isinstance(decoder, str) else decoder.name, error)
            status[where] = FAILED
    return status


def _key(decoder: Decoder | str) -> Any:
    try:
        hash(decoder)
    except TypeError:  # someone's decoder with a list or a dict among its parameters
        return id(decoder)
    return decoder


@lru_cache(maxsize=1024)
def parsed(spec: str) -> Decoder:
    """The decoder of a spec in text or JSON; the same object for the same spec, a bounded number of them."""
    return as_decoder(json.loads(spec) if spec.startswith("{") else spec)


def _reshape_group(
    logits: Tensor, decoder: Decoder, where: slice | Tensor, context: Context | None, drawn: list[Any]
) -> Tensor:
    """`drawn`: what the tokens are drawn by, all seeds, all codes, or all None: log q is left to draw from."""
    scores = logits[where]  # a view where the rows lie side by side
    if drawn[0] is None and isinstance(where, slice):
        return decoder.log_distribution(scores, context, out=scores)[1]
    if drawn[0] is None:
        made, status = decoder.log_distribution(scores, context)
    else:
        tokens, status = _drawn(decoder, scores, context, drawn)
        made = torch.full_like(scores, -torch.inf).scatter_(-1, tokens.clamp_min(0).unsqueeze(-1), 0.0)
    good = (status == 0).unsqueeze(-1)
    if isinstance(where, slice):
        torch.where(good, made, scores, out=scores)
    else:
        logits.index_copy_(0, where, torch.where(good, made.to(scores.dtype), scores))
    return status.to(torch.int8)


def _drawn(decoder: Decoder, scores: Tensor, context: Context | None, drawn: list[Any]) -> tuple[Tensor, Tensor]:
    """(tokens, status) `[rows]`."""
    if not isinstance(drawn[0], RequestCode):
        seeds = to_device(as_seeds(drawn, scores.shape[:-1], torch.device("cpu")), scores.device)
        return decoder.sample(scores, seeds=seeds, context=context, validate=False)
    step = 0 if context is None else context.step
    steps = step if isinstance(step, Tensor) else torch.full(scores.shape[:-1], step, device=scores.device)
    drawing = Drawing(drawn, steps.expand(scores.shape[:-1]))
    tokens = status = None
    if scores.device.type == "cpu":  # looking is free here, and much can be left out
        try:
            tokens = decoder.sample(scores, context=context, codes=drawing.codes)
            status = torch.zeros_like(tokens)
        except ValueError:
            pass  # some row cannot be solved: what follows says which
    if tokens is None or status is None:
        tokens, status = decoder.sample(scores, context=context, codes=drawing.codes, validate=False)
    drawing.keep()
    return tokens, status


def to_device(values: Sequence[Any] | Tensor, device: torch.device) -> Tensor:
    """A small tensor on the device, without waiting for what the device is doing."""
    table = torch.as_tensor(values)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)


def _place(rows: list[int], device: torch.device) -> slice | Tensor:
    """Where a group's rows are: a slice where they lie side by side, so that nothing need be copied."""
    first, last = rows[0], rows[-1]
    return slice(first, last + 1) if last - first + 1 == len(rows) else to_device(rows, device)


def _of_rows(context: Context | None, where: slice | Tensor, size: int) -> Context | None:
    """The context of some rows of the batch."""
    if context is None:
        return None
    values = {f.name: getattr(context, f.name) for f in fields(context)}
    return replace(
        context,
        **{
            name: value[where]
            for name, value in values.items()
            if isinstance(value, Tensor) and value.ndim and len(value) == size
        },
    )


def _filled(logits: Tensor, value: int) -> Tensor:
    return torch.full(logits.shape[:1], value, dtype=torch.int8, device=logits.device)


def _tell(name: str, error: Exception) -> None:
    """Log an exception with its traceback, once for each decoder and kind of exception: a batch comes every 20 ms."""
    kind = (name, type(error).__name__)
    if kind not in _told and len(_told) < _TOLD_AT_MOST:
        _told.add(kind)
        log.error("%s: rows left as the engine made them; further %ss are only counted", *kind, exc_info=error)


class Tally:
    """What became of the rows, added up over an engine's life; complaints are logged at the 1st, 10th, 100th, … row.

    Statuses are copied from the device without waiting for it: `counts` may lag behind until `read`.

    >>> tally = Tally()
    >>> tally.add(torch.tensor([0, 0, -1], dtype=torch.int8))
    >>> tally.read()
    {'OK': 2, 'NO_DECODER': 1}
    """

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self._coming: deque[tuple[Tensor, Any]] = deque()

    def add(self, status: Tensor) -> None:
        """Count the rows of one `reshape`."""
        copy, arrived = status, None
        if status.is_cuda:
            copy = torch.empty(status.shape, dtype=status.dtype, pin_memory=True).copy_(status, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self._coming.append((copy, arrived))
        while self._coming and (self._coming[0][1] is None or self._coming[0][1].query()):
            self._count(self._coming.popleft()[0])

    def read(self) -> dict[str, int]:
        """The counts by name, after waiting for the device."""
        while self._coming:
            copy, arrived = self._coming.popleft()
            if arrived is not None:
                arrived.synchronize()
            self._count(copy)
        return {_name(value): n for value, n in sorted(self.counts.items(), key=lambda item: -item[1])}

    def _count(self, status: Tensor) -> None:
        for value, n in Counter(status.tolist()).items():
            before = self.counts[value]
            self.counts[value] += n
            if value in _WORDS and len(str(before)) - (before == 0) < len(str(before + n)):
                log.warning("%d rows left as the engine made them: %s", before + n, _WORDS[value])


def _name(value: int) -> str:
    return {NO_DECODER: "NO_DECODER", FAILED: "FAILED"}.get(value) or Status(value).name


def refuse_distorting(settings: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise a ValueError where an engine's own sampling settings would change q after the decoder made it.

    neutral: the settings that can, each with the values at which it does nothing, the first for the message.

    >>> refuse_distorting({"top_p": 0.9, "stop": "."}, {"top_p": (1.0,), "temperature": (1.0,)})
    Traceback (most recent call last):
    ValueError: top_p=0.9 would change the decoder's distribution: leave it out or pass top_p=1.0 (what is to shape ...
    """
    bad = [name for name, values in neutral.items() if name in settings and settings[name] not in values]
    if bad:
        said = ", ".join(f"{name}={settings[name]!r}" for name in bad)
        right = ", ".join(f"{name}={neutral[name][0]!r}" for name in bad)
        raise ValueError(
            f"{said} would change the decoder's distribution: leave {'it' if len(bad) == 1 else 'them'} out or pass "
            f"{right} (what is to shape the distribution belongs into the decoder, such as 'top-p:p=0.9')"
        )


def refuse_needy(decoder: Decoder, engine: str) -> None:
    """Raise a ValueError where a decoder needs more than the scores, which is all that most engines bring."""
    for name in decoder.needs:
        raise ValueError(f"{decoder.name} needs {NEEDED[name]}; {engine} does not bring it")


def refuse_siblings(decoder: Decoder, engine: str) -> None:
    """Raise a ValueError where a decoder counts the samples that share a text, which most engines do not tell."""
    if decoder.reads("siblings"):
        raise ValueError(f"{decoder.name} counts the samples of a group that share a text; {engine} does not tell")

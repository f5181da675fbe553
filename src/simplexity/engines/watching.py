"""What q is like along the texts of an engine's requests, for whoever holds the engine in its own process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from simplexity import measures
from simplexity.engines.rows_by_decoder import Tally, reshape

if TYPE_CHECKING:
    from simplexity.context import Context
    from simplexity.decoding import Decoder
    from simplexity.engines.request_codes import RequestCode


class Watch:
    """Looks at the rows of requests that have a name: at their first token, and at every so many after it.

    looks:   q's entropy and effective temperature by (name, step). Of a token asked for twice, the last.
    tally:   what became of those rows at all their steps; one that could not be solved was not drawn from q.
    seconds: that looking took.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.looks: dict[tuple[Any, int], tuple[float, float]] = {}
        self.tally = Tally()
        self.seconds = 0.0

    def reshape(
        self,
        logits: Tensor,
        decoders: Sequence[Decoder | None],
        context: Context,
        codes: Sequence[RequestCode | None] | None,
        names: Sequence[Any],
        steps: Sequence[int],
    ) -> Tensor:
        """`reshape`, and a look at the rows with a name; steps below 0 are of tokens that will be thrown away."""
        named = [row for row, name in enumerate(names) if name is not None]
        rows = [row for row in named if steps[row] >= 0 and steps[row] % self.every == 0]
        start = time.perf_counter()
        before = logits[rows]
        # where the token is drawn here, only that one is left in the logits, and log q is made once more
        left = logits if codes is None or not rows else logits.clone()
        self.seconds += time.perf_counter() - start
        status = reshape(logits, decoders, context, codes=codes)
        start = time.perf_counter()
        self.tally.add(status[named])
        if rows:
            if left is not logits:
                looked = set(rows)
                reshape(left, [d if row in looked else None for row, d in enumerate(decoders)], context)
            entropy = measures.entropy(left[rows].double().exp())
            tau = measures.effective_temperature(before, entropy)
            for row, *look in zip(rows, entropy.tolist(), tau.tolist(), strict=True):
                self.looks[names[row], steps[row]] = (look[0], look[1])
        self.seconds += time.perf_counter() - start
        return status

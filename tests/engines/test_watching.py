"""What is seen of q while rows are reshaped, without an engine."""

import pytest
import torch

from simplexity import Context, decoder
from simplexity.engines.request_codes import request_code
from simplexity.engines.rows_by_decoder import reshape
from simplexity.engines.watching import Watch

SPECS = ["softmax:temperature=0.7", "bok", "top-p:p=0.8", None, "sparsemax", "bok"]
NAMES = ["a", "b", "c", None, None, "d"]


def rows():
    return 3 * torch.randn(6, 257)


@pytest.mark.parametrize("coupled", [False, True])
def test_named_rows_are_looked_at_every_so_many_steps(coupled):
    watch, made = Watch(3), [None if spec is None else decoder(spec) for spec in SPECS]
    steps = [[0, 1, 3, 0, 0, -2], [0, 2, 4, 1, 1, 0], [1, 3, 5, 2, 2, 1]]
    seen = {}
    # a prompt read in parts: the first row is asked for its first token twice
    for now in steps:
        logits = rows()
        before, plain = logits.clone(), logits.clone()
        codes = [request_code((5, 0, 2), logits.device) if d is not None else None for d in made] if coupled else None
        context = Context(step=torch.tensor(now) if coupled else 0)
        status = watch.reshape(logits, made, context, codes, NAMES, now)
        assert status.tolist() == [0, 0, 0, -1, 0, 0]
        if not coupled:
            reshape(plain, made)
            assert torch.equal(logits, plain)
        else:
            assert (logits[[0, 1, 2, 4, 5]].isfinite().sum(-1) == 1).all(), "one token is left"
        for row, (name, d, step) in enumerate(zip(NAMES, made, now, strict=True)):
            if name is not None and step % 3 == 0 and step >= 0:
                seen[name, step] = d.describe(before[row])
    assert set(watch.looks) == set(seen) == {("a", 0), ("b", 3), ("c", 3), ("d", 0)}
    for key, (entropy, tau) in watch.looks.items():
        assert entropy == pytest.approx(seen[key].entropy.item(), rel=1e-4, abs=1e-6)
        assert tau == pytest.approx(seen[key].effective_temperature.item(), rel=1e-3)
    assert watch.tally.read() == {"OK": 12}
    assert watch.seconds > 0


def test_rows_that_were_not_drawn_from_q_are_counted():
    watch, logits = Watch(1), rows()[:2]
    logits[1, 3] = torch.nan
    watch.reshape(logits, [decoder("bok")] * 2, Context(), None, ["a", "b"], [0, 0])
    assert watch.tally.read() == {"OK": 1, "NAN": 1}

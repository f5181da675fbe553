"""Who writes the texts: a model of transformers, a batch at a time, with the seconds its forward passes took.

On a GPU the rows of a batch are written by `ManyRows`, where it knows the model; otherwise by `generate`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from simplexity.draw import derive_seeds
from simplexity.engines.clock import Clock
from simplexity.engines.many_rows import ManyRows, serves
from simplexity.engines.transformers import Generated, generate
from simplexity.evaluation.plan import RunPlan, Work, seed_of
from simplexity.evaluation.written import Text, Written
from simplexity.kernels import has_triton, swept_rows
from simplexity.measures import tells_temperature
from simplexity.models import LanguageModel, load_model


class TransformersWriter:
    """A model of transformers on this machine."""

    def __init__(self, plan: RunPlan, system: str | None, device: str | None = None) -> None:
        self.plan, self.system = plan, system
        self.language_model: LanguageModel = load_model(plan.model, device, plan.dtype)
        self.many: ManyRows | None = None
        self.encoded: dict[Any, dict[str, Tensor]] = {}  # every arm asks the same

    def write_all(self, works: Iterable[Work]) -> Iterator[tuple[Work, Written]]:
        """Every batch in turn."""
        for work in works:
            yield work, self.write(work)

    def write(self, work: Work) -> Written:
        """n texts for each question of the batch."""
        plan, model, start = self.plan, self.language_model, time.perf_counter()
        inputs = self._encode([q.prompt for q in work.questions])
        room = None if model.context is None else model.context - inputs["input_ids"].shape[1]
        limit = plan.max_new_tokens if room is None else min(plan.max_new_tokens, room)
        seeds = torch.tensor([seed_of(plan, q) for q in work.questions])
        own, together = derive_seeds(seeds, plan.n), plan.n
        if coupled := work.arm.coupled > 1:
            together = work.arm.coupled
            seeds = derive_seeds(seeds, plan.n // together)
            own = seeds.repeat_interleave(together)
        # the samples of one prompt and one seed are coupled: the prompt stands there once for each group
        inputs = {name: table.repeat_interleave(plan.n // together, 0) for name, table in inputs.items()}
        fused = model.model.device.type == "cuda" and has_triton()
        write = self._write_many if fused and serves(model.model) else self._generate
        before = swept_rows(model.model.device) if fused else (0, 0)
        begin = time.perf_counter()
        with torch.inference_mode():
            found, forward = write(inputs, work.arm.decoder, together, limit, seeds, coupled)
        looking = time.perf_counter() - begin - found.seconds
        # to the host now: the thread that reads them should not wait for a GPU that is writing the next ones
        host = {name: table.cpu() for name, table in vars(found).items() if isinstance(table, Tensor)}
        found = replace(found, **host)
        swept, rows = swept_rows(model.model.device) if fused else (0, 0)
        return Written(
            lambda: self._texts(found, own.tolist()), time.perf_counter() - start, forward, looking,
            swept - before[0], rows - before[1],
        )  # fmt: skip

    def _encode(self, prompts: list[str]) -> dict[str, Tensor]:
        """Token ids and mask of a batch."""
        key = (*prompts, self.plan.raw, self.system)
        if key not in self.encoded:
            self.encoded[key] = self.language_model.encode(prompts, self.plan.raw, self.system)
        return self.encoded[key]

    def _generate(
        self, inputs: dict[str, Tensor], decoder: str, n: int, limit: int, seeds: Tensor, coupled: bool
    ) -> tuple[Generated, float]:
        """(texts, seconds in the model), by transformers' own loop."""
        model = self.language_model.model
        clock = Clock(model.device)
        hooks = [
            model.register_forward_pre_hook(lambda *_: clock.start()),
            model.register_forward_hook(lambda *_: clock.stop()),
        ]
        try:
            found = generate(
                model,
                inputs["input_ids"],
                decoder,
                attention_mask=inputs["attention_mask"],
                n=n,
                max_new_tokens=limit,
                seeds=seeds,
                trace=self.plan.every,
                coupled=coupled,
            )
        finally:
            for hook in hooks:
                hook.remove()
        return found, clock.seconds()

    def _write_many(
        self, inputs: dict[str, Tensor], decoder: str, n: int, limit: int, seeds: Tensor, coupled: bool
    ) -> tuple[Generated, float]:
        """(texts, seconds in the model), all rows at once from CUDA graphs."""
        model, table = self.language_model, inputs["attention_mask"].bool()
        prompts = [row[own].tolist() for row, own in zip(inputs["input_ids"].cpu(), table.cpu(), strict=True)]
        rows, length = len(prompts) * n, table.shape[1] + limit
        if self.many is None or self.many.room < rows or self.many.length < length:
            self.many = None  # its memory first
            self.many = ManyRows(model.model, rows, length)
        found = self.many.generate(prompts, decoder, n, limit, seeds, model.ends, self.plan.every, coupled)
        return found, self.many.clock.seconds()

    def _texts(self, found: Generated, seeds: list[int]) -> list[Text]:
        assert found.entropy is not None
        assert found.effective_temperature is not None
        looked = found.written[:, :: self.plan.every]
        count = looked.sum(-1)
        entropy = ((found.entropy * looked).sum(-1) / count).tolist()
        telling = tells_temperature(found.effective_temperature, found.entropy) & looked
        tau, known = found.effective_temperature.where(telling, 0.0), telling.sum(-1)
        mean_tau, known = (tau.sum(-1) / known.clamp_min(1)).tolist(), known.tolist()
        lengths, finished = found.lengths.tolist(), found.finished.tolist()
        return [
            Text(
                row // self.plan.n,
                row % self.plan.n,
                seeds[row],
                self.language_model.text(tokens[: lengths[row]]),
                lengths[row],
                "stop" if finished[row] else "length",
                abs(round(entropy[row], 6)),
                round(mean_tau[row], 6) if known[row] else None,
            )
            for row, tokens in enumerate(found.tokens.tolist())
        ]

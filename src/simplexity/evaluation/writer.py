"""Who writes the texts: a model of transformers, a batch at a time, with the seconds its forward passes took."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from simplexity.draw import derive_seeds
from simplexity.engines.transformers import Generated, generate
from simplexity.evaluation.plan import RunPlan, Work, seed_of
from simplexity.evaluation.written import Text, Written
from simplexity.models import LanguageModel, load_model


class Clock:
    """Seconds spent in a model's forward passes; on a GPU told by events, so that nothing waits for them."""

    def __init__(self, model: Any) -> None:
        self.cuda = model.device.type == "cuda"
        self.marks: list[tuple[Any, Any]] = []
        self.hooks = [
            model.register_forward_pre_hook(lambda *_: self.marks.append((self.now(), None))),
            model.register_forward_hook(lambda *_: self.marks.append((self.marks.pop()[0], self.now()))),
        ]

    def now(self) -> Any:
        """A moment."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stop(self) -> float:
        """The seconds so far; the clock is taken off the model."""
        for hook in self.hooks:
            hook.remove()
        if self.cuda:
            torch.cuda.synchronize()
            return sum(start.elapsed_time(end) for start, end in self.marks) / 1e3
        return sum(end - start for start, end in self.marks)


class TransformersWriter:
    """A model of transformers on this machine."""

    def __init__(self, plan: RunPlan, system: str | None, device: str | None = None) -> None:
        self.plan, self.system = plan, system
        self.language_model: LanguageModel = load_model(plan.model, device, plan.dtype)

    def write_all(self, works: Iterable[Work]) -> Iterator[tuple[Work, Written]]:
        """Every batch in turn."""
        for work in works:
            yield work, self.write(work)

    def write(self, work: Work) -> Written:
        """n texts for each question of the batch."""
        plan, model = self.plan, self.language_model
        inputs = model.encode([q.prompt for q in work.questions], plan.raw, self.system)
        room = None if model.context is None else model.context - inputs["input_ids"].shape[1]
        limit = plan.max_new_tokens if room is None else min(plan.max_new_tokens, room)
        seeds = torch.tensor([seed_of(plan, q) for q in work.questions])
        own, together = derive_seeds(seeds, plan.n), plan.n
        if coupled := work.arm.coupled > 1:
            together = work.arm.coupled
            seeds = derive_seeds(seeds, plan.n // together)
            own = seeds.repeat_interleave(together)
        # `generate` couples what it draws for one prompt and one seed: the prompt stands there once for each group
        inputs = {name: table.repeat_interleave(plan.n // together, 0) for name, table in inputs.items()}
        clock, start = Clock(model.model), time.perf_counter()
        try:
            with torch.inference_mode():
                found = generate(
                    model.model,
                    inputs["input_ids"],
                    work.arm.decoder,
                    attention_mask=inputs["attention_mask"],
                    n=together,
                    max_new_tokens=limit,
                    seeds=seeds,
                    trace=plan.every,
                    coupled=coupled,
                )
        finally:
            forward = clock.stop()
        seconds = time.perf_counter() - start
        texts = self._texts(found, own.tolist())
        return Written(texts, seconds, forward, seconds - found.seconds)

    def _texts(self, found: Generated, seeds: list[int]) -> list[Text]:
        assert found.entropy is not None
        assert found.effective_temperature is not None
        looked = found.written[:, :: self.plan.every]
        count = looked.sum(-1)
        entropy = ((found.entropy * looked).sum(-1) / count).tolist()
        tau = found.effective_temperature.nan_to_num(0.0, 0.0, 0.0) * looked
        known = (found.effective_temperature.isfinite() & looked).sum(-1)
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

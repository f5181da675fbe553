"""Who writes the texts: vLLM inside this process, where our plug-in can be watched, a batch of requests at a time."""

# pyright: reportMissingImports=false
# vLLM lives in an environment of its own

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from statistics import fmean
from typing import Any

import torch

from simplexity import embedded
from simplexity.decoders import decoder
from simplexity.draw import derive_seeds
from simplexity.engines.clock import Clock
from simplexity.evaluation.plan import RunPlan, Work, seed_of
from simplexity.evaluation.written import Text, Written
from simplexity.measures import SHARPEST
from simplexity.models import end_tokens, loading, located, prompt_ids

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the plug-in in this process
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB; else nine tenths of the machine, for every worker on it
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm import LLM, SamplingParams

from simplexity.engines.vllm import DecoderProcessor
from simplexity.engines.watching import Watch


@contextmanager
def clocked(runner: Any) -> Iterator[Clock]:
    """A clock that runs in vLLM's model runner until the logits are there; one runner makes those after its step."""
    clock, running = Clock(runner.device), False

    def timed(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **rest: Any) -> Any:
            nonlocal running
            if running:
                return inner(*args, **rest)
            running = True
            clock.start()
            try:
                return inner(*args, **rest)
            finally:
                clock.stop()
                running = False

        return call

    # not hooks on the model: a CUDA graph is replayed without them
    places = [(runner, "execute_model"), (runner.model, "compute_logits")]
    for owner, name in places:
        setattr(owner, name, timed(getattr(owner, name)))
    try:
        yield clock
    finally:
        for owner, name in places:
            delattr(owner, name)


class VLLMWriter:
    """A model in vLLM on this machine."""

    def __init__(self, plan: RunPlan, system: str | None) -> None:
        from transformers import AutoConfig, AutoTokenizer, GenerationConfig

        self.plan, self.system, self.name = plan, system, plan.model or embedded.NAME
        where, file = located(plan.model)
        if file:
            raise ValueError(f"{plan.model}: vLLM is given a folder or a hub name here, not a GGUF file")
        with loading(plan.model, where):
            config = AutoConfig.from_pretrained(where)
            self.tokenizer: Any = AutoTokenizer.from_pretrained(where)
            try:
                ending = GenerationConfig.from_pretrained(where)
            except OSError:  # it has none: as transformers does then
                ending = GenerationConfig.from_model_config(config)
        self.ends = end_tokens(ending, self.tokenizer)
        cuda = torch.cuda.is_available()
        self.llm = LLM(
            model=where,
            dtype=plan.dtype or ("auto" if cuda else "float32"),
            generation_config="vllm",
            max_num_seqs=plan.batch,
            max_model_len=-1,  # what the model reads, or less where memory does not suffice for one such text
            enforce_eager=not cuda,  # compiling on a CPU takes minutes
            # a penalty needs the token written last
            async_scheduling=False if any(decoder(spec).penalises() for spec in plan.decoders) else None,
            use_tqdm_on_load=False,
            seed=0,
        )
        self.room = self.llm.model_config.max_model_len
        self.context = getattr(config, "max_position_embeddings", None) or self.room
        (self.runner,) = self.llm.collective_rpc(lambda worker: worker.model_runner)

    def write_all(self, works: Iterable[Work]) -> Iterator[tuple[Work, Written]]:
        """Every batch in turn."""
        for work in works:
            yield work, self.write(work)

    def write(self, work: Work) -> Written:
        """n texts for each question of the batch."""
        prompts, wanted, seeds = self._requests(work)
        watch = DecoderProcessor.watch = Watch(self.plan.every)
        start = time.perf_counter()
        try:
            with clocked(self.runner) as clock:
                outs = self.llm.generate(prompts, wanted, use_tqdm=False)
        finally:
            DecoderProcessor.watch = None
        seconds = time.perf_counter() - start
        rows = watch.tally.read()
        if set(rows) != {"OK"}:  # vLLM goes on where a decoder fails, and without one
            raise RuntimeError(f"{work.arm} did not decide about every token, of batch {work.number}: {rows}")
        tokens = [list(out.outputs[0].token_ids) for out in outs]
        texts = [self._text(row, seed, ids, watch) for row, (seed, ids) in enumerate(zip(seeds, tokens, strict=True))]
        return Written(lambda: texts, seconds, clock.seconds(), watch.seconds)

    def _requests(self, work: Work) -> tuple[list[Any], list[Any], list[int]]:
        """(prompts, sampling parameters, seeds), one for each text."""
        plan, size = self.plan, work.arm.coupled
        ids = prompt_ids(
            self.tokenizer, [q.prompt for q in work.questions], plan.raw, self.system, False, self.name, self.context
        )
        longest = max(map(len, ids))
        limit = min(plan.max_new_tokens, self.context - longest)
        if longest + limit > self.room:
            raise ValueError(
                f"vLLM has memory for {self.room} tokens of a text, and {longest} + {limit} are asked for: "
                "give it more (VLLM_CPU_KVCACHE_SPACE, in GiB), or ask for fewer"
            )
        asked = torch.tensor([seed_of(plan, q) for q in work.questions])
        seeds = derive_seeds(asked, plan.n // size).repeat_interleave(size).tolist()
        wanted = []
        for row, seed in enumerate(seeds):
            extra = {"decoder": work.arm.decoder, "measure": row}
            if size > 1:
                extra |= {"group": seed, "index": row % size, "size": size}
            # the texts end where transformers would end them, whatever vLLM knows of the model
            ending = {"ignore_eos": True, "stop_token_ids": self.ends, "max_tokens": limit}
            wanted.append(SamplingParams(temperature=1.0, seed=seed, detokenize=False, extra_args=extra, **ending))
        return [{"prompt_token_ids": one} for one in ids for _ in range(plan.n)], wanted, seeds

    def _text(self, row: int, seed: int, ids: list[int], watch: Watch) -> Text:
        looks = [watch.looks[row, step] for step in range(0, len(ids), self.plan.every)]
        known = [tau for entropy, tau in looks if math.isfinite(tau) and entropy > SHARPEST]
        return Text(
            row // self.plan.n,
            row % self.plan.n,
            seed,
            self.tokenizer.decode(ids, skip_special_tokens=True),
            len(ids),
            "stop" if ids[-1] in self.ends else "length",
            abs(round(fmean(entropy for entropy, _ in looks), 6)),
            round(fmean(known), 6) if known else None,
        )

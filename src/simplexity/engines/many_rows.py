"""Thousands of texts of one model at once: each step is replayed from a CUDA graph, and rows that end leave.

transformers launches every operation of a step by itself and pads all texts to the longest. Here the keys and values of
a text lie in a slot of their own, a step is one launch, and it reads what each text has and no more. The texts are
those of `generate` up to the rounding of the model's sums.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from simplexity.context import Context
from simplexity.coupling import Codes
from simplexity.decoders import decoder as as_decoder
from simplexity.draw import derive_seeds
from simplexity.engines.clock import Clock
from simplexity.engines.trace import Trace
from simplexity.engines.transformers import Generated
from simplexity.siblings import Siblings

if TYPE_CHECKING:
    from simplexity.decoding import Decoder

ATTENTION = "simplexity-many-rows"
LOOK = 8  # steps between two looks at which rows have ended: the GPU has to be waited for
SHRINK = 0.7  # of one size of batch is the next
READ = 64  # prompts read at once
MEASURED = 256  # rows measured at once


def serves(model: Any) -> bool:
    """Whether the model's attention is of the kind that is known here: every token sees all before it."""
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    plain = getattr(config, "sliding_window", None) is None or not getattr(config, "use_sliding_window", True)
    known = ("llama", "qwen2", "qwen3", "smollm3", "mistral")
    return config.model_type in known and kinds == {"full_attention"} and plain and size in (32, 64, 128)


class ManyRows:
    """A model with room for `rows` texts of `length` tokens, prompts included."""

    def __init__(self, model: Any, rows: int, length: int) -> None:
        config = model.config
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.model, self.device, self.room, self.length = model, model.device, rows, length
        AttentionInterface.register(ATTENTION, _attention)
        shape = (config.num_hidden_layers, 2, rows, config.num_key_value_heads, length, size)
        self.cache = torch.zeros(shape, dtype=model.dtype, device=self.device)
        # of the row in each place of the batch: where its text lies, its newest token, and how many there are before it
        self.slots, self.tokens, self.lengths = torch.zeros(3, rows, dtype=torch.int64, device=self.device)
        self.graphs: dict[int, tuple[Any, Tensor]] = {}
        self.clock = Clock(self.device)

    def generate(
        self,
        prompts: list[list[int]],
        decoder: str | Decoder,
        n: int,
        max_new_tokens: int,
        seeds: Tensor,
        ends: list[int],
        every: int,
        coupled: bool = False,
    ) -> Generated:
        """n texts for each prompt with its seed, as `generate` would draw them; `every` so many tokens a look at q."""
        chosen, device = as_decoder(decoder), self.device
        if len(prompts) * n > self.room or max(map(len, prompts)) + max_new_tokens > self.length:
            raise ValueError(f"there is room for {self.room} texts of {self.length} tokens, prompts included")
        with self.attached():
            return self._generate(prompts, chosen, n, max_new_tokens, seeds.to(device), ends, every, coupled)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """The model reads with the attention that is known here: it does without a mask, so others must not see it."""
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation(ATTENTION)
        try:
            yield
        finally:
            self.model.set_attn_implementation(before)

    def _generate(
        self,
        prompts: list[list[int]],
        chosen: Decoder,
        n: int,
        max_new_tokens: int,
        seeds: Tensor,
        ends: list[int],
        every: int,
        coupled: bool,
    ) -> Generated:
        device, count, begin = self.device, len(prompts) * n, time.perf_counter()
        group = n if chosen.reads("siblings") else 1  # a text that others are counted with stays as long as they do
        rows = Rows(
            torch.arange(count, device=device),
            derive_seeds(seeds, n),
            Codes.spread(seeds, n, device) if coupled else None,
            Siblings(count, group, device) if chosen.reads("siblings") else None,
            torch.zeros(count, dtype=torch.bool, device=device),
        )
        self.clock.start()
        self.read(prompts, n)
        self.clock.stop()
        written = torch.zeros(count, max_new_tokens, dtype=torch.int64, device=device)
        ended = torch.full((count,), max_new_tokens, dtype=torch.int64, device=device)
        stops = torch.tensor(ends, dtype=torch.int64, device=device)
        unsolved = torch.zeros((), dtype=torch.bool, device=device)
        before = _padded(prompts, n, device) if chosen.penalises() else None
        trace, looks = Trace(every), []
        for step in range(max_new_tokens):
            live = len(rows.slots)
            self.clock.start()
            scores = self.step(live)
            self.clock.stop()
            tokens = None if before is None else torch.cat([before[rows.slots], written[rows.slots, :step]], 1)
            context = Context(tokens, step, rows.seeds, rows.count())
            if rows.codes is not None and rows.siblings is not None:
                rows.codes.respread(rows.siblings)
            tokens, bad = self._draw(chosen, scores, context, rows.codes)
            unsolved |= (bad & ~rows.over).any()
            if step % every == 0:
                looks.append(self._look(trace, chosen, scores, rows, context, tokens, count))
            written[rows.slots, step] = tokens
            self.tokens[:live], self.lengths[:live] = tokens, self.lengths[:live] + 1
            if rows.siblings is not None:
                rows.siblings.follow(tokens)
            over = torch.isin(tokens, stops) & ~rows.over
            ended[rows.slots] = torch.where(over, step + 1, ended[rows.slots])
            rows.over |= over
            if step % LOOK == LOOK - 1 and not self._leave(rows, group):
                break
        if bool(unsolved):
            raise ValueError(f"{chosen}: the model's scores left nothing to draw from in some row")
        seconds = time.perf_counter() - begin - trace.seconds
        finished = torch.isin(written.gather(1, (ended - 1).unsqueeze(-1)).squeeze(-1), stops)
        after = torch.arange(max_new_tokens, device=device) >= ended.unsqueeze(-1)
        there = after[:, ::every][:, : len(looks)]
        entropy, tau = (torch.stack([look[i] for look in looks], -1).masked_fill_(there, 0.0) for i in (0, 1))
        keep = len(looks) * every
        return Generated(
            written.masked_fill_(after, 0)[:, :keep], ended, finished, seconds, {},
            entropy=entropy, effective_temperature=tau,
        )  # fmt: skip

    def _draw(self, chosen: Decoder, scores: Tensor, context: Context, codes: Codes | None) -> tuple[Tensor, Tensor]:
        """(tokens, which rows could not be solved); a GPU is not waited for, and a CPU raises at once."""
        if not scores.is_cuda:
            return chosen.sample(scores, context=context, codes=codes), torch.zeros(len(scores), dtype=torch.bool)
        tokens, status = chosen.sample(scores, context=context, codes=codes, validate=False)
        return tokens.clamp_min(0), status != 0  # the texts go on until it is noticed: −1 is no token

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """What transformers calls to keep the keys and values `[B, heads, 1, size]` of the newest tokens."""
        rows = len(keys)
        for kept, new in zip(self.cache[layer_idx], (keys, values), strict=True):
            kept[self.slots[:rows], :, self.lengths[:rows]] = new[:, :, 0]
        return self.cache[layer_idx, 0], self.cache[layer_idx, 1]

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """The newest token of each row looks at its own text, `[B, heads, 1, size] -> [B, 1, heads, size]`."""
        rows = len(query)
        slots, lengths, asked = self.slots[:rows], self.lengths[:rows] + 1, query[:, :, 0].contiguous()
        if query.is_cuda:
            from simplexity.kernels.gpu_attention import attention

            return attention(asked, keys, values, slots, lengths, scale).unsqueeze(1)
        mask = torch.arange(keys.shape[2]) < lengths.unsqueeze(-1)
        found = torch.nn.functional.scaled_dot_product_attention(
            query, keys[slots], values[slots], mask[:, None, None], scale=scale, enable_gqa=True
        )
        return found.transpose(1, 2)

    def read(self, prompts: list[list[int]], n: int) -> None:
        """Keys and values of the prompts up to their last token, copied to the slots of their n texts."""
        rows = len(prompts) * n
        self.slots[:] = torch.arange(self.room, device=self.device)
        before = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self.device)
        self.lengths[:rows] = before.repeat_interleave(n)
        self.tokens[:rows] = torch.tensor([p[-1] for p in prompts], device=self.device).repeat_interleave(n)
        for start in range(0, len(prompts), READ):
            part = prompts[start : start + READ]
            longest = max(map(len, part)) - 1
            if longest == 0:
                continue
            # padded on the right, where no token that counts looks
            table = torch.tensor([p[:-1] + [0] * (longest - len(p) + 1) for p in part], device=self.device)
            cache: Any = DynamicCache(config=self.model.config)
            self.model(input_ids=table, past_key_values=cache, use_cache=True, logits_to_keep=1)
            for layer, own in zip(cache.layers, self.cache, strict=True):
                for kept, new in zip(own, (layer.keys, layer.values), strict=True):
                    kept[start * n : (start + len(part)) * n, :, :longest] = new.repeat_interleave(n, 0)

    def step(self, live: int) -> Tensor:
        """The scores after the newest token of the first `live` rows, `[live, V]`."""
        size = self.room
        while size * SHRINK >= live and size > 32:
            size = -(-int(size * SHRINK) // 8) * 8
        if self.device.type != "cuda":
            return self._forward(live)
        if size not in self.graphs:
            self._capture(size)
        graph, scores = self.graphs[size]
        graph.replay()
        return scores[:live]

    def _forward(self, size: int) -> Tensor:
        at = self.lengths[:size].unsqueeze(-1)
        found = self.model(
            input_ids=self.tokens[:size].unsqueeze(-1), position_ids=at, past_key_values=self, use_cache=True, rows=self
        )
        return found.logits[:, -1]

    def _capture(self, size: int) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._forward(size)  # what is compiled or chosen at first use must not be captured
        torch.cuda.current_stream().wait_stream(stream)
        graph, pool = torch.cuda.CUDAGraph(), next((g.pool() for g, _ in self.graphs.values()), None)
        with torch.cuda.graph(graph, pool=pool):
            scores = self._forward(size)
        self.graphs[size] = graph, scores

    def _look(
        self, trace: Trace, chosen: Decoder, scores: Tensor, rows: Rows, context: Context, tokens: Tensor, count: int
    ) -> Tensor:
        """q's entropy and effective temperature, `[2, count]`, by slot."""
        if scores.is_cuda:
            torch.cuda.synchronize()  # measuring waits for the GPU: what was queued before is not its own time
        found = torch.zeros(2, count, dtype=torch.float64, device=self.device)
        for start in range(0, len(tokens), MEASURED):
            part = slice(start, start + MEASURED)
            own = {name: getattr(context, name) for name in ("tokens", "seeds", "siblings")}
            own = {name: None if table is None else table[part] for name, table in own.items()}
            trace.add(chosen, scores[part], replace(context, **own), tokens[part])
            found[0, rows.slots[part]] = trace.entropy.pop()
            found[1, rows.slots[part]] = trace.effective_temperature.pop()
        return found

    def _leave(self, rows: Rows, group: int) -> bool:
        """Move the rows that go on to the front; False where none does. A group stays while one of its texts does."""
        stay = (~rows.over).view(-1, group).any(-1).repeat_interleave(group)
        kept = stay.nonzero().squeeze(-1)  # waits
        if len(kept) == len(stay):
            return True
        order = torch.cat([kept, (~stay).nonzero().squeeze(-1)])  # those that left keep slots of their own
        for table in (self.slots, self.tokens, self.lengths):
            table[: len(stay)] = table[: len(stay)][order]
        rows.keep(kept, group)
        return len(kept) > 0


@dataclass
class Rows:
    """What is known of each text that goes on, `[rows]`, groups side by side."""

    slots: Tensor
    seeds: Tensor
    codes: Codes | None
    siblings: Siblings | None
    over: Tensor  # whether it has ended: it waits for the others of its group, or for the next look

    def count(self) -> Tensor | None:
        """How many texts of the group are the same so far."""
        return None if self.siblings is None else self.siblings.count

    def keep(self, kept: Tensor, group: int) -> None:
        """Only these rows."""
        self.slots, self.seeds, self.over = self.slots[kept], self.seeds[kept], self.over[kept]
        if self.codes is not None:
            self.codes = replace(self.codes, code=self.codes.code[kept], seeds=self.codes.seeds[kept])
        if self.siblings is not None:
            self.siblings.same = self.siblings.same[kept[::group] // group]


def _padded(prompts: list[list[int]], n: int, device: torch.device) -> Tensor:
    """The prompts of the n texts each, padded on the left with −1."""
    longest = max(map(len, prompts))
    table = torch.tensor([[-1] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
    return table.repeat_interleave(n, 0)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    rows: ManyRows | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it; prompts are read by torch's own attention, new tokens by that of `ManyRows`."""
    if rows is None:
        return sdpa_attention_forward(module, query, key, value, None, **rest)
    return rows.attend(query, key, value, rest["scaling"]), None

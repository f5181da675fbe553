"""Thousands of texts of one model at once: each step is replayed from a CUDA graph, and rows that end leave.

transformers launches every operation of a step by itself and pads all texts to the longest. Here the keys and values of
a text lie in a slot of their own, a step is one launch, and it reads what each text has and no more. The texts are
those of `generate` up to the rounding of the model's sums.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from simplexity.context import Context
from simplexity.decoders import decoder as as_decoder
from simplexity.engines.clock import Clock
from simplexity.engines.live_rows import Leaving, Rows
from simplexity.engines.trace import Trace
from simplexity.engines.transformers import Generated
from simplexity.kernels import respread

if TYPE_CHECKING:
    from simplexity.coupling import Codes
    from simplexity.decoding import Decoder

ATTENTION = "simplexity-many-rows"
LOOK = 8  # steps between two questions which rows have ended: moving the others takes as long as a step
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
        self.places = torch.arange(rows, device=self.device)
        self.graphs: dict[int, tuple[Any, Tensor]] = {}
        if self.device.type == "cuda":
            self.stream, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
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
        rows = Rows.of(prompts, chosen, n, max_new_tokens, seeds, ends, coupled, self.room)
        self.clock.start()
        self.read(prompts, n)
        self.clock.stop()
        trace, looks, leaving = Trace(every), [], Leaving(device)
        turns: dict[int, Any] = {}
        alike = False
        for step in range(max_new_tokens):
            self.clock.start()
            size, scores = self.step(rows.live)
            self.clock.stop()
            scores = scores[: rows.whole(size)]
            if step == 0:
                alike = rows.alike() and chosen.has_kernel(scores, rows.context(self.slots, len(scores), rows.step))
            if not alike:
                self._turn(chosen, rows, scores[: rows.live], step)
            elif size in turns:
                turns[size].replay()
            else:
                self._turn(chosen, rows, scores)
                turns[size] = self._captured(lambda scores=scores: self._turn(chosen, rows, scores))
            if step % every == 0:
                looks.append(self._look(trace, chosen, scores[: rows.live], rows.context(self.slots, rows.live, step)))
            if step % LOOK == LOOK - 1:
                self._leave(rows, leaving)
                if rows.live == 0:
                    break
        if bool(rows.unsolved):
            raise ValueError(f"{chosen}: the model's scores left nothing to draw from in some row")
        seconds = time.perf_counter() - begin - trace.seconds
        written, ended = rows.written[:count], rows.ended[:count]
        finished = torch.isin(written.gather(1, (ended - 1).unsqueeze(-1)).squeeze(-1), rows.stops)
        after = torch.arange(max_new_tokens, device=device) >= ended.unsqueeze(-1)
        there = after[:, ::every][:, : len(looks)]
        found = torch.stack(looks, -1)[:, :count].masked_fill_(there, 0.0)
        keep = len(looks) * every
        return Generated(
            written.masked_fill_(after, 0)[:, :keep], ended, finished, seconds, {},
            entropy=found[0], effective_temperature=found[1],
        )  # fmt: skip

    def _turn(self, chosen: Decoder, rows: Rows, scores: Tensor, step: int | None = None) -> None:
        """Draw a token for each of the first places, keep it, and see whether it ends a text.

        All on the device and in place, so that it can be captured; the step is then read from there as well. Texts that
        have left may stand in the last places: they write over their own end, and grow no longer.
        """
        size = len(scores)
        slots, over, siblings, codes = self.slots[:size], rows.over[:size], rows.siblings_of(size), rows.codes_of(size)
        if rows.counts is not None and siblings is not None:
            rows.counts[:size] = respread(codes, siblings)
        context = rows.context(self.slots, size, rows.step if step is None else step)
        tokens, bad = self._draw(chosen, scores, context, codes)
        if rows.codes is not None and codes is not None:
            rows.codes.code[:size] = codes.code
        rows.unsolved |= (bad & ~over).any()
        rows.written[slots, rows.step.view(1)] = tokens  # an index without a dimension would be read on the host
        self.tokens[:size] = tokens
        self.lengths[:size] += self.places[:size] < rows.alive
        if siblings is not None:
            siblings.follow(tokens)
        rows.step += 1
        new = (tokens.unsqueeze(-1) == rows.stops).any(-1) & ~over  # `isin` may sort, and wait for the GPU
        rows.ended[slots] = torch.where(new, rows.step, rows.ended[slots])
        over |= new

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

    def step(self, live: int) -> tuple[int, Tensor]:
        """(for how many places, the scores after their newest tokens, `[places, V]`): at least the first `live`."""
        if self.device.type != "cuda":
            return live, self._forward(live)
        size = self.room
        while size * SHRINK >= live and size > 32:
            size = -(-int(size * SHRINK) // 8) * 8
        if size not in self.graphs:
            self._forward(size)  # what is compiled or chosen at first use must not be captured
            made: list[Tensor] = []
            self.graphs[size] = self._captured(lambda: made.append(self._forward(size))), made[-1]
        graph, scores = self.graphs[size]
        graph.replay()
        return size, scores

    def _forward(self, size: int) -> Tensor:
        at = self.lengths[:size].unsqueeze(-1)
        found = self.model(
            input_ids=self.tokens[:size].unsqueeze(-1), position_ids=at, past_key_values=self, use_cache=True, rows=self
        )
        return found.logits[:, -1]

    def _captured(self, run: Callable[[], Any]) -> Any:
        """A graph of what `run` launches. All share one pool of memory: they are replayed one after the other.

        Not by `torch.cuda.graph`, which waits for the GPU and gives memory back first: sizes change in mid-run. Other
        threads grade meanwhile, and may use the GPU.
        """
        try:
            return self._capture(run)
        except torch.OutOfMemoryError:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            return self._capture(run)

    def _capture(self, run: Callable[[], Any]) -> Any:
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                with suppress(RuntimeError):  # it says that the capture failed, not why
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph

    def _look(self, trace: Trace, chosen: Decoder, scores: Tensor, context: Context) -> Tensor:
        """q's entropy and effective temperature, `[2, room]`, by slot."""
        if scores.is_cuda:
            torch.cuda.synchronize()  # measuring waits for the GPU: what was queued before is not its own time
        found = torch.zeros(2, self.room, dtype=torch.float64, device=self.device)
        for start in range(0, len(scores), MEASURED):
            part = slice(start, min(start + MEASURED, len(scores)))
            own = {name: getattr(context, name) for name in ("tokens", "seeds", "siblings")}
            own = {name: None if table is None else table[part] for name, table in own.items()}
            trace.add(chosen, scores[part], replace(context, **own), self.tokens[part])
            found[0, self.slots[part]] = trace.entropy.pop()
            found[1, self.slots[part]] = trace.effective_temperature.pop()
        return found

    def _leave(self, rows: Rows, leaving: Leaving) -> None:
        """Move the rows that go on to the front. A group stays while one of its texts does."""
        live, group = rows.live, rows.group
        over = leaving.answer()
        if over is not None:
            stay = (~over).view(-1, group).any(-1).repeat_interleave(group)
            kept = stay.nonzero().squeeze(-1)
            if len(kept) < live:
                # those that left keep slots of their own
                order = torch.cat([kept, (~stay).nonzero().squeeze(-1)]).to(self.device, non_blocking=True)
                for table in (self.slots, self.tokens, self.lengths, *rows.tables()):
                    table[:live] = table[:live][order]
                rows.keep(len(kept), order)
        leaving.ask(rows.over[: rows.live])


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

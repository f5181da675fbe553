"""transformers: `model.generate` with any decoder of this library in place of its own sampling.

    model.generate(**inputs, custom_generate=Sampling("bok"), max_new_tokens=50)

The decoder sees the model's raw logits and draws the token itself; transformers is handed a row in which only
that token is left, so nothing that comes after can change the draw.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import StopStringCriteria

from simplexity.context import Context
from simplexity.coupling import Codes
from simplexity.decoders import decoder as as_decoder
from simplexity.draw import Seeds, as_seeds, derive_seeds
from simplexity.engines.ends import Ends
from simplexity.engines.other_model import OtherModel, Reading
from simplexity.engines.roomy_cache import roomy_cache
from simplexity.engines.trace import Trace
from simplexity.kernels import respread
from simplexity.masks import Masker, allowed
from simplexity.siblings import Siblings

if TYPE_CHECKING:
    from simplexity.decoding import Decoder

# How many tokens to write, and which are allowed, is the caller's business; these do not reshape the rest.
KEPT = ("MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "PrefixConstrainedLogitsProcessor")

# What transformers would do to the scores before or after us, and the value with which it does nothing.
NEUTRAL: dict[str, Any] = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": None, "top_h": None, "typical_p": 1.0,
    "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "bad_words_ids": None, "sequence_bias": None,
    "suppress_tokens": None, "begin_suppress_tokens": None, "forced_bos_token_id": None, "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None, "guidance_scale": None, "watermarking_config": None,
    "renormalize_logits": None, "remove_invalid_values": None, "penalty_alpha": None, "dola_layers": None,
}  # fmt: skip


Rewards = Tensor | Callable[[Tensor, int], Tensor]
"""`[..., V]`, or a function of the tokens so far `[rows, T]`, prompt included, and the step that gives `[rows, V]`."""


class DecoderProcessor(LogitsProcessor):
    """A logits processor that leaves one token a row: the one its decoder drew.

    `seeds`: one for each row; without them draws come from `generator`, or torch's global one. `mode` takes the mode
    of q instead. The step is the number of tokens written since the first call, or since there were `start` tokens.
    `other` is a second model that reads along, `rewards` are what `controlled` climbs, and `masks` say at every step
    which tokens may come next. `live` tells which rows have not ended; without it all count as unfinished. `padding`
    `[rows, length]` is True where the prompts are padded: no penalty is for tokens that nobody wrote. With `codes` the
    rows of a group are spread over the tree of texts; seeds then only serve decoders with a random part of their own.
    `group` samples of a prompt stand side by side, for decoders that count how many still share their text.
    """

    def __init__(
        self,
        decoder: str | dict[str, Any] | Decoder,
        seeds: Seeds | None = None,
        generator: torch.Generator | None = None,
        mode: bool = False,
        trace: Trace | None = None,
        start: int | None = None,
        other: OtherModel | None = None,
        rewards: Rewards | None = None,
        masks: Sequence[Masker] = (),
        live: Callable[[], Tensor | None] = lambda: None,
        padding: Tensor | None = None,
        codes: Codes | None = None,
        group: int = 1,
    ) -> None:
        if codes is not None and (generator is not None or mode):
            raise ValueError("coupled draws come from their codes: give no generator and not mode")
        if seeds is not None and generator is not None:
            raise ValueError("give a generator or seeds, not both")
        self.decoder = as_decoder(decoder)
        self.seeds, self.generator, self.mode = seeds, generator, mode
        self.trace, self.start, self.last = trace, start, -1
        self.other, self.rewards, self.masks, self.live = other, rewards, masks, live
        self.reading: Reading | None = None
        self.codes, self.group = codes, group
        self.siblings: Siblings | None = None
        self.padding = padding if self.decoder.penalises() else None  # nothing else looks that far back

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Scores `[rows, V]` in which one token a row is left."""
        length = input_ids.shape[1]
        if self.start is None or length not in (self.start, self.last + 1):
            self.start = length  # a new text begins
        self.last, step = length, length - self.start
        if self.codes is not None and (isinstance(self.codes.step, Tensor) or self.codes.step != step):
            raise ValueError(f"these codes have drawn {self.codes.step} tokens, not {step}: each text needs its own")
        seeds = None if self.seeds is None else as_seeds(_listed(self.seeds), scores.shape[:-1], scores.device)
        written = input_ids[:, self.start :]
        other, mask = self._other(written, scores.shape[-1]), self._mask(written, scores.shape[-1])
        if other is not None and other.shape[-1] < scores.shape[-1]:
            other, mask = _widened(other, scores.shape[-1], mask)
        rewards = self.rewards(input_ids, step) if callable(self.rewards) else self.rewards
        tokens = input_ids
        if self.padding is not None:
            tokens = torch.cat([input_ids[:, : self.start].masked_fill(self.padding, -1), written], 1)
        context = Context(tokens, step, seeds, self._siblings(written), other, rewards, mask)
        if self.codes is not None:
            if self.siblings is not None:
                respread(self.codes, self.siblings)
            tokens = self.decoder.sample(scores, step=step, context=context, codes=self.codes)
        elif self.mode:
            tokens = self.decoder.mode(scores, context=context)
        else:
            tokens = self.decoder.sample(scores, self.generator, seeds, step, context)
        if self.trace is not None and step % self.trace.every == 0:
            self.trace.add(self.decoder, scores, context, tokens)
        return torch.full_like(scores, -torch.inf).scatter_(-1, tokens.unsqueeze(-1), 0.0)

    def _other(self, written: Tensor, size: int) -> Tensor | None:
        """The other model's logits `[rows, V]`, of fewer tokens where it has fewer."""
        if self.other is None:
            return None
        if not written.shape[1]:
            self.reading = Reading(self.other, len(written))
        assert self.reading is not None
        return self.reading.after(written)[:, :size].to(written.device)

    def _siblings(self, written: Tensor) -> Tensor | None:
        """How many samples of each row's group share its text, `[rows]`."""
        if not self.decoder.reads("siblings"):
            return None
        if self.siblings is None or not written.shape[1]:
            self.siblings = Siblings(len(written), self.group, written.device)
        else:
            self.siblings.follow(written[:, -1])
        return self.siblings.count

    def _mask(self, written: Tensor, size: int) -> Tensor | None:
        if not self.masks:
            return None
        live = self.live()
        if live is None:
            live = torch.ones(len(written), dtype=torch.bool, device=written.device)
        return allowed(self.masks, written, live, size)


class Sampling:
    """For `model.generate(..., custom_generate=Sampling("bok"))`: everything about the draw is the decoder's.

    Sampling settings and penalties of the model's own generation_config are not applied, and a warning says which.
    Stopping criteria and `num_return_sequences` (with do_sample=True) work as always; a streamer is given here, because
    transformers does not hand its own on to a `custom_generate`, and so are `processors` of transformers' own classes
    that the scores are to go through first: given to `generate` they cannot be told from those of the configuration.
    `coupled` spreads the samples of a prompt over the tree of texts, each one still an exact draw.
    `seeds` are one for each prompt, from which those of its samples are derived, and so are the prompts of `other`, or
    one for all; further arguments are those of `DecoderProcessor`. `settings` holds afterwards what was not applied.
    """

    def __init__(
        self,
        decoder: str | dict[str, Any] | Decoder,
        seeds: Seeds | None = None,
        streamer: Any = None,
        processors: Sequence[Any] = (),
        other: OtherModel | None = None,
        coupled: bool = False,
        **options: Any,
    ) -> None:
        if coupled and (options.get("mode") or options.get("generator")):
            raise ValueError("coupled draws come from seeds: give no generator and not mode")
        self.coupled = coupled
        self.decoder, self.seeds, self.streamer, self.options = as_decoder(decoder), seeds, streamer, options
        self.processors, self.other = processors, other
        self.settings: dict[str, Any] = {}
        self.ends = Ends()

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        **rest: Any,
    ) -> Any:
        """What transformers calls once everything is prepared."""
        config = copy.copy(generation_config)
        if (config.num_beams or 1) > 1:
            raise ValueError(f"num_beams={config.num_beams}: a decoder draws tokens one by one, pass num_beams=1")
        self.settings = distorting(config)
        kept = [p for p in logits_processor or [] if type(p).__name__ in KEPT or not _built_in(p)]
        _say(self.settings, [p for p in logits_processor or [] if p not in kept and p not in self.processors])
        kept = [*self.processors, *(p for p in kept if p not in self.processors)]
        self.ends = Ends(stopping_criteria or [])
        config.do_sample = False  # the draw is ours; transformers takes the one token left
        seeds, n = self.seeds, config.num_return_sequences or 1
        prompts, codes = len(input_ids) // n, None
        if self.coupled:
            seeds = torch.randint(-(2**63), 2**63 - 1, (prompts,)) if seeds is None else seeds
            codes = Codes.spread(as_seeds(_listed(seeds), torch.Size([prompts]), input_ids.device), n, input_ids.device)
        if seeds is not None:
            seeds = derive_seeds(as_seeds(_listed(seeds), torch.Size([prompts]), input_ids.device), n)
        other = None if self.other is None else self.other.repeated(prompts, n)
        seen = rest.get("attention_mask")
        known: dict[str, Any] = {
            "codes": codes,
            "group": n,
            "other": other,
            "live": self.ends.live,
            "padding": None if seen is None else seen == 0,
        }
        own = DecoderProcessor(self.decoder, seeds, start=input_ids.shape[1], **known, **self.options)
        if self.streamer is not None:
            self.streamer.put(input_ids.cpu())
        sample: Any = getattr(GenerationMixin, "_sample")  # noqa: B009
        return sample(
            model,
            input_ids,
            logits_processor=LogitsProcessorList([*kept, own]),
            stopping_criteria=self.ends,
            generation_config=config,
            streamer=self.streamer,
            **rest,
        )


def distorting(config: Any) -> dict[str, Any]:
    """The settings of a generation_config, beyond transformers' own defaults, that would change the distribution."""
    found = {name: getattr(config, name, None) for name in NEUTRAL}
    usual = GenerationConfig._get_default_generation_params()  # top_k=50 among them: nobody asked for it
    return {
        name: value
        for name, value in found.items()
        if value is not None and value not in (NEUTRAL[name], usual.get(name, NEUTRAL[name]))
    }


@dataclass(frozen=True, eq=False)
class Generated:
    """Texts as token ids, `[rows, T]`, the n samples of a prompt side by side; after a row's end, padding."""

    tokens: Tensor
    lengths: Tensor  # [rows], the end token included
    finished: Tensor  # [rows]: ended by an end token or a stop string, not by the limit
    seconds: float  # without what the tracing took
    settings: dict[str, Any]  # of the model's generation_config, not applied
    log_q: Tensor | None = None  # [rows, T], under the decoder; 0 after the end
    log_p: Tensor | None = None  # [rows, T], under the model at temperature 1
    entropy: Tensor | None = None  # [rows, T], of q in nats; T/every columns where not every step was traced
    effective_temperature: Tensor | None = None
    best: Tensor | None = None  # [rows, T]: the model's own best token was chosen

    @property
    def written(self) -> Tensor:
        """True for the tokens that count, `[rows, T]`."""
        return torch.arange(self.tokens.shape[1], device=self.lengths.device) < self.lengths.unsqueeze(-1)


def generate(
    model: Any,
    input_ids: Tensor,
    decoder: str | dict[str, Any] | Decoder = "softmax",
    n: int = 1,
    max_new_tokens: int = 128,
    seeds: Seeds | None = None,
    generator: torch.Generator | None = None,
    mode: bool = False,
    trace: bool | int = False,
    streamer: Any = None,
    stop: Sequence[str] = (),
    tokenizer: Any = None,
    other: OtherModel | None = None,
    rewards: Rewards | None = None,
    masks: Sequence[Masker] = (),
    coupled: bool = False,
    **options: Any,
) -> Generated:
    """n texts for each of the prompts `[prompts, length]`, padded on the left, drawn from the decoder's q.

    seeds:   one for each prompt; sample i of a prompt then depends on its seed, i and its logits alone.
    mode:    take the mode of q at each step instead of drawing.
    trace:   also return log q and log p of every token, q's entropy and its effective temperature; a number: of the
             first token and every so many after it, because this costs as much as several draws.
    stop:    strings that end a text; they need the `tokenizer`.
    other:   a second model that reads along, or the same one under another prompt, for the decoders that need its
             logits. A token that only one of the two models has is forbidden.
    rewards: what each next token is worth, for `controlled`.
    masks:   what may come next at each step: grammars, banned strings, token sets; all of them hold.
    coupled: the n texts of a prompt share evenly spread codes and differ more than independent ones would.
    options: what else `model.generate` takes: attention_mask, stopping_criteria, …
    """
    if n < 1 or max_new_tokens < 1:
        raise ValueError(f"n and max_new_tokens must be at least 1, got {n} and {max_new_tokens}")
    length = input_ids.shape[1]
    check_room(model, length, max_new_tokens, "the")
    if other is not None:
        check_room(other.model, other.input_ids.shape[1], max_new_tokens, "the other model's")
    record = Trace(int(trace)) if trace else None
    own = options.get("logits_processor") or ()
    beyond: dict[str, Any] = {"rewards": rewards, "masks": masks, "coupled": coupled}
    sampling = Sampling(decoder, seeds, streamer, own, other, generator=generator, mode=mode, trace=record, **beyond)
    if stop:
        if tokenizer is None:
            raise ValueError("stop strings need the tokenizer")
        rules = options.pop("stopping_criteria", None) or []
        options["stopping_criteria"] = StoppingCriteriaList([*rules, StopStringCriteria(tokenizer, list(stop))])
    if "cache_implementation" not in options and "use_cache" not in options and model.generation_config.use_cache:
        options.setdefault("past_key_values", roomy_cache(model.config))
    start = time.perf_counter()
    with warnings.catch_warnings():
        # transformers' advice on settings that are not applied here
        warnings.filterwarnings("ignore", message=".*generation flags.*")
        output = model.generate(
            input_ids,
            custom_generate=sampling,
            do_sample=True,
            num_beams=1,
            num_return_sequences=n,
            max_new_tokens=max_new_tokens,
            return_dict_in_generate=False,
            **options,
        )
    seconds = time.perf_counter() - start - (0.0 if record is None else record.seconds)
    tokens = output[:, length:]
    assert sampling.ends.lengths is not None
    ended = (sampling.ends.lengths - length).clamp(max=tokens.shape[1])
    finished = ended > 0
    lengths = torch.where(finished, ended, tokens.shape[1])
    after = torch.arange(tokens.shape[1], device=tokens.device) >= lengths.unsqueeze(-1)
    measured = {}
    for name in ("log_q", "log_p", "entropy", "effective_temperature", "best") if record is not None else ():
        there = after[:, :: int(trace)]
        steps = getattr(record, name)[: there.shape[1]]  # a stop noticed late leaves more steps than tokens
        measured[name] = torch.stack(steps, -1).masked_fill_(there, 0)
    return Generated(tokens, lengths, finished, seconds, sampling.settings, **measured)


def check_room(model: Any, length: int, new: int, whose: str) -> None:
    """Raise a ValueError where a prompt of this length and so many new tokens are more than the model reads."""
    context = getattr(model.config, "max_position_embeddings", None)
    if context is not None and length + new > context:
        raise ValueError(
            f"{whose} prompt has {length} tokens and {new} are to be written, but the model reads {context} at most"
        )


def _widened(other: Tensor, size: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Logits for all `size` tokens, and a mask without those that were not there."""
    known = torch.arange(size, device=other.device) < other.shape[-1]
    wide = torch.nn.functional.pad(other, (0, size - other.shape[-1]))
    return wide, known.expand(len(other), size) if mask is None else mask & known


def _listed(seeds: Seeds) -> Sequence[int] | Tensor:
    return [seeds] if isinstance(seeds, int) else seeds


def _built_in(processor: Any) -> bool:
    return type(processor).__module__ == logits_process.__name__


def _say(settings: dict[str, Any], dropped: Sequence[Any]) -> None:
    said = [f"{name}={value}" for name, value in settings.items()]
    # what a setting is called is part of its processor's name: TopKLogitsWarper, NoRepeatNGramLogitsProcessor
    words = {name.replace("_", "") for name in (*settings, "temperature", "top_k", "bad_words", "no_repeat_ngram")}
    said += [name for p in dropped if not any(word in (name := type(p).__name__).lower() for word in words)]
    if said:
        warnings.warn(
            f"not applied, the decoder alone decides: {', '.join(said)} "
            "(from the model's generation_config or the call)",
            UserWarning,
            stacklevel=4,
        )

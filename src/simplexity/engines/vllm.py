"""vLLM: any decoder of this library, chosen by each request, in place of vLLM's own sampling.

    {"model": …, "prompt": …, "vllm_xargs": {"decoder": "bok:k=16"}}

vLLM finds the plug-in by its entry point. The rows of one batch may carry different decoders, or none: a row's logits
become log q, from which vLLM draws as it would from any logits, with the request's seed. Both of vLLM's interfaces are
served by one class: that of its first model runner (rows of a batch) and that of the second (slots of requests).
"""

# pyright: reportMissingImports=false
# vLLM lives in an environment of its own

from __future__ import annotations

import logging
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.v1.engine import input_processor
from vllm.v1.sample.logits_processor import LogitsProcessor as RowProcessor
from vllm.v1.sample.logits_processor import process_dict_updates
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as SlotProcessor

from simplexity.context import Context
from simplexity.engines.request_codes import RequestCode, place_of, request_code
from simplexity.engines.rows_by_decoder import (
    Tally,
    parsed,
    refuse_distorting,
    refuse_needy,
    refuse_siblings,
    reshape,
    to_device,
)
from simplexity.engines.watching import Watch

if TYPE_CHECKING:
    from torch import Tensor
    from vllm import SamplingParams
    from vllm.config import VllmConfig

    from simplexity.decoding import Decoder

log = logging.getLogger("vllm.simplexity")  # below vLLM's own logger, so that its settings hold

# What vLLM would do to log q before it draws, and the values with which it does nothing. A bias, banned words and
# grammars come before the decoder: they change its scores, and q is exact for those.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "temperature": (1.0,), "top_p": (1.0,), "top_k": (0, -1), "min_p": (0.0,),
    "presence_penalty": (0.0,), "frequency_penalty": (0.0,), "repetition_penalty": (1.0,),
}  # fmt: skip


def decoder_of(params: SamplingParams) -> Decoder | None:
    """The decoder a request names, None without one; a ValueError where it names none that can be had."""
    spec = (params.extra_args or {}).get("decoder")
    if spec is None:
        return None
    if not isinstance(spec, str):
        raise ValueError(f"decoder must be a spec such as 'top-p:p=0.9', got {spec!r}")
    return parsed(spec)


class DecoderProcessor(RowProcessor, SlotProcessor):
    """Turns the logits of requests that name a decoder into log q; requests without one are left alone."""

    dropped: str | None = None  # why this engine does not call us at all
    late: bool = False  # whether it asks for a token before it has noted the one before
    drafts: bool = False  # whether it asks for several tokens of a request at once
    watch: Watch | None = None  # who looks on, at requests with a `measure`; only the engine's own process can

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse what cannot be served as asked: vLLM answers with status 400 and these words."""
        named = decoder_of(sampling_params)
        extra = sampling_params.extra_args or {}
        place = place_of(extra)
        if extra.get("measure") is not None and cls.watch is None:
            raise ValueError("measure: only a program that holds the engine in its own process can look on")
        if named is None:
            if place is not None:
                raise ValueError("coupled draws need a decoder beside group, index and size: softmax is vLLM's own")
            return
        if place is not None and cls.drafts:
            raise ValueError("coupled draws cannot be served while vLLM decodes speculatively")
        if place is not None and sampling_params.n != 1:
            raise ValueError(f"n={sampling_params.n}: coupled draws are one request for each index of the group")
        if cls.dropped is not None:
            raise ValueError(f"a decoder cannot be served here: {cls.dropped}")
        refuse_needy(named, "vLLM")
        refuse_siblings(named, "vLLM")
        if cls.late and named.penalises():
            raise ValueError(
                "a penalty inside a decoder needs the token written last, which vLLM's asynchronous scheduling brings "
                "too late: start the server with --no-async-scheduling"
            )
        refuse_distorting({name: getattr(sampling_params, name) for name in NEUTRAL}, NEUTRAL)

    def __init__(self, vllm_config: VllmConfig, device_or_states: Any, is_pin_memory: bool = False) -> None:
        """As the first model runner calls it, with a device, and the second, with its requests' state."""
        self.states = device_or_states
        self.device = torch.device(getattr(device_or_states, "device", device_or_states))
        self.requests: dict[int, Request] = {}  # by the batch's row, or by the request's slot
        self.tally = Tally()

    def is_argmax_invariant(self) -> bool:
        """False: called before the temperature, and for greedy requests too."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """First runner: rows were added, moved or removed."""
        process_dict_updates(self.requests, batch_update, self._request)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Second runner: a slot has a new request; whether we have anything to do with it."""
        self.requests.pop(req_idx, None)
        if (request := self._request(sampling_params)) is not None:
            self.requests[req_idx] = request
        return request is not None

    def apply(self, logits: Tensor, ctx: Any = None) -> Tensor:
        """log q in the rows whose requests name a decoder, in place."""
        if not self.requests:
            return logits
        slots = range(len(logits)) if ctx is None else _slots(len(logits), ctx)
        requests = [self.requests.get(slot) for slot in slots]
        if any(requests):
            tokens = None
            if any(request is not None and request.decoder.penalises() for request in requests):
                tokens = _tokens(requests, logits.device) if ctx is None else _stored_tokens(self.states, ctx)
            decoders = [None if request is None else request.decoder for request in requests]
            codes = [None if request is None else request.code for request in requests]
            codes, steps = codes if any(codes) else None, None
            if codes is not None or self.watch is not None:
                steps = _steps(requests, logits.device) if ctx is None else _stored_steps(self.states, ctx)
            context = Context(tokens=tokens, step=0 if codes is None or steps is None else steps)
            if self.watch is None or steps is None:
                status = reshape(logits, decoders, context, codes=codes)
            else:
                names = [None if request is None else request.name for request in requests]
                status = self.watch.reshape(logits, decoders, context, codes, names, steps.tolist())
            self.tally.add(status)
        return logits

    def _request(
        self, params: SamplingParams, prompt: list[int] | None = None, written: list[int] | None = None
    ) -> Request | None:
        try:
            extra = params.extra_args or {}
            named, place = decoder_of(params), place_of(extra)
            code = None if place is None else request_code(place, self.device)
        except Exception:  # it passed validate_params, or came around it; the engine must live
            log.exception("a request's decoder cannot be made: it is sampled without one")
            return None
        if named is None:
            return None
        return Request(named, prompt or [], [] if written is None else written, code, extra.get("measure"))


class Request(NamedTuple):
    """A decoder, and the tokens it may ask for: vLLM keeps adding to the list of those written."""

    decoder: Decoder
    prompt: list[int]
    written: list[int]
    code: RequestCode | None = None  # where it is a sample of a group
    name: Any = None  # by which a watch knows it


def _slots(count: int, ctx: Any) -> list[int]:
    """Which request each row of logits belongs to; drafts of speculative decoding have a row each."""
    known = ctx.idx_mapping_np
    return known.tolist() if len(known) == count else ctx.expanded_idx_mapping.tolist()


def _tokens(requests: list[Request | None], device: torch.device) -> Tensor:
    """The tokens so far `[rows, T]`, padded on the left with −1."""
    rows = [[] if request is None else [*request.prompt, *request.written] for request in requests]
    longest = max(map(len, rows))
    return torch.tensor([[-1] * (longest - len(row)) + row for row in rows]).to(device)


def _steps(requests: list[Request | None], device: torch.device) -> Tensor:
    """How many tokens each request has written, `[rows]`; one not yet known counts, it is only not told."""
    return to_device([0 if request is None else len(request.written) for request in requests], device)


def _stored_steps(states: Any, ctx: Any) -> Tensor:
    """The same in the second runner, below 0 where a prompt is read in parts."""
    return ctx.pos.long() + 1 - states.prompt_len.gpu[ctx.expanded_idx_mapping.long()]


def _stored_tokens(states: Any, ctx: Any) -> Tensor:
    """The same from the second runner's table `[slots, T]`, in which they begin at the left."""
    longest = int(ctx.seq_lens_upper_bound_np.max())
    place = ctx.pos.unsqueeze(-1) + 1 - longest + torch.arange(longest, device=ctx.pos.device)
    rows = states.all_token_ids.gpu[ctx.expanded_idx_mapping.long()]
    return rows.gather(-1, place.clamp_min(0).long()).masked_fill(place < 0, -1)


def look_at_the_engine() -> None:
    """Tell from an engine's configuration, as it starts, what cannot be served there.

    With speculative decoding vLLM's first model runner leaves out all plug-ins found by entry point, without a word.
    vLLM calls this once in every process, before there is an engine.
    """
    made: Any = input_processor.InputProcessor.__init__
    if hasattr(made, "looked"):
        return

    @wraps(made)
    def init(self: Any, vllm_config: VllmConfig, *args: Any, **rest: Any) -> None:
        made(self, vllm_config, *args, **rest)
        first = not vllm_config.use_v2_model_runner
        flagged = [str(name) for name in vllm_config.model_config.logits_processors or []]
        if any("simplexity" in name for name in flagged):
            raise ValueError("simplexity is found by its entry point: leave it out of --logits-processors")
        DecoderProcessor.late = first and bool(vllm_config.scheduler_config.async_scheduling)
        DecoderProcessor.dropped = None
        DecoderProcessor.drafts = vllm_config.speculative_config is not None
        if first and vllm_config.speculative_config is not None:
            DecoderProcessor.dropped = "vLLM calls no plug-ins while it decodes speculatively (model runner V1)"
            log.warning("simplexity: %s; requests with a decoder will be refused", DecoderProcessor.dropped)

    setattr(init, "looked", True)  # noqa: B010
    input_processor.InputProcessor.__init__ = init

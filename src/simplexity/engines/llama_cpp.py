"""llama.cpp, through llama-cpp-python: completions whose tokens are drawn from a decoder's q.

    generate(llama, "Once upon a time", "bok", n=4, seed=1)

The decoder sees the engine's raw logits. It draws the token itself and leaves only that one, so that nothing after it
can change the draw; or it hands back log q and llama.cpp draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch

from simplexity.context import Context
from simplexity.decoders import decoder as as_decoder
from simplexity.draw import as_seeds, derive_seeds
from simplexity.engines.rows_by_decoder import refuse_distorting, refuse_needy, refuse_siblings
from simplexity.problem import raise_for

if TYPE_CHECKING:
    from simplexity.decoding import Decoder

# What llama-cpp-python would do to the scores after the decoder, and where it does nothing. A temperature below 0
# leaves out its cuts, but not its penalties, nor a grammar, which would cut q after the fact. A logit_bias drops the
# decoder altogether.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "temperature": (-1.0, 1.0), "top_k": (0, -1), "top_p": (1.0,), "min_p": (0.0,), "typical_p": (1.0,),
    "tfs_z": (1.0,), "mirostat_mode": (0,), "frequency_penalty": (0.0,), "presence_penalty": (0.0,),
    "repeat_penalty": (1.0,), "logit_bias": (None,), "grammar": (None,), "logits_processor": (None, []),
    "stopping_criteria": (None, []),
}  # fmt: skip

SETTINGS = {name: NEUTRAL[name][0] for name in ("temperature", "top_k", "top_p", "min_p", "typical_p")}
"""For a call of your own: `llama(prompt, logits_processor=[processor], **SETTINGS)`."""


class DecoderProcessor:
    """A logits processor for one text: scores in which one token is left, the one its decoder drew.

    seed:         the draw of each token depends on it, the step and the logits; without one, on torch's generator.
    engine_draws: hand back log q instead, and let llama.cpp draw: then its settings must be `SETTINGS`.

    llama-cpp-python prints what a processor raises and goes on with the raw logits. Inside `with processor:` what was
    raised is kept, `failed` (a stopping criterion) ends the text, and it is raised where the block ends; so is a
    complaint if the processor was never called, as happens beside a logit_bias.
    """

    def __init__(
        self, decoder: str | dict[str, Any] | Decoder, seed: int | None = None, engine_draws: bool = False
    ) -> None:
        if seed is not None and engine_draws:
            raise ValueError("give a seed or engine_draws, not both: the engine draws from a seed of its own")
        self.decoder = as_decoder(decoder)
        refuse_needy(self.decoder, "llama.cpp")
        refuse_siblings(self.decoder, "llama.cpp")
        self.seed = None if seed is None else as_seeds(seed, torch.Size([]), torch.device("cpu"))
        self.engine_draws = engine_draws
        self.step = 0
        self.error: BaseException | None = None
        self._kept = False

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """The scores, a float32 array `[V]` of any stride, with the decoder's written over them."""
        try:
            if self.error is not None:
                raise self.error
            # llama.cpp keeps id, logit and probability of a token side by side: every third number is a score
            row = torch.from_numpy(scores).contiguous()
            context = Context(tokens=torch.tensor(input_ids, dtype=torch.int64), step=self.step, seeds=self.seed)
            if self.engine_draws:
                log_q, status = self.decoder.log_distribution(row, context)
                raise_for(status)
                scores[:] = log_q.numpy()
            else:
                token = int(self.decoder.sample(row, context=context))
                scores[:] = -float("inf")
                scores[token] = 0.0
            self.step += 1
        except BaseException as error:  # an interrupt would be lost as well
            self.error = error
            if not self._kept:
                raise
        return scores

    def failed(self, input_ids: Any = None, scores: Any = None) -> bool:
        """Whether something was raised; as a `stopping_criteria`, it ends the text."""
        return self.error is not None

    def __enter__(self) -> DecoderProcessor:
        self._kept = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._kept = False
        if self.error is not None:
            raise self.error
        if kind is None and self.step == 0:
            raise ValueError(
                "the decoder was never called: llama-cpp-python drops it beside a logit_bias, and after a completion "
                "Llama.sample goes on with the processors of that one"
            )


@dataclass(frozen=True)
class Completion:
    """One text, and how it came about."""

    text: str
    finished: bool  # by an end token or a stop string, not by the limit
    decoder: str
    seed: int | None


def generate(
    llama: Any,
    prompt: str | Sequence[int] | Sequence[dict[str, str]],
    decoder: str | dict[str, Any] | Decoder = "softmax",
    n: int = 1,
    max_tokens: int = 128,
    seed: int | None = None,
    engine_draws: bool = False,
    stop: Sequence[str] = (),
    **options: Any,
) -> list[Completion]:
    """n texts for a prompt, drawn from the decoder's q.

    llama:   a `llama_cpp.Llama`.
    prompt:  text as it is, token ids, or the messages of a chat, which go through the model's own template.
    seed:    sample i depends on it, i and the logits alone; each has its own seed, with which `stream` repeats it.
    options: what else `llama.create_completion` takes; what would change q is refused.
    """
    if n < 1 or max_tokens < 1:
        raise ValueError(f"n and max_tokens must be at least 1, got {n} and {max_tokens}")
    if "stream" in options:
        raise ValueError("generate gives whole texts; for their pieces there is stream(…)")
    refuse_distorting(options, NEUTRAL)
    made = as_decoder(decoder)
    seeds: list[int | None] = [None] * n
    if seed is not None:
        seeds = derive_seeds(as_seeds([seed], torch.Size([1]), torch.device("cpu")), n).tolist()
    tokens, texts = _primed(llama, prompt), []
    for own in seeds:
        processor, rest = _drawing(made, own, engine_draws, options)
        with processor:
            choice = _completion(llama, tokens, processor, max_tokens, stop, rest)["choices"][0]
        texts.append(Completion(choice["text"], choice["finish_reason"] == "stop", str(made), own))
    return texts


def stream(
    llama: Any,
    prompt: str | Sequence[int] | Sequence[dict[str, str]],
    decoder: str | dict[str, Any] | Decoder = "softmax",
    max_tokens: int = 128,
    seed: int | None = None,
    engine_draws: bool = False,
    stop: Sequence[str] = (),
    **options: Any,
) -> Iterator[str]:
    """The pieces of one text as they are written; the arguments are those of `generate`."""
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    refuse_distorting(options, NEUTRAL)
    processor, rest = _drawing(decoder, seed, engine_draws, options)
    return _pieces(llama, _primed(llama, prompt), processor, max_tokens, stop, rest)


def _drawing(decoder: Any, seed: int | None, engine_draws: bool, options: Any) -> tuple[DecoderProcessor, Any]:
    """The processor, and the options: where the engine draws they bring its seed, 32 bits, all ones meaning chance."""
    if not engine_draws:
        return DecoderProcessor(decoder, seed), options
    rest = options if seed is None else {**options, "seed": seed % (2**32 - 1)}
    return DecoderProcessor(decoder, engine_draws=True), rest


def _pieces(
    llama: Any, tokens: list[int], processor: DecoderProcessor, max_tokens: int, stop: Sequence[str], options: Any
) -> Iterator[str]:
    with processor:
        for part in _completion(llama, tokens, processor, max_tokens, stop, {**options, "stream": True}):
            yield part["choices"][0]["text"]


def _completion(
    llama: Any, tokens: list[int], processor: DecoderProcessor, max_tokens: int, stop: Sequence[str], options: Any
) -> Any:
    return llama.create_completion(
        tokens,
        max_tokens=max_tokens,
        stop=list(stop),
        **{**options, **SETTINGS, "logits_processor": [processor], "stopping_criteria": processor.failed},
    )


def _primed(llama: Any, prompt: str | Sequence[int] | Sequence[dict[str, str]]) -> list[int]:
    """The prompt's token ids, all but the last evaluated.

    llama-cpp-python keeps what it evaluated for the next text and replays the last token of the prompt. With that done
    for the first text too, every text starts from the same logits to the last bit, whatever was written before it:
    on a CPU one token gets the bits it gets among many, on a GPU other kernels compute it.
    """
    tokens = prompt_ids(llama, prompt)
    llama.reset()
    if len(tokens) > 1:
        llama.eval(tokens[:-1])
    return tokens


def prompt_ids(llama: Any, prompt: str | Sequence[int] | Sequence[dict[str, str]]) -> list[int]:
    """The token ids of a text, or of a chat's messages after the model's own template."""
    if len(prompt) == 0:
        raise ValueError("the prompt is empty")
    if isinstance(prompt, str):
        tokens = llama.tokenize(prompt.encode(), add_bos=True, special=True)
    elif all(isinstance(part, Integral) for part in prompt):
        tokens = [int(part) for part in prompt]  # pyright: ignore[reportArgumentType]
    else:
        tokens = llama.tokenize(_templated(llama, prompt).encode(), add_bos=False, special=True)
    if len(tokens) >= llama.n_ctx():
        raise ValueError(
            f"the prompt has {len(tokens)} tokens and this Llama reads {llama.n_ctx()} at most, the answer included: "
            "shorten it or pass n_ctx"
        )
    return tokens


def _templated(llama: Any, messages: Any) -> str:
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter  # pyright: ignore[reportMissingImports]

    template = llama.metadata.get("tokenizer.chat_template")
    if template is None:
        raise ValueError("the model brings no chat template: pass the prompt as text")
    ends = [llama.detokenize([token], special=True).decode() for token in (llama.token_eos(), llama.token_bos())]
    return Jinja2ChatFormatter(template, *ends)(messages=messages).prompt

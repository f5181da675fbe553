"""SGLang: a custom logit processor that turns each request's logits into log q of the decoder it names.

    python -m simplexity.engines.sglang "bok:k=16" "The capital of France is" > request.json

The server (`--enable-custom-logit-processor`) needs this library installed: a request carries the processor's name, not
its code. SGLang itself is not imported here: it calls whatever the name leads to.
"""

from __future__ import annotations

import argparse
import json
import pickle
from typing import TYPE_CHECKING, Any

from torch import Tensor

from simplexity.decoders import decoder as as_decoder
from simplexity.engines.rows_by_decoder import Tally, refuse_distorting, refuse_needy, refuse_siblings, reshape

if TYPE_CHECKING:
    from simplexity.decoding import Decoder

# What SGLang does to log q, and where it does nothing. Penalties, biases and grammars come before the decoder.
NEUTRAL: dict[str, tuple[Any, ...]] = {"temperature": (1.0,), "top_p": (1.0,), "top_k": (-1,), "min_p": (0.0,)}

TALLY = Tally()  # of this process: SGLang makes a new processor for every batch


class DecoderProcessor:
    """What SGLang calls at every step; a request names its decoder in `custom_params={"decoder": "bok:k=16"}`.

    It has the methods of SGLang's `CustomLogitProcessor`. A request whose decoder cannot be made, or whose logits
    cannot be solved for, keeps its logits; that is logged, and counted in `TALLY`: an exception would end the server.
    """

    def __call__(self, logits: Tensor, custom_param_list: list[dict[str, Any] | None] | None = None) -> Tensor:
        """Logits `[rows, V]` with log q written over them; `custom_param_list` has one entry for each row."""
        if custom_param_list:
            TALLY.add(reshape(logits, [_spec(params) for params in custom_param_list]))
        return logits

    @classmethod
    def to_str(cls) -> str:
        """What `custom_logit_processor` in a request must hold: SGLang unpickles a class and makes one."""
        return json.dumps({"callable": pickle.dumps(cls).hex()})


def _spec(params: dict[str, Any] | None) -> str | None:
    """The decoder a request asks for, as text that can be compared."""
    spec = params.get("decoder") if isinstance(params, dict) else None
    return spec if spec is None or isinstance(spec, str) else json.dumps(spec, sort_keys=True, default=repr)


def request(decoder: str | dict[str, Any] | Decoder, prompt: str, **sampling_params: Any) -> dict[str, Any]:
    """The body of a request to SGLang's `/generate`, its own sampling neutral.

    sampling_params: what else SGLang takes: max_new_tokens, stop, n, …
    """
    made = as_decoder(str(as_decoder(decoder)))  # what does not survive as text cannot be sent
    refuse_needy(made, "SGLang")
    refuse_siblings(made, "SGLang")
    if made.penalises():  # SGLang starts a step before it has noted the token of the last
        raise ValueError("SGLang does not say what was written so far: pass its own penalties, presence_penalty=…")
    refuse_distorting(sampling_params, NEUTRAL)
    params = {name: values[0] for name, values in NEUTRAL.items()} | sampling_params
    custom = {**(sampling_params.get("custom_params") or {}), "decoder": str(made)}
    return {
        "text": prompt,
        "sampling_params": {**params, "custom_params": custom},
        "custom_logit_processor": DecoderProcessor.to_str(),
    }


def main(arguments: list[str] | None = None) -> None:
    """Print a request as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m simplexity.engines.sglang",
        description="Print a request to SGLang's /generate whose tokens are drawn from a decoder of this library.",
    )
    parser.add_argument("decoder", help='such as "bok:k=16"')
    parser.add_argument("prompt")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    given = parser.parse_args(arguments)
    try:
        body = request(given.decoder, given.prompt, max_new_tokens=given.max_new_tokens)
    except ValueError as error:
        parser.error(str(error))
    print(json.dumps(body))


if __name__ == "__main__":
    # as the module, not as the script: a pickle names the place where a class can be imported
    from simplexity.engines import sglang

    sglang.main()

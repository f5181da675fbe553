"""vLLM without a server: the requests of one batch under different decoders.

python examples/vllm_offline.py MODEL
"""

# pyright: reportMissingImports=false

import sys

from vllm import LLM, SamplingParams


def main() -> None:
    """Four texts, four decoders, one batch."""
    llm = LLM(model=sys.argv[1], enforce_eager=True, max_model_len=512, generation_config="vllm")
    specs = ["softmax", "top-p:p=0.8", "sparsemax:lam=2", "bok:k=16,temperature=1.2"]
    params = [SamplingParams(max_tokens=20, seed=1, extra_args={"decoder": spec}) for spec in specs]
    for spec, out in zip(specs, llm.generate(["The sea is"] * len(specs), params), strict=True):
        print(f"{spec:26} {out.outputs[0].text!r}")


if __name__ == "__main__":  # vLLM starts processes of its own
    main()

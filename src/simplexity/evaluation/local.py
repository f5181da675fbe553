"""Who writes on this machine: the engine that a plan names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simplexity.models import quiet_transformers

if TYPE_CHECKING:
    from simplexity.evaluation.plan import RunPlan
    from simplexity.evaluation.vllm_writer import VLLMWriter
    from simplexity.evaluation.writer import TransformersWriter


def local_writer(plan: RunPlan, system: str | None, device: str | None = None) -> TransformersWriter | VLLMWriter:
    """A writer with a model of its own; an engine that is not asked for need not be there."""
    quiet_transformers()
    if plan.engine == "vllm":
        from simplexity.evaluation.vllm_writer import VLLMWriter

        return VLLMWriter(plan, system)
    from simplexity.evaluation.writer import TransformersWriter

    return TransformersWriter(plan, system, device)

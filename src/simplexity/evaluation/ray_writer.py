"""Batches spread over a Ray cluster: each actor holds a model; the work of one that dies goes to another."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

try:
    import ray
    from ray.exceptions import RayActorError
except ImportError as error:
    raise ImportError("spreading over a cluster needs one more package: pip install 'simplexity[ray]'") from error

from simplexity.evaluation.local import local_writer
from simplexity.evaluation.plan import RunPlan, Work
from simplexity.evaluation.written import Written

TRIES = 4  # a batch that ends so many workers is itself the reason


class RayWriter:
    """One actor for each GPU of the cluster; without GPUs, `workers` of them on its CPUs.

    `address`: "auto" or ray://… for a running cluster, "local" to start one on this machine.
    """

    def __init__(self, plan: RunPlan, system: str | None, address: str, workers: int | None = None) -> None:
        self.plan, self.system = plan, system
        if not ray.is_initialized():
            ray.init(None if address == "local" else address, log_to_driver=False, include_dashboard=False)
        resources: dict[str, Any] = ray.cluster_resources()
        gpus = int(resources.get("GPU", 0))
        cpus = int(resources.get("CPU", 1))
        self.count = workers or gpus or max(1, cpus // 2)
        self.needs: dict[str, Any] = {"num_gpus": 1} if gpus else {"num_cpus": max(1, cpus // self.count)}
        self.idle: list[Any] = []  # kept from one decoder to the next: a model, and still more an engine, starts slowly

    def write_all(self, works: Iterable[Work]) -> Iterator[tuple[Work, Written]]:
        """Every batch, as they are finished."""
        todo, idle = deque((work, 1) for work in works), self.idle
        idle += [self._actor() for _ in range(min(self.count, len(todo)) - len(idle))]
        busy: dict[Any, tuple[Any, Work, int]] = {}
        try:
            while todo or busy:
                while todo and idle:
                    actor, (work, tries) = idle.pop(), todo.popleft()
                    busy[actor.write.remote(work)] = (actor, work, tries)
                ready, _ = ray.wait(list(busy), num_returns=1)
                actor, work, tries = busy.pop(ready[0])
                try:
                    written = ray.get(ready[0])
                except RayActorError as error:
                    if tries >= TRIES:
                        raise RuntimeError(f"{tries} workers died over batch {work.number} of {work.arm}") from error
                    todo.appendleft((work, tries + 1))
                    idle.append(self._actor())
                    continue
                idle.append(actor)
                yield work, written
        finally:
            for actor, _, _ in busy.values():
                ray.kill(actor)

    def _actor(self) -> Any:
        return Worker.options(**self.needs).remote(self.plan, self.system)  # pyright: ignore[reportAttributeAccessIssue]


@ray.remote
class Worker:
    """A process of the cluster with a model of its own."""

    def __init__(self, plan: RunPlan, system: str | None) -> None:
        self.writer = local_writer(plan, system)

    def write(self, work: Work) -> Written:
        """The texts of one batch."""
        return self.writer.write(work)

    def process(self) -> int:
        """Its process id."""
        import os

        return os.getpid()

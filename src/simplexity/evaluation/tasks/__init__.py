"""The tasks, by name; each is one small file here, found without being listed."""

import importlib
import pkgutil

from simplexity.evaluation.task import TASKS, Task
from simplexity.specs import nearest


def task(name: str) -> Task:
    """The task with this name.

    >>> task("gsm8k").name
    'gsm8k'
    """
    found = tasks()
    if name not in found:
        raise ValueError(f"unknown task {name!r}{nearest(name, found)}")
    return found[name]()


def tasks() -> dict[str, type[Task]]:
    """Every task, by name."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return dict(sorted(TASKS.items()))

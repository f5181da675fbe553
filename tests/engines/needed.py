"""Engines that live in environments of their own: absent, their tests are skipped, unless they were asked for."""

import importlib
import os
import warnings
from typing import Any

import pytest


def needed(engine: str, module: str) -> Any:
    """A module of an engine; with SIMPLEXITY_ENGINE set to the engine's name, its absence is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an engine's own
        if os.environ.get("SIMPLEXITY_ENGINE") == engine:
            return importlib.import_module(module)
        return pytest.importorskip(module)

"""The numbers of a benchmark as JSON, with the date, the machine and the versions they were made with."""

import json
import platform
from datetime import date
from pathlib import Path
from typing import Any

import torch


def record(path: Path | None, results: list[Any], *modules: Any) -> None:
    """Write the results; nothing where no path was given."""
    if path is not None:
        cores = f"{platform.machine()}, {torch.get_num_threads()} threads"
        about = {
            "date": date.today().isoformat(),
            "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else cores,
            "versions": {module.__name__: module.__version__ for module in modules},
        }
        path.write_text(json.dumps(about | {"results": results}, indent=1) + "\n")

"""The decoders, one small file a family. Every file in this folder is loaded, so adding one is enough."""

import importlib
import pkgutil
from importlib.metadata import entry_points
from typing import Any

import torch

from simplexity import specs
from simplexity.decoding import REGISTRY, Decoder
from simplexity.parameters import rule_of

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def decoders() -> dict[str, type[Decoder]]:
    """Every decoder by name, installed plug-ins (entry points `simplexity.decoders`) included."""
    for plugin in entry_points(group="simplexity.decoders"):
        plugin.load()
    return dict(REGISTRY)


def decoder(spec: "str | dict[str, Any] | Decoder") -> Decoder:
    """The decoder a spec describes: text, the data of `to_json`, or a decoder itself.

    >>> decoder("top-p:p=0.7,temperature=0.5").distribution(torch.tensor([3.0, 2.0, 0.0]))
    tensor([1., 0., 0.])
    >>> str(decoder({"decoder": "top-k", "k": 5}))
    'top-k:k=5'
    """
    if isinstance(spec, Decoder):
        return spec
    if isinstance(spec, str):
        name, values = specs.parse(spec)
    elif isinstance(spec, dict) and isinstance(spec.get("decoder"), str):
        name, values = spec["decoder"], {k: v for k, v in spec.items() if k != "decoder"}
    else:
        raise ValueError(f"a decoder is a spec such as 'top-p:p=0.9' or {{'decoder': 'top-p', 'p': 0.9}}, got {spec!r}")
    known = REGISTRY if name in REGISTRY else decoders()
    if name not in known:
        raise ValueError(f"unknown decoder {name!r}{specs.nearest(name, sorted(known))}")
    listed = {f.name for f in known[name].parameters() if rule_of(f).listed}
    values = {k: _column(v) if isinstance(v, list) and k not in listed else v for k, v in values.items()}
    return specs.build(known[name], values)


def _column(values: "list[Any]") -> Any:
    """One value per row; numbers with a point in float64, so that none is rounded on the way. What holds no numbers
    stays as it is, for the parameter's rule to refuse.
    """
    try:
        column = torch.tensor(values)
    except (ValueError, TypeError, RuntimeError, OverflowError):
        return values
    return torch.tensor(values, dtype=torch.float64) if column.is_floating_point() else column

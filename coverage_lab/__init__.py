"""Measure how much of the KV cache decoding needs, and compare the rules that choose what to read.

The names below are imported on first use, so that importing this package loads no torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coverage_lab.analyses.variation import compute as variation
    from coverage_lab.collectors.collect import CollectOptions, collect
    from coverage_lab.collectors.models import load_model
    from coverage_lab.errors import CoverageLabError
    from coverage_lab.kernels.cache import PagedCache
    from coverage_lab.kernels.decode import DecodePath
    from coverage_lab.kernels.ragged import attend
    from coverage_lab.policies.budgets import budgets
    from coverage_lab.policies.compare import compare
    from coverage_lab.policies.estimators import estimators
    from coverage_lab.policies.evaluate import evaluate
    from coverage_lab.policies.policy import Policy
    from coverage_lab.replay.decoder import Decoder
    from coverage_lab.replay.explain import explain
    from coverage_lab.replay.requests import load_traced_model
    from coverage_lab.trace import Trace

__version__ = "0.1.0"

__all__ = [
    "CollectOptions",
    "CoverageLabError",
    "DecodePath",
    "Decoder",
    "PagedCache",
    "Policy",
    "Trace",
    "__version__",
    "attend",
    "budgets",
    "collect",
    "compare",
    "estimators",
    "evaluate",
    "explain",
    "load_model",
    "load_traced_model",
    "variation",
]

# Public name -> (module, attribute).
_LAZY = {
    "CollectOptions": ("coverage_lab.collectors.collect", "CollectOptions"),
    "CoverageLabError": ("coverage_lab.errors", "CoverageLabError"),
    "DecodePath": ("coverage_lab.kernels.decode", "DecodePath"),
    "Decoder": ("coverage_lab.replay.decoder", "Decoder"),
    "PagedCache": ("coverage_lab.kernels.cache", "PagedCache"),
    "Policy": ("coverage_lab.policies.policy", "Policy"),
    "Trace": ("coverage_lab.trace", "Trace"),
    "attend": ("coverage_lab.kernels.ragged", "attend"),
    "budgets": ("coverage_lab.policies.budgets", "budgets"),
    "collect": ("coverage_lab.collectors.collect", "collect"),
    "compare": ("coverage_lab.policies.compare", "compare"),
    "estimators": ("coverage_lab.policies.estimators", "estimators"),
    "evaluate": ("coverage_lab.policies.evaluate", "evaluate"),
    "explain": ("coverage_lab.replay.explain", "explain"),
    "load_model": ("coverage_lab.collectors.models", "load_model"),
    "load_traced_model": ("coverage_lab.replay.requests", "load_traced_model"),
    "variation": ("coverage_lab.analyses.variation", "compute"),
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _LAZY[name]
    value: object = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

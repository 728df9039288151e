"""A policy: estimator x budget x granularity, and its text form."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal

from coverage_lab.errors import CoverageLabError
from coverage_lab.pages import check_page_size
from coverage_lab.policies.budgets import Budget, budgets
from coverage_lab.policies.estimators import Estimator, estimators
from coverage_lab.registry import unknown

Granularity = Literal["query_head", "kv_head", "layer"]
GRANULARITIES: tuple[Granularity, ...] = typing.get_args(Granularity)
COMPENSATIONS = ("mean",)
_FORM = "estimator/budget[:value][,key=value...][@granularity]"
_WITHIN = " within "


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A rule that decides which pages every row reads.

    Parameters
    ----------
    estimator : Estimator
        Where the shares come from.
    budget : Budget
        How shares become a page set.
    granularity : {"query_head", "kv_head", "layer"}
        Who shares a list. `query_head`: each query head selects, and the row reads the union.
        `kv_head`: one list a row. `layer`: one list for all KV heads of a layer, from their mean shares.
    dense_layers : tuple of int
        Layers that are read whole.
    page_size : int, optional
        Tokens a page; by default those of the trace. Only a replay can choose pages of another size.
    compensate : {"mean"}, optional
        What stands in for a page that is not read: nothing, or its estimated mass at the mean of its values
        (CompKV, Huang et al., 2026).
    within : Policy, optional
        A policy that chooses candidates first; this one then keeps some of them, and the shares of the
        candidates sum to one (Twilight, Lin et al., 2025).

    Examples
    --------
    >>> str(parse_policy("mvar/coverage:0.980"))
    'mvar/coverage:0.98'
    """

    estimator: Estimator
    budget: Budget
    granularity: Granularity = "kv_head"
    dense_layers: tuple[int, ...] = ()
    page_size: int | None = None
    compensate: str | None = None
    within: Policy | None = None

    def __post_init__(self) -> None:
        if self.granularity not in GRANULARITIES:
            raise unknown("granularity", str(self.granularity), list(GRANULARITIES))
        if self.page_size is not None:
            check_page_size(self.page_size)
        if self.compensate not in (None, *COMPENSATIONS):
            raise unknown("compensation", self.compensate, list(COMPENSATIONS))
        if self.within is not None and self.within.compensate:
            raise CoverageLabError(
                f"policy {self.within} chooses candidates, and compensates for nothing; leave out compensate="
            )
        object.__setattr__(self, "dense_layers", tuple(sorted(set(self.dense_layers))))

    def __str__(self) -> str:
        options = _changed_options(self.budget)
        primary = options.pop(self.budget.primary, None)
        arguments = [] if primary is None else [_format(primary)]
        if "=" in "".join(arguments):  # a file name that would read like an option
            arguments = [f"{self.budget.primary}={arguments[0]}"]
        arguments += [f"{key}={_format(value)}" for key, value in options.items()]
        if self.dense_layers:
            arguments.append(f"dense_layers={_format_ranges(self.dense_layers)}")
        arguments += [
            f"{name}={value}"
            for name in ("page_size", "compensate")
            if (value := getattr(self, name)) is not None
        ]
        text = f"{self.estimator.name}/{self.budget.name}"
        if arguments:
            text += ":" + ",".join(arguments)
        if self.granularity != "kv_head":
            text += f"@{self.granularity}"
        return text if self.within is None else f"{text}{_WITHIN}{self.within}"

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Read the text form, `estimator/budget[:value][,key=value...][@granularity] [within POLICY]`.

        Raises
        ------
        CoverageLabError
            If the text is malformed, or names an unknown estimator, budget, option or granularity.
        """
        if text.rstrip().endswith(_WITHIN.rstrip()):
            raise CoverageLabError(f"policy {text!r}: a policy that gives the candidates follows within")
        text, chained, candidates = text.partition(_WITHIN)
        within = cls.parse(candidates) if chained else None
        head, slash, rest = text.strip().partition("/")
        if not slash or not rest:
            raise CoverageLabError(f"policy {text!r} is not of the form {_FORM}; try mvar/coverage:0.98")
        rest, granularity = _split_granularity(rest)
        name, colon, arguments = rest.partition(":")
        if colon and not arguments:
            raise CoverageLabError(f"policy {text!r} ends in a colon; write {head}/{name} for the default")
        estimator = estimators.get(head)()
        budget_class = budgets.get(name)
        options: dict[str, Any] = {}
        for place, argument in enumerate(arguments.split(",") if arguments else []):
            key, equals, value = (part.strip() for part in argument.partition("="))
            if not equals and place == 0:
                key, value = budget_class.primary, key
            elif not equals:
                raise CoverageLabError(f"policy {text!r}: {argument!r} is not of the form key=value")
            if key in options:
                raise CoverageLabError(f"policy {text!r}: {key!r} is given twice")
            options[key] = _convert(budget_class, key, value, text)
        own = {name: options.pop(name) for name in _OPTIONS if name in options}
        return cls(
            estimator=estimator,
            budget=budget_class(**options),
            granularity=granularity,
            within=within,
            **own,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the policy as JSON-ready values."""
        return {
            "estimator": self.estimator.name,
            "budget": self.budget.name,
            "options": {
                key: _plain(value) for key, value in _changed_options(self.budget, hidden=True).items()
            },
            "granularity": self.granularity,
            "dense_layers": list(self.dense_layers),
            "page_size": self.page_size,
            "compensate": self.compensate,
            "within": None if self.within is None else self.within.to_json(),
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Policy:
        """Return the policy that `to_json` wrote."""
        from coverage_lab.policies.budgets.profiled import Profile

        options = dict(record["options"])
        if isinstance(options.get("table"), dict):
            table = options["table"]
            options["table"] = Profile(table["by"], tuple(tuple(layer) for layer in table["counts"]))
        return cls(
            estimator=estimators.get(record["estimator"])(),
            budget=budgets.get(record["budget"])(**options),
            granularity=record["granularity"],
            dense_layers=tuple(record["dense_layers"]),
            page_size=record["page_size"],
            compensate=record["compensate"],
            within=None if record["within"] is None else cls.from_json(record["within"]),
        )


parse_policy = Policy.parse


def _changed_options(budget: Budget, hidden: bool = False) -> dict[str, Any]:
    """Options that differ from their defaults, and the primary one always."""
    default = type(budget)()
    return {
        field.name: getattr(budget, field.name)
        for field in fields(budget)
        if (hidden or field.repr)
        and (
            getattr(budget, field.name) != getattr(default, field.name)
            or (field.name == budget.primary and getattr(budget, field.name) not in (None, ""))
        )
    }


def _split_granularity(rest: str) -> tuple[str, Granularity]:
    body, at, suffix = rest.rpartition("@")
    if not at or re.search(r"[/.,:=]", suffix):  # no suffix, or an @ inside a file name
        return rest, "kv_head"
    for granularity in GRANULARITIES:
        if suffix == granularity:
            return body, granularity
    raise unknown("granularity", suffix, list(GRANULARITIES))


def _convert(budget_class: type[Budget], key: str, value: str, text: str) -> Any:
    if key in _OPTIONS:
        return _OPTIONS[key](value, text)
    visible = {field.name for field in fields(budget_class) if field.repr}
    if key not in visible:
        raise unknown(f"option of {budget_class.name}", key, sorted(visible | _OPTIONS.keys()))
    hint = typing.get_type_hints(budget_class)[key]
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if int not in kinds and float not in kinds:
        return value
    try:
        return _whole(key, value, text) if float not in kinds else float(value)
    except ValueError:
        raise CoverageLabError(f"policy {text!r}: {key}={value!r} is no number") from None


def _whole(key: str, value: str, text: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise CoverageLabError(f"policy {text!r}: {key}={value!r} is no whole number") from None


def _plain(value: Any) -> Any:
    if hasattr(value, "counts"):
        return {"by": value.by, "counts": value.counts}
    return value


def _format(value: Any) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value)


def _format_ranges(layers: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for layer in sorted(set(layers)):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return "+".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _parse_ranges(value: str, text: str) -> tuple[int, ...]:
    layers: set[int] = set()
    for run in value.split("+"):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", run)
        if not match:
            raise CoverageLabError(f"policy {text!r}: dense_layers={value!r} is not like 0-1+5")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise CoverageLabError(f"policy {text!r}: dense_layers={value!r} runs backwards")
        layers.update(range(first, last + 1))
    return tuple(sorted(layers))


# Options of any policy, and how they are read.
_OPTIONS: dict[str, Callable[[str, str], Any]] = {
    "dense_layers": _parse_ranges,
    "page_size": lambda value, text: _whole("page_size", value, text),
    "compensate": lambda value, text: value,
}

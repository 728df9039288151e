"""Names for the pluggable parts: estimators, budgets, datasets."""

import difflib
import importlib
import pkgutil
from collections.abc import Callable
from typing import Generic, TypeVar

from coverage_lab.errors import CoverageLabError

T = TypeVar("T")


def unknown(kind: str, name: str, known: list[str]) -> CoverageLabError:
    """Return the error for a name that is not known, with the nearest one that is."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return CoverageLabError(f"unknown {kind} {name!r}; {hint}")


def _place(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


class Registry(Generic[T]):
    """Map names to classes that register themselves with a decorator.

    The modules of `package` are imported at the first lookup, so that a new class needs a new file
    and no other edit, and importing the package loads none of them.

    Parameters
    ----------
    kind : str
        What the names stand for, used in messages ("estimator").
    package : str
        Dotted name of the package whose modules hold the classes.
    """

    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self._package = package
        self._classes: dict[str, type[T]] = {}
        self._scanned = False

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Return a decorator that registers a class under `name` and sets its `name`.

        Raises
        ------
        CoverageLabError
            If another class holds the name already.
        """

        def decorate(cls: type[T]) -> type[T]:
            held = self._classes.get(name)
            # A reloaded module or a re-run notebook cell defines the same class again.
            if held is not None and _place(held) != _place(cls):
                raise CoverageLabError(
                    f"{self.kind} {name!r} is taken by {held.__module__}.{held.__qualname__}; "
                    "choose another name"
                )
            cls.name = name  # type: ignore[attr-defined]
            self._classes[name] = cls
            return cls

        return decorate

    def get(self, name: str) -> type[T]:
        """Return the class registered under `name`.

        Raises
        ------
        CoverageLabError
            If there is none; the message has the nearest name.
        """
        self._scan()
        if name not in self._classes:
            raise unknown(self.kind, name, self.names())
        return self._classes[name]

    def names(self) -> list[str]:
        """Return the registered names in alphabetical order."""
        self._scan()
        return sorted(self._classes)

    def _scan(self) -> None:
        if self._scanned:
            return
        package = importlib.import_module(self._package)
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{self._package}.{module.name}")
        self._scanned = True

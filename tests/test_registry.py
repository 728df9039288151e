"""Names for classes: found on the first lookup, refused when taken."""

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from coverage_lab.errors import CoverageLabError
from coverage_lab.registry import Registry, unknown

BASE = """
from coverage_lab.registry import Registry
things = Registry("thing", __name__)
loaded = []
"""
MODULE = """
from {package} import loaded, things
loaded.append(__name__)

@things.register("{name}")
class {cls}:
    pass
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder of an importable package with a registry and three modules."""
    folder = tmp_path / "registry_under_test"
    folder.mkdir()
    (folder / "__init__.py").write_text(BASE)
    for name in ("alpha", "beta", "gamma"):
        add_module(folder, name, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for module in [name for name in sys.modules if name.partition(".")[0] == folder.name]:
        del sys.modules[module]


def add_module(folder: Path, module: str, name: str, cls: str = "") -> None:
    code = MODULE.format(package=folder.name, name=name, cls=cls or module.title())
    (folder / f"{module}.py").write_text(code)


def make(qualname: str, module: str) -> type:
    cls = type(qualname, (), {})
    cls.__module__ = module
    return cls


def test_modules_are_imported_on_the_first_lookup_and_once(package: Path) -> None:
    module = importlib.import_module(package.name)
    assert module.loaded == []
    assert module.things.names() == ["alpha", "beta", "gamma"]
    assert sorted(module.loaded) == [f"{package.name}.{name}" for name in ("alpha", "beta", "gamma")]
    assert module.things.get("beta").__name__ == "Beta"
    assert len(module.loaded) == 3


def test_folders_are_listed_once(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    things = importlib.import_module(package.name).things
    listed = []
    list_modules = pkgutil.iter_modules
    monkeypatch.setattr(pkgutil, "iter_modules", lambda path: listed.append(path) or list_modules(path))
    for _ in range(3):
        things.get("alpha")
        things.names()
    assert len(listed) == 1


def test_getting_scans_too(package: Path) -> None:
    module = importlib.import_module(package.name)
    assert module.things.get("gamma").name == "gamma"


def test_a_new_file_is_enough(package: Path) -> None:
    add_module(package, "delta", "the fourth")
    assert "the fourth" in importlib.import_module(package.name).things.names()


def test_a_broken_module_shows_its_error_at_every_lookup(package: Path) -> None:
    (package / "broken.py").write_text("raise RuntimeError('broken here')")
    things = importlib.import_module(package.name).things
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken here"):
            things.names()


def test_a_reloaded_module_may_register_again(package: Path) -> None:
    module = importlib.import_module(package.name)
    before = module.things.get("alpha")
    importlib.reload(sys.modules[f"{package.name}.alpha"])
    after = module.things.get("alpha")
    assert after is not before
    assert after is sys.modules[f"{package.name}.alpha"].Alpha


def test_two_classes_can_not_share_a_name(package: Path) -> None:
    things = importlib.import_module(package.name).things
    held = things.get("alpha")
    with pytest.raises(
        CoverageLabError, match=rf"thing 'alpha' is taken by {package.name}\.alpha\.Alpha; choose another"
    ):
        things.register("alpha")(make("Other", package.name))
    assert things.get("alpha") is held


def test_a_class_of_the_same_name_in_another_module_is_another_class(package: Path) -> None:
    things = importlib.import_module(package.name).things
    held = things.get("alpha")
    with pytest.raises(CoverageLabError, match="is taken by"):
        things.register("alpha")(make("Alpha", "elsewhere"))
    assert things.get("alpha") is held


def test_two_files_with_the_same_name_clash_at_the_first_lookup(package: Path) -> None:
    add_module(package, "second", "alpha", cls="Alpha")
    with pytest.raises(CoverageLabError, match="'alpha' is taken"):
        importlib.import_module(package.name).things.names()


def test_a_decorated_class_is_returned_and_knows_its_name() -> None:
    registry: Registry[object] = Registry("thing", "coverage_lab.kernels.select")
    cls = make("Thing", "here")
    assert registry.register("short")(cls) is cls
    assert cls.name == "short"  # type: ignore[attr-defined]
    assert registry.get("short") is cls


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("mvra", "did you mean 'mvar'?"),
        ("mva", "did you mean 'mvar'?"),
        ("exakt", "did you mean 'exact'?"),
        ("nothing like it", "known: exact, mvar, quest"),
        ("", "known: exact, mvar, quest"),
    ],
)
def test_an_unknown_name_is_told_with_the_nearest(name: str, hint: str) -> None:
    error = unknown("estimator", name, ["exact", "mvar", "quest"])
    assert isinstance(error, CoverageLabError)
    assert str(error) == f"unknown estimator {name!r}; {hint}"


def test_lookups_of_unknown_names_raise_it(package: Path) -> None:
    with pytest.raises(CoverageLabError, match="unknown thing 'bta'; did you mean 'beta'"):
        importlib.import_module(package.name).things.get("bta")

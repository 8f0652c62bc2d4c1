"""Reads the tables of the packages' READMEs: which module is of which layer. The tests here and `make check` use it.

python -m tests.tidy.layers value policy core      prints the files of these layers, for `mypy --strict`
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAYERS = ("value", "policy", "core", "shell", "main")
PACKAGES = ("gateway", "engine", "cached", "tenants", "command")
_ROW = re.compile(r"^\|\s*`(?P<file>[A-Za-z0-9_/]+\.py)`\s*\|\s*(?P<layer>\w+)\s*\|\s*(?P<does>.*?)\s*\|\s*$")


@dataclass(frozen=True, slots=True)
class Module:
    """A Python file of a package, as its README's table tells of it."""

    package: str
    file: str
    layer: str
    does: str

    @property
    def path(self) -> Path:
        return ROOT / self.package / self.file

    @property
    def name(self) -> str:
        return f"{self.package}.{self.file.removesuffix('.py').replace('/', '.')}"

    def __str__(self) -> str:
        return f"{self.package}/{self.file}"


@dataclass(frozen=True, slots=True)
class Import:
    """One import: the module meant, and whether it happens when the importing module is loaded."""

    target: str
    line: int
    at_load: bool


def modules_of(package: str) -> list[Module]:
    """The rows of a package's table, in its order."""
    readme = ROOT / package / "README.md"
    if not readme.exists():
        return []
    rows = (_ROW.match(line) for line in readme.read_text(encoding="utf-8").splitlines())
    return [Module(package, row["file"], row["layer"], row["does"]) for row in rows if row]


def all_modules() -> list[Module]:
    """The modules of all packages."""
    return [module for package in PACKAGES for module in modules_of(package)]


def files_of(package: str) -> set[str]:
    """The Python files that are there, without the empty `__init__.py`."""
    folder = ROOT / package
    return {str(file.relative_to(folder)) for file in folder.rglob("*.py") if file.name != "__init__.py"}


def imports_of(path: Path) -> Iterator[Import]:
    """Every import of a file except those under `if TYPE_CHECKING:`; relative ones do not occur here."""
    yield from _imports(ast.parse(path.read_text(encoding="utf-8")), at_load=True)


def _imports(node: ast.AST, at_load: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, at_load)
        elif isinstance(child, ast.ImportFrom) and child.module:
            for alias in child.names:
                submodule = ROOT / child.module.replace(".", "/") / f"{alias.name}.py"
                target = f"{child.module}.{alias.name}" if submodule.exists() else child.module
                yield Import(target, child.lineno, at_load)
        inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _imports(child, at_load and not inside)


if __name__ == "__main__":
    for module in all_modules():
        if module.layer in sys.argv[1:]:
            print(module.path.relative_to(ROOT))

"""What may not stand in the source: unsafe calls, words about how it is made, paths of one machine, unbounded files."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.tidy.layers import PACKAGES, ROOT

CODE = [ROOT / "halocline.py", *(f for p in (*PACKAGES, "bench") for f in sorted((ROOT / p).rglob("*.py")))]
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "marshal", "shelve", "cloudpickle"}
UNSAFE_CALLS = {"eval", "exec", "os.system", "os.popen", "compile", "torch.load"}
# Put together here, so that this file does not contain them itself.
_DOT = r"\."
FORBIDDEN_WORDS = [
    "/" + "work/", "/" + "farm/", "sub" + "agent", "pypi" + _DOT + "org", "registry" + _DOT + "npm", "deb" + _DOT + "debian",
    "python" + "hosted", "/tmp/" + "model/",
]  # fmt: skip


def tracked_files() -> list[Path]:
    """What git knows of, or everything outside ignored folders when this is no checkout."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]
    skipped = {".venv", ".git", "__pycache__", "build"}
    return [f for f in ROOT.rglob("*") if f.is_file() and not skipped & set(f.relative_to(ROOT).parts)]


@pytest.mark.parametrize("file", CODE, ids=lambda f: str(f.relative_to(ROOT)))
def test_no_module_unpickles_evaluates_or_runs_a_shell(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            found += [f"line {node.lineno}: import {n}" for n in names if n.split(".")[0] in UNSAFE_MODULES]
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            found += [f"line {node.lineno}: {name}()"] if name in UNSAFE_CALLS else []
            found += [
                f"line {node.lineno}: shell=True"
                for keyword in node.keywords
                if keyword.arg == "shell" and getattr(keyword.value, "value", True)
            ]

    assert found == []


@pytest.mark.parametrize("word", FORBIDDEN_WORDS)
def test_no_file_speaks_of_one_machine_a_package_registry_or_how_it_was_made(word: str) -> None:
    pattern = re.compile(word, re.IGNORECASE)

    found = [
        f"{file.relative_to(ROOT)}:{number}"
        for file in tracked_files()
        for number, line in enumerate(file.read_bytes().decode("utf-8", "ignore").splitlines(), 1)
        if pattern.search(line)
    ]

    assert found == []


def test_every_module_begins_by_saying_what_it_does() -> None:
    silent = [
        str(file.relative_to(ROOT))
        for file in CODE
        if file.name != "__init__.py" and not ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    ]

    assert silent == []


def test_constraints_name_no_build_of_one_machine_and_pin_every_requirement() -> None:
    import tomllib

    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {_normal(line.split("==")[0]) for line in lines if "==" in line and not line.startswith("#")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]

    assert not [line for line in lines if "+" in line or "://" in line]
    assert {_normal(re.split(r"[\s<>=!~;\[]", requirement)[0]) for requirement in wanted} <= pinned


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()

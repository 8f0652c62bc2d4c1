"""The READMEs' tables, held against the source: every module is listed, and imports only what its layer may."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.tidy.layers import LAYERS, PACKAGES, ROOT, Module, all_modules, files_of, imports_of, modules_of

PURE = ("value", "policy", "core")
# Modules of the interpreter that read a clock, chance, the environment, or wait.
IMPURE_IMPORTS = {
    "asyncio", "concurrent.futures", "ctypes", "fcntl", "logging", "mmap", "multiprocessing", "random", "secrets", "selectors",
    "signal", "socket", "sqlite3", "structlog", "subprocess", "threading", "time", "urllib.request", "uuid", "uvloop",
}  # fmt: skip
IMPURE_CALLS = {"os.environ", "os.getenv", "os.urandom", "datetime.now", "datetime.utcnow", "date.today"}
# package -> what it may import of other packages; a package imports everything of its own that its layer allows. The map is
# docs/architecture.md's, and docs/decisions/0007-import-map.md says why it is as wide as it is.
MAY_IMPORT = {
    "gateway": ("engine.client", "engine.protocol", "engine.errors", "tenants.", "cached.retention", "cached.keys", "cached.errors"),
    "engine": ("cached.client", "cached.keys", "cached.retention", "cached.eviction", "cached.wire", "cached.errors", "cached.protocol"),
    "cached": (),
    "tenants": (),
    "command": ("gateway.", "engine.", "cached.", "tenants."),
}  # fmt: skip
# One module may import more: the simulator drives the host tier's core in its own process.
MAY_IMPORT_TOO = {"engine/simulate.py": ("cached.store", "cached.records")}
TENSORS = {"torch", "transformers", "numba"}
# The modules that compute: the engine's device modules; the converter, which is a process of its own; and the guard of the
# payload's mapping and the copies through it, which are machine code (decisions 5 and 8).
TENSOR_MODULES = {
    "engine/attention/cpu.py", "engine/attention/gather.py", "engine/attention/interface.py",
    "engine/attention/paged_decode.py", "engine/cuda_device.py", "engine/fused.py", "engine/kv_memory.py", "engine/layer_kernels.py", "engine/model.py",
    "engine/claims.py", "engine/int8_linear.py", "engine/attention/panel_softmax.py", "engine/attention/tiled.py", "engine/linears.py", "engine/panel_block.py", "engine/panel_linear.py", "engine/rotary_tables.py",
    "engine/kernel_cache.py", "engine/panel_products.py",
    "engine/register_tiles.py", "engine/row_scan.py", "engine/runner.py", "engine/sampler.py", "engine/vector_exp.py",
    "command/model_convert.py", "cached/guarded_mapping.py", "cached/hashing_copy.py",
    "cached/streaming_copy.py",
}  # fmt: skip


def test_every_package_has_a_readme_with_a_table_of_its_files() -> None:
    missing = {package for package in PACKAGES if not modules_of(package)}

    assert missing == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_is_in_its_package_table_and_every_row_is_a_module(package: str) -> None:
    listed = [module.file for module in modules_of(package)]

    assert sorted(listed) == sorted(files_of(package))


@pytest.mark.parametrize("module", all_modules(), ids=str)
def test_a_module_imports_only_its_own_layer_or_below_inside_its_package(module: Module) -> None:
    layers = {other.name: other.layer for other in modules_of(module.package)}
    assert module.layer in LAYERS

    above = [
        f"line {found.line}: {found.target} ({layers[found.target]})"
        for found in imports_of(module.path)
        if found.target in layers and LAYERS.index(layers[found.target]) > LAYERS.index(module.layer)
    ]

    assert above == []


@pytest.mark.parametrize("module", all_modules(), ids=str)
def test_a_module_imports_of_other_packages_only_what_the_map_allows(module: Module) -> None:
    others = (*(p for p in PACKAGES if p != module.package), "halocline", "tests", "bench")

    forbidden = [
        f"line {found.line}: {found.target}"
        for found in imports_of(module.path)
        if found.target.split(".")[0] in others
        and not any(_is_covered(found.target, may) for may in (*MAY_IMPORT[module.package], *MAY_IMPORT_TOO.get(str(module), ())))
    ]  # fmt: skip

    assert forbidden == []


def test_the_map_allows_nothing_that_nobody_imports() -> None:
    imported = {
        package: {found.target for module in modules_of(package) for found in imports_of(module.path)}
        for package in PACKAGES
    }

    unused = [
        f"{package} → {may}"
        for package, allowed in MAY_IMPORT.items()
        for may in allowed
        if not any(_is_covered(target, may) for target in imported[package])
    ]
    for file, allowed in MAY_IMPORT_TOO.items():
        targets = {found.target for found in imports_of(ROOT / file)}
        unused += [f"{file} → {may}" for may in allowed if may not in targets]

    assert unused == []


@pytest.mark.parametrize("package", ["gateway", "engine"])
def test_the_architecture_shows_the_same_map(package: str) -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    lines = re.findall(rf"^{package} +──> (.*?)(?=^\S|^```)", text, re.MULTILINE | re.DOTALL)
    shown = {
        f"{other}.{name.strip()}"
        for other, names in re.findall(r"(\w+)\.\{([^}]*)\}", lines[0])
        for name in names.split(",")
    }

    assert shown == {may for may in MAY_IMPORT[package] if not may.endswith(".")}
    assert all(may.rstrip(".") in lines[0] for may in MAY_IMPORT[package] if may.endswith("."))


def test_the_command_imports_other_packages_only_when_they_are_needed() -> None:
    """`halocline --help` must not wait for SQLAlchemy or torch."""
    files = [ROOT / "halocline.py", *(module.path for module in modules_of("command"))]

    early = [
        f"{file.name}:{found.line}: {found.target}"
        for file in files
        for found in imports_of(file)
        if found.at_load and found.target.split(".")[0] in ("gateway", "engine", "cached", "tenants", "torch", "transformers", "sqlalchemy")
    ]  # fmt: skip

    assert early == []


@pytest.mark.parametrize("module", [m for m in all_modules() if m.layer in PURE], ids=str)
def test_a_pure_module_has_no_clock_no_chance_no_environment_and_does_not_wait(module: Module) -> None:
    tree = ast.parse(module.path.read_text(encoding="utf-8"))

    imported = [f"line {i.line}: {i.target}" for i in imports_of(module.path) if _is_or_under(i.target, IMPURE_IMPORTS)]
    called = [
        f"line {n.lineno}: {_dotted(n)}"
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute) and _dotted(n) in IMPURE_CALLS
    ]
    waits = [f"line {n.lineno}: async" for n in ast.walk(tree) if isinstance(n, ast.AsyncFunctionDef | ast.Await)]

    assert imported + called + waits == []


def test_torch_and_what_compiles_are_imported_by_the_modules_that_compute_and_by_no_others() -> None:
    importing = {
        str(module)
        for module in all_modules()
        if any(_is_or_under(found.target, TENSORS) for found in imports_of(module.path))
    }

    assert importing == TENSOR_MODULES


def test_the_engines_modules_that_compute_are_shells() -> None:
    layers = {str(module): module.layer for module in modules_of("engine")}

    assert {layers[each] for each in TENSOR_MODULES if each.startswith("engine/")} == {"shell"}


@pytest.mark.parametrize("module", all_modules(), ids=str)
def test_aiohttp_is_imported_only_in_shells_of_the_gateway_and_metrics_endpoints(module: Module) -> None:
    wanted = [i for i in imports_of(module.path) if _is_or_under(i.target, {"aiohttp"})]
    may = (module.package == "gateway" and module.layer in ("shell", "main")) or module.file.endswith("metrics.py")

    assert not wanted or may


@pytest.mark.parametrize("package", [*PACKAGES, "tests", "bench"])
def test_init_files_are_empty(package: str) -> None:
    filled = [str(file.relative_to(ROOT)) for file in (ROOT / package).rglob("__init__.py") if file.read_bytes()]

    assert filled == []


def _is_covered(target: str, may: str) -> bool:
    """Whether an entry of the map allows the module; `tenants.` stands for all of a package."""
    return target == may or (may.endswith(".") and target.startswith(may))


def _is_or_under(target: str, names: set[str]) -> bool:
    return any(target == name or target.startswith(name + ".") for name in names)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_the_reader_of_imports_sees_what_it_should(tmp_path: Path) -> None:
    file = tmp_path / "sample.py"
    file.write_text(
        "import os\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n"
        "def later():\n    from engine import client\n"
    )

    found = [(i.target, i.at_load) for i in imports_of(file)]

    assert found == [("os", True), ("typing", True), ("engine.client", False)]

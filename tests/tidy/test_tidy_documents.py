"""What documents say that a test can check: settings, commands, links, words."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import halocline
from command.group import CommandContext
from command.settings import package_sections
from tests.tidy import configuration
from tests.tidy.layers import PACKAGES, ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "systemd").glob("*.md"),
                    *(ROOT / "bench").glob("*.md"), *(ROOT / p / "README.md" for p in PACKAGES)])  # fmt: skip


def test_the_page_of_settings_is_what_the_models_say() -> None:
    assert configuration.PAGE.read_text(encoding="utf-8") == configuration.page(), (
        "run python -m tests.tidy.configuration"
    )


@pytest.mark.parametrize("section", ["gateway", "engine", "cached", "tenants"])
def test_every_setting_says_what_it_means(section: str) -> None:
    fields = package_sections()[section].model_fields

    silent = [k for k, field in fields.items() if not (field.description or configuration.MEANINGS.get((section, k)))]

    assert silent == []


def shell_lines(document: Path) -> Iterator[str]:
    """Commands in fenced blocks without here-documents, continuation lines joined."""
    for block in re.findall(r"```(?:sh)?\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL):
        text = re.sub(r"<<'(\w+)'\n.*?\n\1\n", "\n", block, flags=re.DOTALL)
        yield from (line.strip() for line in text.replace("\\\n", " ").splitlines())


def halocline_commands() -> list[tuple[str, str]]:
    found = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8") if document.exists() else ""
        inline = re.findall(r"`(halocline [^`]+)`", text)
        lines = [*(shell_lines(document) if document.exists() else ()), *inline]
        for line in lines:
            match = re.search(r"(?:^(?:[A-Z_]+=\S+ )*|\S/)halocline ((?!-)[a-z][^|>]*)", line)
            if match and "…" not in line:
                found.append((document.name, match[1].strip()))
    return sorted(set(found))


@pytest.mark.parametrize(("document", "line"), halocline_commands())
def test_every_halocline_command_in_a_document_is_one_that_parses(document: str, line: str) -> None:
    words = [word for word in shlex.split(line) if word not in ("…",)]
    command: click.Command = halocline.cli
    ctx = click.Context(command, obj=CommandContext())
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name = words.pop(0)
        child = command.get_command(ctx, name)
        assert child is not None, f"{document}: halocline {line}: there is no {name}"
        command, ctx = child, click.Context(child, parent=ctx, info_name=name)
    if not isinstance(command, click.Group):
        flags = {flag for parameter in command.params for flag in parameter.opts}
        unknown = [w for w in words if w.startswith("--") and w.split("=")[0] not in {*flags, "--help"}]
        assert unknown == [], f"{document}: halocline {line}"


def test_every_make_target_in_a_document_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))

    named = {
        word
        for document in DOCUMENTS
        if document.exists()
        for word in re.findall(r"(?:`|^)make ([a-z-]+)", document.read_text(encoding="utf-8"), re.MULTILINE)
    }

    assert named <= targets


def test_every_link_and_file_that_a_document_names_is_there() -> None:
    broken = [
        f"{document.relative_to(ROOT)}: {target}"
        for document in DOCUMENTS
        if document.exists()
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8"))
        if not (document.parent / target).exists()
    ]

    assert broken == []


def test_decisions_are_numbered_without_gaps_and_have_the_three_parts() -> None:
    files = sorted((ROOT / "docs" / "decisions").glob("*.md"))

    assert [int(file.name[:4]) for file in files] == list(range(1, len(files) + 1))


def test_every_script_of_bench_is_in_its_readme() -> None:
    listed = (ROOT / "bench" / "README.md").read_text(encoding="utf-8")

    scripts = [f.name for f in (ROOT / "bench").glob("*.py") if f.name != "__init__.py"]

    assert [name for name in scripts if f"`{name}`" not in listed] == []

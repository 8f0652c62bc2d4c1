"""Prints tables: aligned for people at a terminal, tab-separated with a header when piped."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """One table on stdout. No colour when piped or with NO_COLOR."""
    if not sys.stdout.isatty():
        for row in (columns, *rows):
            click.echo("\t".join(" ".join(cell.split()) for cell in row))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold" if not os.environ.get("NO_COLOR") else "")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)

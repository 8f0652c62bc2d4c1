"""Fixtures that every kind of test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before anything imports torch or a tokenizer.
import engine.environment  # noqa: F401


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """The demo model, converted; `make test` puts it there with `halocline fetch-model`."""
    from command.paths import default_state_dir

    named = os.environ.get("HALOCLINE_TEST_MODEL")
    path = Path(named) if named else default_state_dir(os.environ, Path.home()) / "models" / "demo"
    if not (path / "config.json").exists():
        pytest.fail(
            f"no demo model at {path}; run `make test`, or `halocline fetch-model`, or set HALOCLINE_TEST_MODEL"
        )
    return path

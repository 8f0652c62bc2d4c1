"""Fixtures that every kind of test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """The demo model, converted; `make test` puts it there with `halocline fetch-model`."""
    path = Path(os.environ.get("HALOCLINE_TEST_MODEL", "")) if os.environ.get("HALOCLINE_TEST_MODEL") else None
    if path is None:
        from command.paths import default_state_dir

        path = default_state_dir() / "models" / "demo"
    if not (path / "config.json").exists():
        pytest.fail(
            f"no demo model at {path}; run `make test`, or `halocline fetch-model`, or set HALOCLINE_TEST_MODEL"
        )
    return path

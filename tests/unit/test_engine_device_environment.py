"""What must be in the environment before torch is loaded."""

from __future__ import annotations

import os
import subprocess
import sys


def test_an_engine_sets_the_wait_policy_before_torch_is_loaded_and_obeys_a_person_who_set_it() -> None:
    """With spinning OpenMP threads beside one busy process, small steps were ten times slower."""
    script = (
        "import engine.environment, os, sys; "
        "print('torch' in sys.modules, os.environ['OMP_WAIT_POLICY'], os.environ['HF_HUB_OFFLINE'])"
    )
    clean = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "HF_HUB_OFFLINE")}

    def run(environment: dict[str, str]) -> str:
        return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True).stdout

    assert run(clean) == "False PASSIVE 1\n"
    assert run(clean | {"OMP_WAIT_POLICY": "ACTIVE"}) == "False ACTIVE 1\n"

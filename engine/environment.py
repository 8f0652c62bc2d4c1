"""Sets what the libraries below torch read from the environment when they are loaded; import it before torch.

Only processes that run a model import it: `engine/main.py` first of all, and the tests through their conftest.
"""

from __future__ import annotations

import os

# Two spinning OpenMP threads beside one busy process made small steps ten times slower; sleeping ones cost nothing
# that can be measured.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# The tokenizers' thread pool warns about forks, and nothing here tokenizes in an engine.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A model is a directory on this machine: no start may wait for, or depend on, a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

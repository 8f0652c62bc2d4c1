"""Sets what the libraries below torch read from the environment when they are loaded; import it before torch.

Only processes that run a model import it: `engine/main.py` first of all, and the tests through their conftest.
"""

from __future__ import annotations

import os

# A thread that is out of work waits a moment before it sleeps: a step of one decode has hundreds of parallel parts with
# short gaps, and waking a sleeping thread for each was a quarter of the step (40 ms against 29 on two cores). Much longer waits cost more beside other busy processes than they gain (docs/performance.md).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
# The tokenizers' thread pool warns about forks, and nothing here tokenizes in an engine.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A model is a directory on this machine: no start may wait for, or depend on, a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

"""Compiles the dearest kernels at the first start of a version, each in a process of its own.

A process compiles one kernel at a time, and the engine has libraries and weights to load meanwhile. Whoever is done has put the
kernel where the engine finds it (`engine/kernel_cache.py`); what is missing then, for whatever reason, the engine
compiles itself when it first needs it. A kernel is compiled by calling it, with arrays of the types that the engine has.

python -m engine.kernel_builds tiles DIRECTORY HEAD_DIM GROUP      compiles one
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from engine.config import EngineConfig
from engine.errors import ModelRefused
from engine.kernel_cache import can_compile, directory_in, is_kept
from engine.model_files import inspect_model

_LONGEST_S: Final = 120.0
_GPU: Final = Path("/dev/nvidiactl")

log = logging.getLogger(__name__)


class KernelBuilds:
    """The processes under way; of none of them does anything depend but how long the start takes."""

    def __init__(self, processes: dict[str, subprocess.Popen[bytes]]) -> None:
        self._processes = processes

    def wait(self, progress: Callable[[str, float], None]) -> None:
        """Until all are over, or have taken far too long. What went wrong is logged."""
        until = time.monotonic() + _LONGEST_S
        processes = list(self._processes.items())
        for done, (name, process) in enumerate(processes):
            progress("compiling kernels", done / len(processes))
            try:
                code = process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            if code:
                log.warning("compiling the kernel %s ended with %d; it is compiled later", name, code)
        self._processes.clear()

    def stop(self) -> None:
        """End those that still run."""
        for process in list(self._processes.values()):
            process.kill()
            process.wait()
        self._processes.clear()


def start_builds(config: EngineConfig) -> KernelBuilds:
    """Begin to compile what this model will need and is not there yet. Only looks at files and starts processes."""
    processes: dict[str, subprocess.Popen[bytes]] = {}
    heads = _heads(config)
    directory = config.state_dir / "kernels"
    if heads is None or not is_kept(directory):
        return KernelBuilds(processes)
    root = str(Path(__file__).parents[1])
    environment = dict(os.environ)
    if root != sysconfig.get_paths()["purelib"]:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    for name in BUILDS:
        if (name == "block" and config.quantization != "none") or _mark(directory, name, *heads).exists():
            continue
        # Not from the working directory: whoever may write there is not asked to compile.
        command = [sys.executable, "-P", "-m", "engine.kernel_builds", name, str(directory), *map(str, heads)]
        try:
            processes[name] = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            log.warning("no process to compile the kernel %s in: %s; it is compiled later", name, error)
    return KernelBuilds(processes)


def _heads(config: EngineConfig) -> tuple[int, int] | None:
    """Head size and query heads for each KV head; None where no kernel will be wanted, or the model will be refused."""
    if config.device == "cuda" or (config.device == "auto" and _GPU.exists()):
        return None
    if config.dtype not in ("auto", "float32"):
        return None
    try:
        of_model = inspect_model(config.model_dir).config
        heads = int(of_model["num_attention_heads"])
        head_dim = int(of_model.get("head_dim") or of_model["hidden_size"] // heads)
        kv_heads = int(of_model.get("num_key_value_heads") or heads)
    except (ModelRefused, KeyError, TypeError, ValueError, ZeroDivisionError):
        return None  # Whoever loads it says what is wrong.
    return (head_dim, heads // kv_heads) if 0 < kv_heads <= heads and head_dim > 0 else None


def _mark(directory: Path, name: str, head_dim: int, group: int) -> Path:
    """Says that a kernel is there, for this Python and this numba, whose cache knows no other's."""
    heads = f"-{head_dim}-{group}" if name == "segments" else ""
    return directory_in(directory) / f"{name}{heads}.{sys.implementation.cache_tag}-{_numba_version()}.compiled"


def _numba_version() -> str:
    try:
        return version("numba")
    except PackageNotFoundError:
        return "none"  # The engine says what that means for it.


# What the processes do. ---------------------------------------------------------------------------------------------


def build_tiles(head_dim: int, group: int) -> None:
    """Attention of chunks and shared prefixes."""
    import numpy as np

    from engine.attention.tiled import Part, attend_parts, plan_parts

    rows, tokens = 2, 4
    pool = np.zeros((1, 1, 2, tokens, 1, head_dim), np.float32)
    query, out = (np.zeros((rows, group, head_dim), np.float32) for _ in range(2))
    weights = np.full((rows, group), -np.inf, np.float32)
    parts = plan_parts([Part(np.arange(rows), np.arange(rows) + 1, np.arange(1), 0)], 1, group, 1)
    attend_parts(pool, 0, query, 1.0, *parts.arguments, weights, out)


def build_segments(head_dim: int, group: int) -> None:
    """Attention of decodes."""
    import numpy as np

    from engine.attention.paged_decode import segment_kernel
    from engine.batch import pack
    from engine.plan import Chunk, StepPlan

    tokens = 4
    pool = np.zeros((1, 1, 2, tokens, 1, head_dim), np.float32)
    short = pack(StepPlan(0, (), (Chunk(0, 0, (0,), (0,), None),)), tokens, 1, 1).short
    assert short is not None
    query, out = (np.zeros((1, group, head_dim), np.float32) for _ in range(2))
    scratch = np.zeros((1, group, head_dim + 2), np.float32)
    weights = np.zeros((0, 0), np.float32)
    segment_kernel(head_dim, group)(pool, 0, query, 1.0, *short.arguments, scratch, True, weights, out)


def build_block(head_dim: int, group: int) -> None:
    """What lies between two attentions, of whatever width."""
    import numpy as np

    from engine.narrow_weights import WIDE
    from engine.panel_block import between_attentions
    from engine.register_tiles import PANEL

    rows, panels = np.zeros((1, 1, PANEL), np.float32), np.zeros((1, PANEL * PANEL * WIDE), np.uint8)
    held, norm = (panels, np.empty(0, np.float32), 1), np.ones(PANEL, np.float32)
    pairs = (np.zeros((2, PANEL * PANEL * WIDE), np.uint8), *held[1:])
    arrays = [rows.copy() for _ in range(5)]
    between_attentions(*arrays, held, pairs, held, held, norm, norm, np.float32(1e-5), 1)


BUILDS: Final[dict[str, Callable[[int, int], None]]] = {
    "segments": build_segments,
    "tiles": build_tiles,
    "block": build_block,
}


def main(name: str, directory: Path, head_dim: int, group: int) -> None:
    """Compile one kernel into the directory, and leave a mark that says so."""
    if not can_compile(directory):
        return
    from engine.register_tiles import is_available

    if is_available():  # Where it is not, none of them will be wanted.
        BUILDS[name](head_dim, group)
    _mark(directory, name, head_dim, group).touch()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))

"""Where compiled kernels are kept between starts, and whether anything can be compiled on this machine at all."""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from functools import cache
from pathlib import Path

_log = logging.getLogger(__name__)


def can_compile(kernel_cache_dir: Path | None) -> bool:
    """Whether numba works here. To be asked before the first module with kernels is imported, because it also says
    where their compiled code is kept."""
    try:
        import numba
    except Exception as error:
        # numba fails in its own ways on machines it does not know; the plain path is slower and right.
        _log.warning("kernels cannot be compiled here, the engine is slower without them: %s", error)
        return False
    if kernel_cache_dir is not None:
        directory = directory_in(kernel_cache_dir)
        if is_kept(kernel_cache_dir):
            numba.config.CACHE_DIR = str(directory)  # type: ignore[attr-defined]
    return True


def directory_in(kernel_cache_dir: Path) -> Path:
    """Where the kernels of this version are kept: numba knows a kernel by the file that it stands in, and not by those
    that it is built from."""
    return kernel_cache_dir / _sources_digest()


@cache
def _sources_digest() -> str:
    """A name that changes with any kernel of this package."""
    return hashlib.sha256(b"".join(kernel_sources().values())).hexdigest()[:16]


def kernel_sources() -> dict[Path, bytes]:
    """The modules of this package that kernels are made of, and what they hold: those that name what compiles them."""
    texts = {path: path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py"))}
    return {path: text for path, text in texts.items() if b"numba" in text or b"llvmlite" in text}


def is_kept(kernel_cache_dir: Path) -> bool:
    """Whether the kernels of this version may be kept below this directory: whoever may write to it could put another in
    the place of theirs."""
    return is_ours(kernel_cache_dir) and is_ours(directory_in(kernel_cache_dir))


def is_ours(directory: Path) -> bool:
    """Whether compiled code may be kept there: what numba loads from its cache it executes, so nobody else may write
    to it. Where not, numba finds a place of its own beside the package or below the user's home."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        _log.warning("compiled kernels cannot be kept in %s: %s", directory, error)
        return False
    if status.st_uid != os.geteuid() or status.st_mode & 0o022 or not stat.S_ISDIR(status.st_mode):
        _log.warning("compiled kernels are not kept in %s, which others may write to; chmod go-w it", directory)
        return False
    return True

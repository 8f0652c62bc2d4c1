"""Computes the digest that tells one model's weights from another's, once, and remembers it between starts.

A digest is remembered by path, size and times of the file; a file that changed in any of them is read again. What the
digest is used for is for `engine/layout.py`. A name or a directory is never taken for an identity: other weights
under the same name would be answered from the old ones' cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from cached.keys import length_prefixed

_READ_BYTES = 8 * 2**20
_MAX_REMEMBERED = 4096

FileState = tuple[int, int, int]


def weights_digest(files: Sequence[Path], memory: Path, progress: Callable[[float], None] = lambda _: None) -> bytes:
    """SHA-256 over the digests of `files` in order of name. `memory` is the JSON file of digests known before; it may
    be missing, damaged or unwritable: then the weights are read."""
    remembered = _recall(memory)
    total = sum(path.stat().st_size for path in files) or 1
    done = 0
    digests: dict[str, bytes] = {}
    fresh: dict[str, dict[str, object]] = {}
    for path in files:
        key, state = str(path.resolve()), file_state(path)
        digest = _known(remembered.get(key), state)
        if digest is None:
            base = done
            digest = _hash(path, lambda read, base=base: progress((base + read) / total))  # type: ignore[misc]
            fresh[key] = {"state": list(state), "sha256": digest.hex()}
        digests[path.name] = digest
        done += path.stat().st_size
        progress(done / total)
    if fresh:
        _remember(memory, remembered | fresh)
    return hashlib.sha256(b"".join(length_prefixed(name.encode()) + digests[name] for name in sorted(digests))).digest()


def file_state(path: Path) -> FileState:
    """What changes when a file's content does: size, time of modification, time of change (which cannot be set back)."""
    status = path.stat()
    return (status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _known(entry: object, state: FileState) -> bytes | None:
    if not isinstance(entry, dict) or entry.get("state") != list(state):
        return None
    try:
        digest = bytes.fromhex(entry["sha256"])
    except (KeyError, TypeError, ValueError):
        return None
    return digest if len(digest) == 32 else None


def _hash(path: Path, progress: Callable[[int], None]) -> bytes:
    """Reads the file from beginning to end; hashing releases the GIL, so that loading may go on beside it."""
    sha, read = hashlib.sha256(), 0
    buffer = bytearray(_READ_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            sha.update(memoryview(buffer)[:count])
            read += count
            progress(read)
    return sha.digest()


def _recall(memory: Path) -> dict[str, dict[str, object]]:
    try:
        entries = json.loads(memory.read_text())
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _remember(memory: Path, entries: dict[str, dict[str, object]]) -> None:
    """Writes beside and renames, so that a reader never finds half a file. A state directory that cannot be written
    costs the next start a second, and this one nothing."""
    newest = dict(list(entries.items())[-_MAX_REMEMBERED:])
    name = None
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=memory.parent, prefix=memory.name, delete=False) as file:
            name = file.name
            json.dump(newest, file)
        os.replace(name, memory)
    except OSError:
        if name is not None:
            with contextlib.suppress(OSError):
                os.unlink(name)

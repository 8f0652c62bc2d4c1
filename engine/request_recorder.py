"""Writes the request log (`record`): its key, its file, and a thread of its own, so that no step waits for a disk.

When the disk is slower than the requests, lines are left out and counted. What a line says is `request_log.py`'s.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import threading
from pathlib import Path
from typing import Final

from cached.keys import namespace
from engine.errors import EngineConfigError
from engine.request_log import KEY_BYTES, header_line, request_line
from engine.values import NewRequest

MAX_WAITING: Final = 1024
KEY_FILE: Final = "request-log.key"


class RequestRecorder:
    """One log, appended to. Opening it raises EngineConfigError; recording never raises and never waits."""

    def __init__(self, path: Path, state_dir: Path, layout_fingerprint: bytes) -> None:
        self.num_dropped = 0
        self._layout_fingerprint = layout_fingerprint
        self._queue: queue.Queue[tuple[NewRequest, float] | None] = queue.Queue(MAX_WAITING)
        try:
            self._key = load_or_create_key(state_dir / KEY_FILE)
            # Whoever reads the log learns when whose prompts came and what they share.
            self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "ab")
            self._begin(path)
        except OSError as error:
            raise EngineConfigError(f"record: the request log {path} cannot be written: {error}") from error
        self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)
        self._thread.start()

    def record(self, request: NewRequest, at_s: float) -> None:
        """Write a line of this request, when there is time; `at_s` is in seconds since 1970."""
        try:
            self._queue.put_nowait((request, at_s))
        except queue.Full:
            self.num_dropped += 1

    def close(self) -> None:
        """Write what waits, for at most two seconds."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=1.0)
        self._thread.join(timeout=1.0)

    def _begin(self, path: Path) -> None:
        # A line that the last life of the engine did not finish must not swallow ours.
        with path.open("rb") as written:
            if written.seek(0, os.SEEK_END):
                written.seek(-1, os.SEEK_END)
                if written.read(1) != b"\n":
                    self._file.write(b"\n")
        self._file.write(header_line(self._key))
        self._file.flush()

    def _run(self) -> None:
        with self._file:
            while (item := self._queue.get()) is not None:
                request, at_s = item
                root = namespace(self._layout_fingerprint, request.cache_salt)
                line = request_line(self._key, at_s, root, request.prompt, request.max_tokens)
                try:
                    self._file.write(line)
                    if self._queue.empty():
                        self._file.flush()
                except OSError:
                    self.num_dropped += 1  # A full disk: the log is not worth a request.


def load_or_create_key(path: Path) -> bytes:
    """The key of the log's hashes, made once; nobody but the engine's user reads it."""
    with contextlib.suppress(FileNotFoundError):
        key = path.read_bytes()
        if len(key) != KEY_BYTES:
            raise EngineConfigError(f"{path} has {len(key)} bytes, not {KEY_BYTES}; remove it to begin with a new key")
        return key
    key = secrets.token_bytes(KEY_BYTES)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(key)
    os.replace(unfinished, path)
    return key

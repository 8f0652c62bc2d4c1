"""One supervised process: starts it, reads its log lines and its notifications, sees it end.

It holds no opinion about restarts (`command/restarts.py`) or order (`command/supervisor.py`). A child lives in a process
group of its own, so that Ctrl-C reaches only the supervisor, and is killed by the kernel when the supervisor dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

MAX_LOG_BYTES = 16 * 2**20
MAX_LINE_BYTES = 16 * 1024
LAST_LINES = 40

_PR_SET_PDEATHSIG = 1
# Looked up before any fork: the function below runs between fork and exec, where imports and locks are off limits.
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def die_with_parent() -> None:
    """For `preexec_fn`: the kernel kills the child when the thread that started it ends, however it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class LogFile:
    """A child's log: appended to, and turned over to `.1` when it is full, so that it has a maximum."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open()

    def write(self, line: bytes) -> None:
        try:
            self._file.write(line)
        except OSError:
            # A full disk must not take the service down with its log; the line is still shown if it is a warning.
            return
        self._size += len(line)
        if self._size >= MAX_LOG_BYTES:
            self.close()
            os.replace(self._path, self._path.with_suffix(self._path.suffix + ".1"))
            self._open()

    def close(self) -> None:
        self._file.close()

    def _open(self) -> None:
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._file = os.fdopen(fd, "ab", buffering=0)
        self._size = self._path.stat().st_size


class Child:
    """A process that was started once; `ended` resolves to its exit code, negative for a signal."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        environ: Mapping[str, str],
        log: LogFile,
        notify_path: Path,
        on_line: Callable[[str, bytes], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.name = name
        self.status = "starting"
        self.ready = asyncio.Event()
        self.ended: asyncio.Future[int] = loop.create_future()
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._log = log
        self._on_line = on_line
        self._loop = loop
        self._pending = b""
        self._notify_path = notify_path
        self._notify = self._bind_notify()
        output, child_output = os.pipe2(os.O_CLOEXEC)
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=child_output,
                stderr=child_output,
                env={**environ, "NOTIFY_SOCKET": str(notify_path)},
                process_group=0,
                preexec_fn=die_with_parent,
            )
        except BaseException:
            os.close(output)
            self._notify.close()
            raise
        finally:
            os.close(child_output)
        self.started_at = time.monotonic()
        self._output = output
        os.set_blocking(output, False)
        self._pidfd = os.pidfd_open(self._process.pid)
        loop.add_reader(self._output, self._read_output)
        loop.add_reader(self._pidfd, self._reap)
        loop.add_reader(self._notify.fileno(), self._read_notifications)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lived_s(self) -> float:
        return time.monotonic() - self.started_at

    def signal(self, number: int) -> None:
        """Sends a signal; a child that has ended is left in peace."""
        if not self.ended.done():
            self._process.send_signal(number)

    def kill_group(self) -> None:
        """Kills the child and whatever it has started in its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _bind_notify(self) -> socket.socket:
        self._notify_path.unlink(missing_ok=True)
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        bound.setblocking(False)
        bound.bind(str(self._notify_path))
        return bound

    def _read_notifications(self) -> None:
        while True:
            try:
                message = self._notify.recv(4096)
            except BlockingIOError:
                return
            for line in message.decode("utf-8", "replace").splitlines():
                word, _, text = line.partition("=")
                if word == "READY" and text == "1":
                    self.ready.set()
                elif word == "STATUS":
                    self.status = text

    def _read_output(self) -> None:
        while True:
            try:
                data = os.read(self._output, 65536)
            except BlockingIOError:
                return
            if not data:
                self._loop.remove_reader(self._output)
                return
            *lines, self._pending = (self._pending + data).split(b"\n")
            for line in lines:
                self._take_line(line)
            if len(self._pending) > MAX_LINE_BYTES:
                self._take_line(self._pending)
                self._pending = b""

    def _take_line(self, line: bytes) -> None:
        self.last_lines.append(line[:MAX_LINE_BYTES].decode("utf-8", "replace"))
        self._log.write(line + b"\n")
        self._on_line(self.name, line)

    def _reap(self) -> None:
        # Before the wait: as long as the child is a zombie, its number and its group's cannot be another's.
        self.kill_group()
        code = self._process.wait()
        self._read_notifications()
        self._read_output()
        if self._pending:
            self._take_line(self._pending)
        for fd in (self._output, self._pidfd, self._notify.fileno()):
            self._loop.remove_reader(fd)
        os.close(self._output)
        os.close(self._pidfd)
        self._notify.close()
        self._notify_path.unlink(missing_ok=True)
        if not self.ended.done():
            self.ended.set_result(code)

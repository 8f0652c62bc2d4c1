"""Runs one cache daemon from its configuration until it is told to stop; the order of start and stop is here."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pwd
import signal
import socket
import sys
from collections.abc import Callable

import structlog

from cached import machine
from cached.arena import Arena
from cached.config import CachedConfig
from cached.errors import ArenaError, CachedError
from cached.server import Server, log

TIGHT = 0.9
"""The part of a memory limit beyond which an arena leaves too little for everything else in its control group."""

PERMISSION = 4
"""The command line's code for it."""


def run(config: CachedConfig) -> int:
    """Serve until SIGTERM or SIGINT; 0 after an orderly stop, 1 or 4 when the start failed, with the reason on stderr."""
    _configure_logging(config.log_level)
    try:
        allowed = _allowed_uids(config.allowed_users)
        check_machine(config)
        arena = Arena.open(
            config.arena_dir,
            int(config.host_cache_size),
            mlock=config.mlock,
            plans=config.parts,
            registration_bytes=int(config.registration_bytes),
        )
    except CachedError as error:
        log.error("cached cannot start", reason=str(error))
        return _code_of(error)
    with contextlib.ExitStack() as stack:
        stack.callback(arena.close, config.keep_arena)
        server = Server(config, arena, allowed)
        if config.metrics_listen is not None:
            from cached import metrics  # Costs a third of the start, and most daemons serve none.

            try:
                stack.callback(metrics.serve(config.metrics_listen, lambda: server.snapshot))
            except OSError as error:
                log.error("cached cannot serve metrics", listen=config.metrics_listen, reason=str(error))
                return 1
        stack.enter_context(_stop_on_signals(server.stop))
        # What was made so far lives as long as the process; the collector need not look at it again.
        gc.collect()
        gc.freeze()
        # Nothing here makes cycles by the request; a collection in the middle of one is only a late reply.
        gc.set_threshold(100_000, 50, 100)
        try:
            server.run(lambda: _ready(config, arena, server))
        except CachedError as error:
            log.error("cached cannot start", reason=str(error))
            return _code_of(error)
        _notify("STOPPING=1")
    return 0


def _code_of(error: CachedError) -> int:
    """4 where this user may not do what is asked, which no second try changes, so that a supervisor makes none; else 1."""
    return PERMISSION if isinstance(error.__cause__, PermissionError) else 1


def check_machine(config: CachedConfig) -> None:
    """Compare the arena with what the machine allows: raises ArenaError where it cannot live, warns where it may not."""
    size, limit = int(config.host_cache_size), machine.memory_limit()
    if limit is not None and size > limit:
        raise ArenaError(
            f"the arena of {size} bytes is larger than this control group's memory limit of {limit}, and the kernel would "
            "kill whoever fills it; lower host_cache_size or raise the limit (MemoryMax=, --memory)"
        )
    if limit is not None and size > limit * TIGHT:
        log.warning("the arena takes most of the control group's memory", bytes=size, limit=limit)
    kind = machine.file_system_of(config.arena_dir)
    if kind not in (None, "tmpfs", "ramfs", "hugetlbfs"):
        log.warning(
            "the arena does not lie in memory; set arena_dir to a directory on a tmpfs",
            arena=str(config.arena_dir),
            file_system=kind,
        )


def _ready(config: CachedConfig, arena: Arena, server: Server) -> None:
    statistics = server.tier.statistics()
    log.info(
        "cached is ready",
        socket=str(config.socket),
        arena=str(config.arena_dir),
        bytes=arena.payload_bytes,
        parts=len(arena.parts),
        restored=statistics.restored,
        lost=statistics.lost_at_restart,
    )
    _notify(f"READY=1\nSTATUS={statistics.used} blocks kept, serving at {config.socket}")


def _allowed_uids(users: tuple[str, ...]) -> frozenset[int]:
    uids = {0, os.geteuid()}
    for user in users:
        if user.isdigit():
            uids.add(int(user))
            continue
        try:
            uids.add(pwd.getpwnam(user).pw_uid)
        except KeyError:
            raise CachedError(f"allowed_users names {user!r}, which is no user of this machine") from None
    return frozenset(uids)


@contextlib.contextmanager
def _stop_on_signals(stop: Callable[[], None]):  # type: ignore[no-untyped-def]
    """SIGTERM and SIGINT stop the server, in the main thread; elsewhere (in tests) there are no handlers to set."""
    former = {}
    with contextlib.suppress(ValueError):
        for number in (signal.SIGTERM, signal.SIGINT):
            former[number] = signal.signal(number, lambda _number, _frame: stop())
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _notify(message: str) -> None:
    """Tell systemd, if it listens (sd_notify); the socket's path may be abstract."""
    path = os.environ.get("NOTIFY_SOCKET")
    if not path:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.sendto(message.encode(), "\0" + path[1:] if path.startswith("@") else path)


def _configure_logging(level: str) -> None:
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.dev.ConsoleRenderer(colors=False) if sys.stderr.isatty() else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )

"""The way to the database: connections, transactions, the SQLite file, and foreign errors turned into ours.

Everything here that is SQLite's is a pragma or a file; the queries, which PostgreSQL answers as well, are in `store`.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.pool import QueuePool

from tenants.config import sqlite_path
from tenants.errors import (
    AccessDenied,
    InvalidValue,
    StoreBusy,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreUnavailable,
)

_BEGIN = "halocline_begin"

# Any number will do, as long as it never changes and nobody else's is likely to be the same.
_MIGRATION_LOCK = 0x68616C6F

# Synchronous FULL and not NORMAL: a revocation that was reported must survive a power cut. Secure delete overwrites
# what is deleted, so that the secrets of a deleted tenant do not linger in free pages.
_PRAGMAS = ("foreign_keys=ON", "synchronous=FULL", "secure_delete=ON", "trusted_schema=OFF", "cell_size_check=ON")


class Database:
    """One database by its URL. `reading` and `writing` are the only doors; both end their transaction."""

    def __init__(self, url: str, busy_timeout_s: float) -> None:
        self.busy_timeout_s = busy_timeout_s
        self.path = sqlite_path(url)
        parsed = sa.URL.create("sqlite", database=str(self.path)) if self.path else _parse_server_url(url)
        # What errors call it: the file, or the URL without its password, which may stand in the query as well.
        self.label = str(self.path or parsed.set(query={}).render_as_string(hide_password=True))
        self._engine = self._sqlite_engine(parsed) if self.path else self._server_engine(parsed)
        self._writer = self._engine.execution_options(**{_BEGIN: "BEGIN IMMEDIATE"})
        self._file: tuple[int, int] | None = None
        self._file_lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Database({self.label!r})"

    def close(self) -> None:
        """Close all connections; the database can be used again afterwards."""
        self._engine.dispose()

    def create_file(self) -> None:
        """Make the SQLite file, 0600 in a 0700 directory, and switch it to WAL; nothing to do for a server."""
        if self.path is None:
            return
        with self._translated():
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                # Before SQLite does it by the umask; its -wal and -shm files take their mode from this one.
                os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            self._check_file()
            self._switch_to_wal()

    def file_is_missing(self) -> bool:
        """Whether this is an SQLite database whose file does not exist."""
        with self._translated():
            return self.path is not None and not self.path.exists()

    @contextlib.contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """A transaction that sees one state of an SQLite database; on a server each statement sees its own."""
        with self._translated():
            self._check_file()
            with self._engine.begin() as connection:
                yield connection

    @contextlib.contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """A transaction that may write, committed at the end of the block, rolled back by an exception."""
        with self._translated():
            self._check_file()
            with self._writer.begin() as connection:
                yield connection

    @contextlib.contextmanager
    def migrating(self) -> Iterator[sa.Connection]:
        """A writing transaction that no other migration runs beside; what others have done is visible in it."""
        with self.writing() as connection:
            # An SQLite writer is alone anyway; a server lets two processes create one table, and fails the second.
            if self.path is None:
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
            yield connection

    def forget_deleted(self) -> None:
        """Take what was deleted out of the write-ahead log too, as far as readers allow it just now."""
        if self.path is None:
            return
        with contextlib.suppress(sqlite3.Error, exc.SQLAlchemyError), contextlib.closing(self._connect()) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def integrity_problems(self) -> list[str]:
        """What SQLite itself finds wrong with its file; a server checks itself."""
        if self.path is None:
            return []
        with self._translated(), contextlib.closing(self._connect()) as connection:
            found = [str(row[0]) for row in connection.execute("PRAGMA integrity_check") if row[0] != "ok"]
            return found + [f"dangling reference in {row[0]}" for row in connection.execute("PRAGMA foreign_key_check")]

    def _sqlite_engine(self, url: sa.URL) -> sa.Engine:
        engine = sa.create_engine(url, creator=self._connect, poolclass=QueuePool, hide_parameters=True)
        sa.event.listen(engine, "begin", _begin_sqlite)
        return engine

    def _server_engine(self, url: sa.URL) -> sa.Engine:
        try:
            engine = sa.create_engine(
                url,
                pool_pre_ping=True,
                hide_parameters=True,
                connect_args={"connect_timeout": max(1, round(self.busy_timeout_s))},
            )
        except ImportError as error:
            raise StoreUnavailable(
                f"the driver for {self.label} is not installed ({error.name}); run: pip install 'psycopg[binary]'"
            ) from error
        sa.event.listen(engine, "connect", self._limit_waits)
        return engine

    def _limit_waits(self, connection: Any, _record: Any) -> None:
        # No statement here takes long: whoever waits longer waits for a lock that somebody forgot.
        limit_ms = round(self.busy_timeout_s * 1000)
        with contextlib.closing(connection.cursor()) as cursor:
            cursor.execute(f"SET lock_timeout = {limit_ms}")
            cursor.execute(f"SET statement_timeout = {2 * limit_ms}")
        connection.commit()

    def _connect(self) -> sqlite3.Connection:
        # mode=rw: a file that has vanished is an error and never silently a new, empty store.
        # isolation_level=None: transactions begin where `_begin_sqlite` says, and not by sqlite3's guess.
        connection = sqlite3.connect(
            f"file:{quote(str(self.path))}?mode=rw",
            uri=True,
            timeout=self.busy_timeout_s,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            for pragma in _PRAGMAS:
                connection.execute(f"PRAGMA {pragma}")
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def _switch_to_wal(self) -> None:
        """WAL lets the gateway read while the command line writes. The switch needs the file to itself for a moment
        and does not wait for it as other statements do, so it is tried until the time allowed is over."""
        give_up_at = time.monotonic() + self.busy_timeout_s
        with contextlib.closing(self._connect()) as connection:
            while True:
                try:
                    mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
                    break
                except sqlite3.OperationalError as error:
                    if _primary_code(error) != sqlite3.SQLITE_BUSY or time.monotonic() >= give_up_at:
                        raise
                time.sleep(0.01)
        if mode != "wal":
            raise StoreUnavailable(
                f"{self.label}: this file system cannot share memory between processes (journal mode {mode}); "
                "put the state directory on a local disk, or use PostgreSQL"
            )

    def _check_file(self) -> None:
        """Refuse a file that others can use; drop connections to a file that is no longer the one at this path.

        A store restored from a backup is another file: without this, old connections would go on answering from
        what was deleted, and a revoked key would live as long as the gateway.
        """
        if self.path is None:
            return
        status = self.path.stat()
        if status.st_mode & 0o077:
            raise AccessDenied(
                f"the tenant store {self.path} can be used by other users (mode {stat.S_IMODE(status.st_mode):04o}); "
                f"run: chmod 600 {self.path}"
            )
        file = (status.st_dev, status.st_ino)
        with self._file_lock:
            if self._file not in (None, file):
                self._engine.dispose()
            self._file = file

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except exc.DBAPIError as error:
            raise self._error(error.orig) from error
        except sqlite3.Error as error:
            raise self._error(error) from error
        except exc.TimeoutError as error:
            raise StoreBusy(f"the tenant store {self.label} has no connection to spare; try again") from error
        except exc.SQLAlchemyError as error:
            raise StoreError(f"the tenant store {self.label} could not answer ({type(error).__name__})") from error
        except FileNotFoundError as error:
            raise StoreUnavailable(
                f"the tenant store {self.label} is gone; put it back, or restart to begin with an empty one"
            ) from error
        except PermissionError as error:
            raise AccessDenied(
                f"the tenant store {self.label} is not accessible to this user; {_OWNER_HINT}"
            ) from error
        except OSError as error:
            raise StoreUnavailable(f"the tenant store {self.label} cannot be used: {error.strerror}") from error

    def _error(self, original: BaseException | None) -> StoreError | AccessDenied:
        if isinstance(original, sqlite3.Error):
            make_error, problem = _SQLITE_ERRORS.get(_primary_code(original), (StoreError, f"failed: {original}"))
        else:
            # The driver's first line names host and reason and never a parameter; later lines repeat the statement.
            refused = f"cannot be reached or refused: {str(original).strip().partition(chr(10))[0]}"
            state = getattr(original, "sqlstate", None)
            make_error, problem = _SERVER_ERRORS.get(state or "", (StoreUnavailable, refused))
        return make_error(f"the tenant store {self.label} {problem}")


_OWNER_HINT = "run as the user who owns the state directory"

_Kind = type[StoreError] | type[AccessDenied]
_LOCKED: tuple[_Kind, str] = (StoreBusy, "is locked by another process; nothing was changed, try again")
_FULL: tuple[_Kind, str] = (StoreFull, "has no room to write; nothing was changed, make room on its disk and try again")

# By SQLSTATE: lock not available, query canceled (by the time limit), disk full, insufficient privilege.
_SERVER_ERRORS: dict[str, tuple[_Kind, str]] = {
    "55P03": _LOCKED,
    "57014": _LOCKED,
    "53100": _FULL,
    "42501": (AccessDenied, "does not let this user do that; grant it the rights to the tables"),
}

_SQLITE_ERRORS: dict[int, tuple[_Kind, str]] = {
    sqlite3.SQLITE_BUSY: _LOCKED,
    sqlite3.SQLITE_LOCKED: _LOCKED,
    sqlite3.SQLITE_FULL: _FULL,
    sqlite3.SQLITE_IOERR: (StoreUnavailable, "cannot be read or written (I/O error); check its disk and its room"),
    sqlite3.SQLITE_CANTOPEN: (StoreUnavailable, f"cannot be opened; check that it is there, and {_OWNER_HINT}"),
    sqlite3.SQLITE_READONLY: (AccessDenied, f"is read-only to this user; {_OWNER_HINT}"),
    sqlite3.SQLITE_PERM: (AccessDenied, f"is not accessible to this user; {_OWNER_HINT}"),
    sqlite3.SQLITE_CORRUPT: (StoreCorrupt, "is damaged; stop Halocline and restore the file from a backup"),
    sqlite3.SQLITE_NOTADB: (StoreCorrupt, "is not an SQLite database; move it away, or restore it from a backup"),
}


def _primary_code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _begin_sqlite(connection: sa.Connection) -> None:
    # A write takes the lock at once: a transaction that reads first and then writes would fail, not wait, when another
    # process wrote in between.
    begin: Any = connection.get_execution_options().get(_BEGIN, "BEGIN")
    connection.exec_driver_sql(begin)


def _parse_server_url(url: str) -> sa.URL:
    try:
        return sa.make_url(url)
    except (exc.ArgumentError, ValueError) as error:
        # Neither the URL nor what the parser says of it is repeated: it may carry a password.
        raise InvalidValue("the tenant store's URL cannot be read; write postgresql://user@host/database") from error

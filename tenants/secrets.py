"""The master key's file, and the vault that seals records under it.

`load_or_create_master_key` decides whether a file may serve as master key; `Vault` seals with AES-256-GCM and binds
each sealed record to its place, so that no record can be moved to another row. Where the file is, the command line
says; what is sealed, the store.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from tenants.errors import AccessDenied, MasterKeyError, SealBroken

MASTER_KEY_BYTES = 32
KEY_VERSION = 1
"""Goes into every sealed record, for the day on which the master key can be changed."""

_NONCE_BYTES = 12
_SEAL_INFO = b"halocline/vault/seal/1"
_PEPPER_INFO = b"halocline/vault/pepper/1"


@dataclass(frozen=True, slots=True)
class MasterKey:
    """The key, and the file it came from, so that an error can name it."""

    key: bytes = field(repr=False)
    origin: str


class Vault:
    """Seals and opens records, and holds the pepper under which API keys are digested.

    Both keys are derived from the master key, so that neither use says anything about the other.
    """

    def __init__(self, master: MasterKey | bytes) -> None:
        if isinstance(master, bytes):
            master = MasterKey(master, "the master key")
        if len(master.key) != MASTER_KEY_BYTES:
            raise MasterKeyError(f"{master.origin} has {len(master.key)} bytes; a master key has {MASTER_KEY_BYTES}")
        self.origin = master.origin
        self.pepper = _derive(master.key, _PEPPER_INFO)
        self._cipher = AESGCM(_derive(master.key, _SEAL_INFO))

    def __repr__(self) -> str:
        return f"Vault(origin={self.origin!r})"

    def seal(self, plaintext: bytes, table: str, column: str, row_id: str) -> bytes:
        """One byte of key version, the nonce, then the ciphertext with its tag."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        ciphertext = self._cipher.encrypt(nonce, plaintext, _place(table, column, row_id, KEY_VERSION))
        return bytes([KEY_VERSION]) + nonce + ciphertext

    def open(self, sealed: bytes, table: str, column: str, row_id: str) -> bytes:
        """What was sealed for this very place; raises SealBroken for anything else."""
        version, nonce, ciphertext = sealed[:1], sealed[1 : 1 + _NONCE_BYTES], sealed[1 + _NONCE_BYTES :]
        if version != bytes([KEY_VERSION]):
            raise SealBroken(self._broken(table, column, row_id, "it was sealed under another key version"))
        try:
            return self._cipher.decrypt(nonce, ciphertext, _place(table, column, row_id, KEY_VERSION))
        except (InvalidTag, ValueError) as error:
            raise SealBroken(
                self._broken(table, column, row_id, "it was altered, moved, or sealed under another")
            ) from error

    def _broken(self, table: str, column: str, row_id: str, why: str) -> str:
        return (
            f"{table}.{column} of {row_id} does not open with the master key in {self.origin}: {why}. "
            "Put back the master key that belongs to this store, or the store from a backup"
        )


def load_or_create_master_key(path: Path) -> MasterKey:
    """The master key in `path`, made there on first use; processes that race get the same one.

    Raises MasterKeyError or AccessDenied, with the remedy, for a file that others can read, that has the wrong size,
    or that can be neither read nor made.
    """
    path = Path(path)
    with _naming_the_file(path):
        key = _load(path)
        if key is None:
            _create(path)
            key = _load(path)
    if key is None:
        raise MasterKeyError(
            f"the master key {path} is a link to a file that does not exist; remove the link, or mend it"
        )
    return MasterKey(key, str(path))


def _load(path: Path) -> bytes | None:
    """The key in the file, or None when there is no file."""
    try:
        # Without waiting: a named pipe in this place must not hang the start.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        _check_access(path, descriptor)
        key = os.read(descriptor, MASTER_KEY_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(key) != MASTER_KEY_BYTES:
        raise MasterKeyError(
            f"the master key {path} {_size(key)}; it must have exactly {MASTER_KEY_BYTES}. Restore it from a backup; "
            "if no tenant was ever made with it, remove the file and a new one is created"
        )
    return key


def _size(key: bytes) -> str:
    if not key:
        return "is empty"
    # One byte more than a key was read, so a longer file is only known to be longer.
    return f"has {len(key)} bytes" if len(key) < MASTER_KEY_BYTES else f"has more than {MASTER_KEY_BYTES} bytes"


def _create(path: Path) -> None:
    """Put a new key at `path` whole or not at all; a file that somebody else put there meanwhile is left alone."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{secrets.token_hex(8)}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(secrets.token_bytes(MASTER_KEY_BYTES))
            file.flush()
            os.fsync(descriptor)
        # A link, and not a rename: it fails when the name is taken, so the first of two racing processes wins.
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink()
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    # Records are sealed under the key from now on: its name must not be lost with the power.
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_access(path: Path, descriptor: int) -> None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise MasterKeyError(f"the master key {path} is not a regular file; name a file that holds the key")
    if _is_open_to_others(descriptor, status):
        raise AccessDenied(
            f"the master key {path} can be read or written by other users (mode {stat.S_IMODE(status.st_mode):04o}); "
            f"run: chmod 600 {path}, and consider whether somebody has read it"
        )


def _is_open_to_others(descriptor: int, status: os.stat_result) -> bool:
    """Whether anyone but the owner, root and this process's user has any access.

    systemd gives a service its credentials by an access control list; the group bits of the mode are then the list's
    mask and say nothing about the group, so the list itself is read.
    """
    if status.st_mode & 0o007:
        return True
    if not status.st_mode & 0o070:
        return False
    try:
        entries = os.getxattr(descriptor, "system.posix_acl_access")
    except OSError:
        return True
    return any(_acl_entry_admits_others(*entry) for entry in struct.iter_unpack("<HHI", entries[4:]))


def _acl_entry_admits_others(tag: int, permissions: int, qualifier: int) -> bool:
    owner, user, mask = 0x01, 0x02, 0x10
    if not permissions or tag in (owner, mask):
        return False
    return not (tag == user and qualifier in (0, os.geteuid()))


@contextlib.contextmanager
def _naming_the_file(path: Path) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise AccessDenied(
            f"the master key {path} can be neither read nor made by this user ({error.strerror}); run as the user who "
            "owns the state directory, or name another file with HALOCLINE_MASTER_KEY_FILE"
        ) from error
    except OSError as error:
        remedy = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check the path"
        raise MasterKeyError(
            f"the master key {path} can be neither read nor made: {error.strerror}; {remedy}"
        ) from error


def _derive(master: bytes, info: bytes) -> bytes:
    return HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=info).derive(master)


def _place(table: str, column: str, row_id: str, key_version: int) -> bytes:
    """The associated data of a sealed record; each part has its length, so that no two places read alike."""
    parts = (table.encode(), column.encode(), row_id.encode(), str(key_version).encode("ascii"))
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)

"""Sees to it that the tenant `demo` exists and that DIR/demo.key holds a key of its that works."""

from __future__ import annotations

import os
import time
from pathlib import Path

from command.errors import CommandError, Exit
from command.settings import Settings

DEMO_TENANT = "demo"


def ensure_demo_key(settings: Settings) -> Path:
    """The key file; an existing key is kept as long as the store accepts it, otherwise a new one replaces it."""
    from tenants.errors import TenantNotFound
    from tenants.snapshot import Accepted
    from tenants.store import open_store

    now = time.time()
    file = settings.paths.demo_key
    with open_store(settings.tenants.url, settings.tenants.master_key_file) as store:
        text = _read(file)
        if text is not None:
            answer = store.snapshot().authenticate(text, now)
            if isinstance(answer, Accepted) and answer.identity.tenant_name == DEMO_TENANT:
                return file
        try:
            tenant = store.get_tenant(DEMO_TENANT)
        except TenantNotFound:
            tenant = store.create_tenant(DEMO_TENANT, now)
        if tenant.state != "active":
            raise CommandError(
                f"the tenant {DEMO_TENANT} is {tenant.state}: `halocline tenant resume {DEMO_TENANT}`", Exit.CONFLICT
            )
        _write(file, store.create_key(DEMO_TENANT, "demo.key", None, now))
    return file


def _read(file: Path) -> str | None:
    try:
        return file.read_text(encoding="ascii").strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return None


def _write(file: Path, text: str) -> None:
    """Through a temporary file: the key is readable by nobody else at any moment, and never half there."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(fd, "w", encoding="ascii") as stream:
            stream.write(text + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise

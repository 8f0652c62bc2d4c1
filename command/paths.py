"""Where everything of one installation lies, derived from its state directory; pure, and the same in every process.

Whoever calls hands in the environment; nothing here looks at the disk. Creating the directories and checking whose
they are is `command/directories.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# The kernel takes 107 bytes in sun_path; the rest is room for a suffix while a socket is being replaced.
MAX_SOCKET_PATH_BYTES = 100
_LONGEST_SOCKET_NAME = "notify-gateway.sock"
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Paths:
    """The files of one state directory; `run` and `arena` may lie elsewhere, see `derive_paths`."""

    state: Path
    run: Path
    arena: Path

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    @property
    def tenants_url(self) -> str:
        return f"sqlite:///{self.state / 'tenants.db'}"

    @property
    def master_key(self) -> Path:
        return self.state / "master.key"

    @property
    def demo_key(self) -> Path:
        return self.state / "demo.key"

    @property
    def demo_model(self) -> Path:
        return self.state / "models" / "demo"

    @property
    def up_lock(self) -> Path:
        return self.state / "up.lock"

    @property
    def gateway_address(self) -> Path:
        """Where `up` notes which HOST:PORT its gateway got, for commands that look for it."""
        return self.run / "gateway.address"

    @property
    def served_model(self) -> Path:
        """Where `up` notes the directory of the model that it serves, which a flag may have named."""
        return self.run / "model.path"

    def socket(self, name: str) -> Path:
        """The unix socket of a process (`cached`, `engine`, `admin`)."""
        return self.run / f"{name}.sock"


def derive_paths(state: Path, environ: Mapping[str, str], uid: int) -> Paths:
    """The paths of `state`.

    Sockets lie in STATE/run, unless that path is too long for a unix socket: then in a short directory of the same
    user's, whose name is derived from the state directory so that every process finds it. The arena needs tmpfs.
    """
    mark = hashlib.sha256(str(state).encode()).hexdigest()[:12]
    run = state / "run"
    if len(str(run / _LONGEST_SOCKET_NAME).encode()) > MAX_SOCKET_PATH_BYTES:
        base = environ.get("XDG_RUNTIME_DIR", "")
        run = Path(base) / f"halocline-{mark}" if base.startswith("/") else Path("/tmp") / f"halocline-{uid}-{mark}"
        if len(str(run / _LONGEST_SOCKET_NAME).encode()) > MAX_SOCKET_PATH_BYTES:
            run = Path("/tmp") / f"halocline-{uid}-{mark}"
    return Paths(state=state, run=run, arena=SHARED_MEMORY / f"halocline-{uid}-{mark}")


def default_state_dir(environ: Mapping[str, str], home: Path) -> Path:
    """`$XDG_STATE_HOME/halocline`, by default ~/.local/state/halocline; a relative value is ignored, as XDG says."""
    base = environ.get("XDG_STATE_HOME", "")
    return (Path(base) if base.startswith("/") else home / ".local" / "state") / "halocline"


def default_config_file(environ: Mapping[str, str], home: Path, uid: int) -> Path:
    """Where a configuration file is looked for when none is named: /etc as root, else the user's XDG directory."""
    if uid == 0:
        return Path("/etc/halocline/config.toml")
    base = environ.get("XDG_CONFIG_HOME", "")
    return (Path(base) if base.startswith("/") else home / ".config") / "halocline" / "config.toml"

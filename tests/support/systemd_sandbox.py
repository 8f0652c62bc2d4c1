"""A real systemd as PID 1 of private namespaces over an overlay of /, so that units can be started, killed and restarted.

Nothing written inside outlives it: /, /run, /tmp and /dev/shm are private; the network is the host's. It needs root,
unshare, nsenter, overlayfs and cgroup2; `missing_for_sandbox` says what lacks, for a test to skip visibly.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

SYSTEMD = ("/usr/lib/systemd/systemd", "/lib/systemd/systemd")
_ENTER = ("nsenter", "-t", "{pid}", "-p", "-m", "-u", "-i", "-r", "-w")

# Runs as the first process of the new namespaces; becomes systemd. `$base` is a directory of the host's, `$systemd`
# the program. Bind mounts come from lines "SOURCE TARGET" in $base/binds.
_BOOT = r"""
set -eu
mount --make-rprivate /
mount -t tmpfs tmpfs "$base/layers"
mkdir "$base/layers/upper" "$base/layers/work" "$base/layers/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$base/layers/upper,workdir=$base/layers/work" "$base/layers/root"
root=$base/layers/root
mount -t proc proc "$root/proc"
mount -t tmpfs tmpfs "$root/run"
mount -t tmpfs tmpfs "$root/tmp"
mount --rbind /dev "$root/dev"
mount --make-rslave "$root/dev"
mount -t tmpfs tmpfs "$root/dev/shm"
mount -t sysfs sysfs "$root/sys"
mount -t cgroup2 none "$root/sys/fs/cgroup"
while read -r source target; do
  mkdir -p "$root$target"; mount --bind "$source" "$root$target"; mount -o remount,bind,ro "$root$target"
done < "$base/binds"
rm -rf "$root/etc/systemd/system"
mkdir -p "$root/etc/systemd/system"
cp -r "$base/files/." "$root/"
printf '[Unit]\nDefaultDependencies=no\nWants=systemd-journald.service\n' > "$root/etc/systemd/system/sandbox.target"
# systemd mounts credentials in a namespace of a helper's and counts on the mount to come back to its own.
mount --make-rshared "$root"
cd "$root"
export container=sandbox
exec chroot . "$systemd" --system --unit=sandbox.target --log-target=journal-or-kmsg --show-status=0
"""


def missing_for_sandbox() -> str | None:
    """Why no sandbox can be made here, or None."""
    if os.getuid() != 0:
        return "needs root"
    for program in ("unshare", "nsenter", "chroot", "systemctl"):
        if shutil.which(program) is None:
            return f"needs {program}"
    if not any(Path(p).exists() for p in SYSTEMD):
        return "needs systemd"
    tried = subprocess.run(
        ["unshare", "--fork", "--pid", "--mount", "bash", "-c", _TRY_MOUNTS],
        capture_output=True,
        text=True,
        check=False,
    )
    return None if tried.returncode == 0 else f"needs overlayfs and cgroup2 mounts: {tried.stderr.strip()[-200:]}"


_TRY_MOUNTS = """
set -e
mount --make-rprivate /
d=$(mktemp -d); mount -t tmpfs tmpfs $d; mkdir $d/u $d/w $d/r $d/c
mount -t overlay overlay -o lowerdir=/,upperdir=$d/u,workdir=$d/w $d/r
mount -t cgroup2 none $d/c
umount $d/c $d/r; umount $d; rmdir $d
"""


class SystemdSandbox:
    """`files` is copied over the sandbox's root before it boots; `binds` maps host paths to read-only places inside."""

    def __init__(self, files: Path, binds: dict[Path, Path] | None = None) -> None:
        self._base = Path(tempfile.mkdtemp(prefix="hl-systemd-", dir="/tmp"))
        (self._base / "layers").mkdir()
        shutil.copytree(files, self._base / "files", symlinks=True)
        lines = [f"{source} {target}\n" for source, target in (binds or {}).items()]
        (self._base / "binds").write_text("".join(lines), encoding="utf-8")
        self._outer: subprocess.Popen[bytes] | None = None
        self.pid = 0

    def __enter__(self) -> SystemdSandbox:
        try:
            self._boot()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _boot(self) -> None:
        systemd = next(p for p in SYSTEMD if Path(p).exists())
        with (self._base / "log").open("wb") as log:
            self._outer = subprocess.Popen(
                ["unshare", "--fork", "--pid", "--mount", "--uts", "--ipc", "--kill-child", "bash", "-c", _BOOT],
                env={"PATH": os.environ["PATH"], "base": str(self._base), "systemd": systemd},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        for _ in range(300):
            if self._outer.poll() is not None:
                break
            time.sleep(0.1)
            children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text().split()
            if children:
                self.pid = int(children[0])
                state = self.run(["systemctl", "is-system-running"], check=False).stdout.strip()
                if state in ("running", "degraded", "starting"):
                    return
        said = (self._base / "log").read_text(errors="replace")[-2000:]
        raise RuntimeError(f"systemd did not come up in the sandbox: {said}")

    def run(
        self, command: Sequence[str], check: bool = True, timeout_s: float = 110
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command inside; with `check`, a failure raises with what the command said."""
        enter = [part.format(pid=self.pid) for part in _ENTER]
        done = subprocess.run(
            [*enter, *command], capture_output=True, text=True, check=False, timeout=timeout_s, stdin=subprocess.DEVNULL
        )
        if check and done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done

    def journal(self, unit: str) -> str:
        """The last lines of a unit's log."""
        return self.run(["journalctl", "-u", unit, "-n", "60", "--no-pager", "-o", "cat"], check=False).stdout

    def property_of(self, unit: str, name: str) -> str:
        """One property of a unit, as `systemctl show` says it."""
        return self.run(["systemctl", "show", "-P", name, unit]).stdout.strip()

    def stop(self) -> None:
        """Ends every process inside: they share a process namespace, whose first one is killed."""
        if self._outer is not None:
            if self.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
            self._outer.kill()
            self._outer.wait()
        shutil.rmtree(self._base, ignore_errors=True)


def hidden_places(paths: Sequence[Path]) -> dict[Path, Path]:
    """Binds for those of `paths` that a private /tmp, /run or /dev would hide."""
    return {path: path for path in paths if path.parts[1] in ("tmp", "run", "dev")}


def closed_ancestors(paths: Sequence[Path]) -> list[Path]:
    """Directories that other users have to pass to reach `paths` and cannot, such as a home directory of mode 0700."""
    found: list[Path] = []
    for path in paths:
        for parent in path.parents:
            if parent not in found and not parent.stat().st_mode & 0o001:
                found.append(parent)
    return found


def python_places() -> list[Path]:
    """Where this interpreter and its standard library really lie."""
    return [Path(sys.executable).absolute(), Path(os.path.realpath(sys.executable)), Path(os.__file__).resolve()]

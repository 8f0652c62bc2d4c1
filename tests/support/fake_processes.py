"""Stands in for `halocline` where only the supervisor is tested: three processes that notify, serve and end as told.

    python -m tests.support.fake_processes up STATE [LISTEN]    runs the real supervisor over the fake children
    python tests/support/fake_processes.py cached --state-dir …   is one of them

What a child does beside being good is read from STATE/behave-NAME: `refuse` (exit 6 at once), `die` (exit 1 at once),
`stubborn` (ignores SIGTERM). Each appends what happens to it to STATE/events.
"""

from __future__ import annotations

import contextlib
import http.server
import os
import signal
import socket
import sys
import threading
from pathlib import Path


def main(argv: list[str]) -> None:
    if argv[0] == "up":
        _up(argv[1:])
    elif argv[0] == "demo-key":
        (_state(argv) / "demo.key").write_text("hl_live_fake\n")
    else:
        _serve(argv[0], argv)


def _up(argv: list[str]) -> None:
    from command.errors import CommandError
    from command.settings import Flags, load_settings
    from command.supervisor import UpRequest, run_up

    listen = argv[1] if len(argv) > 1 else "127.0.0.1:0"
    values = (("gateway", "listen", listen, "--listen"), ("engine", "model_dir", argv[0], "--model"))
    try:
        settings = load_settings(Flags(state_dir=argv[0], values=values))
        sys.exit(run_up(UpRequest(settings, (sys.executable, os.path.abspath(__file__)))))
    except CommandError as error:
        print(f"halocline: {error}", file=sys.stderr)
        sys.exit(error.code)


def _serve(name: str, argv: list[str]) -> None:
    state = _state(argv)
    behave = (state / f"behave-{name}").read_text().strip() if (state / f"behave-{name}").exists() else ""
    _event(state, f"{name} starts {os.getpid()}")
    if behave in ("refuse", "die"):
        print(f"{name}: because it was told to {behave}", file=sys.stderr, flush=True)
        sys.exit(6 if behave == "refuse" else 1)
    stop = threading.Event()

    def on_term(*_: object) -> None:
        _event(state, f"{name} stops")
        if behave != "stubborn":
            stop.set()

    signal.signal(signal.SIGTERM, on_term)
    signal.signal(signal.SIGINT, lambda *_: _event(state, f"{name} interrupted"))
    print('{"level": "warning", "event": "a warning of ' + name + '"}', file=sys.stderr, flush=True)
    if name == "gateway":
        host, _, port = argv[argv.index("--listen") + 1].rpartition(":")
        http.server.ThreadingHTTPServer.allow_reuse_address = True
        server = http.server.ThreadingHTTPServer((host, int(port)), _Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.sendto(b"READY=1\nSTATUS=serving", os.environ["NOTIFY_SOCKET"])
    while not stop.wait(0.05):
        pass
    _event(state, f"{name} ends")


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


def _state(argv: list[str]) -> Path:
    return Path(argv[argv.index("--state-dir") + 1])


def _event(state: Path, text: str) -> None:
    with (state / "events").open("a") as file:
        file.write(text + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

"""The request log as the engine writes it: key, file, header, and what happens when the disk is no good."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from engine.errors import EngineConfigError
from engine.request_recorder import KEY_FILE, RequestRecorder
from engine.trace_files import Trace
from engine.values import NewRequest
from tests.support.shell import Shell


def request(number: int) -> NewRequest:
    return NewRequest(number, tuple(range(number, number + 20)), 5, cache_salt="a-salt")


def test_what_was_recorded_can_be_replayed_after_a_crash_in_the_middle_of_a_line(tmp_path: Path) -> None:
    log = tmp_path / "requests.log"
    for life in range(2):
        recorder = RequestRecorder(log, tmp_path / "state", b"layout")
        recorder.record(request(1), at_s=100.0 + life)
        recorder.close()
    whole = log.read_bytes()

    with Trace(log, None, lambda _: None) as trace:
        first, second = trace.requests()

    assert first.known == second.known
    assert first.namespace == second.namespace
    assert (first.at_s, second.at_s) == (100.0, 101.0)
    assert b"a-salt" not in whole


def test_a_line_that_was_torn_by_a_crash_does_not_swallow_the_next_ones(tmp_path: Path) -> None:
    log = tmp_path / "requests.log"
    RequestRecorder(log, tmp_path, b"layout").close()
    with log.open("ab") as file:
        file.write(b'{"at": 1, "tok')

    recorder = RequestRecorder(log, tmp_path, b"layout")
    recorder.record(request(1), at_s=7.0)
    recorder.close()
    warnings: list[str] = []
    with Trace(log, None, warnings.append) as trace:
        found = list(trace.requests())

    assert [each.at_s for each in found] == [7.0]
    assert "line 2" in warnings[0]


def test_key_and_log_are_for_nobody_else(tmp_path: Path) -> None:
    RequestRecorder(tmp_path / "log", tmp_path, b"layout").close()

    for name in ("log", KEY_FILE):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


def test_a_log_that_cannot_be_written_stops_the_start_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(EngineConfigError, match="no/log"):
        RequestRecorder(tmp_path / "no" / "log", tmp_path, b"layout")


def test_a_key_of_the_wrong_size_is_named(tmp_path: Path) -> None:
    (tmp_path / KEY_FILE).write_bytes(b"short")

    with pytest.raises(EngineConfigError, match="has 5 bytes, not 32"):
        RequestRecorder(tmp_path / "log", tmp_path, b"layout")


def test_more_than_the_disk_takes_is_left_out_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestRecorder, "_run", lambda self: None)
    monkeypatch.setattr("engine.request_recorder.MAX_WAITING", 2)
    recorder = RequestRecorder(tmp_path / "log", tmp_path, b"layout")

    for number in range(5):
        recorder.record(request(number), at_s=1.0)

    assert recorder.num_dropped == 3


async def test_an_engine_tells_where_it_records() -> None:
    async with Shell(record_path="/var/log/halocline/requests.log") as shell:
        shown = await (await shell.client()).stats()

    assert shown["settings"]["record"] == "/var/log/halocline/requests.log"

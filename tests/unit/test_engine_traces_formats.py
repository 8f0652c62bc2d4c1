"""Traces as lines and as files: what each format says, and what is said of those that are torn, unknown or absurd."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import tarfile
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import pytest

from cached.keys import namespace
from engine.errors import TraceError
from engine.request_log import header_line, prompt_hashes, request_line
from engine.trace_files import Trace, tokenizer_of
from engine.traces import TracedRequest, check_size, parse_mooncake, symbols, symbols_per_block

KEY = bytes(range(32))
MOONCAKE = [
    {"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 1500, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
]


def lines(rows: Iterable[object]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def words(texts: list[str]) -> Iterable[list[int]]:
    """A tokenizer: one token a word, its length."""
    return ([len(word) for word in text.split()] for text in texts)


def read(path: Path) -> tuple[list[TracedRequest], list[str], str]:
    warnings: list[str] = []
    with Trace(path, lambda: words, warnings.append) as trace:
        return list(trace.requests()), warnings, trace.format


def test_a_mooncake_trace_is_known_by_its_content_whatever_it_is_called(tmp_path: Path) -> None:
    for name, content in {
        "a.bin": lines(MOONCAKE),
        "b.jsonl.gz": gzip.compress(lines(MOONCAKE)),
        "c.log": lzma.compress(lines(MOONCAKE)),
    }.items():
        (tmp_path / name).write_bytes(content)

        requests, warnings, found = read(tmp_path / name)

        assert (found, warnings) == ("mooncake", [])
        assert [(each.at_s, each.num_tokens, list(each.known)) for each in requests] == [
            (0.0, 1024, [0, 1]),
            (1.5, 1100, [0, 1, 2]),
        ]


def test_texts_are_tokenized_and_their_clock_is_understood(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1760995991633938, "input": "one two three", "output": "x"},
        {"prompt": "four"},
        {"messages": [{"role": "user", "content": "hello there"}]},
    ]
    (tmp_path / "t.jsonl").write_bytes(lines(rows))

    requests, _, found = read(tmp_path / "t.jsonl")

    assert found == "text"
    assert requests[0].at_s == pytest.approx(1760995991.633938)
    assert [list(each.known) for each in requests] == [[3, 3, 5], [4], [5, 5, 5]]


@pytest.mark.parametrize("archived", [False, True])
def test_files_of_a_directory_or_an_archive_are_merged_by_time(tmp_path: Path, archived: bool) -> None:
    parts = {
        "sessions/a.jsonl": lines([{"timestamp": 1, "input": "a"}, {"timestamp": 4, "input": "dddd"}]),
        "../b.jsonl": lines([{"timestamp": 2, "input": "bb"}, {"timestamp": 3, "input": "ccc"}]),
    }
    if archived:
        path = tmp_path / "t.tar.xz"
        with tarfile.open(path, "w:xz") as archive:
            for name, content in parts.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    else:
        path = tmp_path / "t"
        (path / "sessions").mkdir(parents=True)
        for name, content in parts.items():
            (path / name.removeprefix("../")).write_bytes(content)

    requests, _, _ = read(path)

    assert [list(each.known) for each in requests] == [[1], [2], [3], [4]]
    assert not (tmp_path.parent / "b.jsonl").exists()


def test_a_torn_last_line_is_left_out_with_a_warning_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_bytes(lines(MOONCAKE) + b'{"timestamp": 2000, "input_le')

    requests, warnings, _ = read(tmp_path / "t.jsonl")

    assert len(requests) == 2
    assert len(warnings) == 1
    assert "line 3, the last, is torn" in warnings[0]


def test_a_torn_compressed_file_gives_what_can_be_read_of_it(tmp_path: Path) -> None:
    whole = gzip.compress(lines({**MOONCAKE[0], "hash_ids": [n, n + 1]} for n in range(20_000)))
    (tmp_path / "t.jsonl.gz").write_bytes(whole[: len(whole) // 2])

    requests, warnings, _ = read(tmp_path / "t.jsonl.gz")

    assert len(requests) > 1000
    assert any("torn" in each for each in warnings)


def test_a_broken_line_in_the_middle_is_an_error_that_names_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_bytes(lines(MOONCAKE) + b'{"timestamp"\n' + lines(MOONCAKE))

    with pytest.raises(TraceError, match=r"t\.jsonl, line 3: not JSON"):
        read(tmp_path / "t.jsonl")


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        (b"\x00\x01\x02", "not JSON"),
        (b"time,tokens\n1,2\n", "time,tokens"),
        (b"[1, 2]\n", "a JSON list"),
        (b'{"when": 1, "what": 2}\n', "an object with 'when', 'what'"),
        (b"{}\n", "nothing in it"),
        (b"[" * 100_000 + b"\n", "not JSON"),
    ],
)
def test_an_unknown_format_is_refused_by_what_was_seen_and_what_is_legal(
    tmp_path: Path, content: bytes, seen: str
) -> None:
    (tmp_path / "t").write_bytes(content)

    with pytest.raises(TraceError) as refused:
        read(tmp_path / "t")

    assert seen in str(refused.value)
    assert "hash_ids" in str(refused.value)


def test_an_empty_file_a_missing_one_and_an_empty_directory_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "none").mkdir()

    for name, why in {
        "empty": "is empty",
        "missing": "there is no trace",
        "none": r"holds no file named \*\.jsonl",
    }.items():
        with pytest.raises(TraceError, match=why):
            read(tmp_path / name)


@pytest.mark.parametrize(
    "row",
    [
        {"input_length": 0, "hash_ids": []},
        {"input_length": 513, "hash_ids": [1]},
        {"input_length": 10, "hash_ids": [-1]},
        {"input_length": 10, "hash_ids": [2**32]},
        {"input_length": 10, "hash_ids": "1"},
        {"input_length": "10", "hash_ids": [1]},
        {"timestamp": -1, "input_length": 10, "hash_ids": [1]},
        {"timestamp": "now", "input_length": 10, "hash_ids": [1]},
    ],
)
def test_absurd_rows_are_refused(row: dict[str, object]) -> None:
    with pytest.raises(TraceError):
        parse_mooncake(json.dumps(row).encode())


def test_a_long_trace_is_streamed(tmp_path: Path) -> None:
    """Memory does not grow with the trace: sixteen times as many requests need no more."""

    def peak(count: int) -> int:
        path = tmp_path / f"{count}.jsonl.gz"
        with gzip.open(path, "wb", compresslevel=1) as file:
            for number in range(count):
                file.write(lines([{"timestamp": number, "input_length": 5120, "hash_ids": list(range(10))}]))
        tracemalloc.start()
        with Trace(path, None, lambda _: None) as trace:
            assert sum(1 for _ in trace.requests()) == count
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    assert peak(8000) < 2 * peak(500)


def test_a_line_without_an_end_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.trace_files.MAX_LINE_BYTES", 1000)
    (tmp_path / "t").write_bytes(lines(MOONCAKE) + b'{"input_length": "' + b"x" * 5000)

    with pytest.raises(TraceError, match="line 3 is longer than 1000 bytes"):
        read(tmp_path / "t")


def test_equal_ids_are_equal_tokens_at_every_size() -> None:
    shorter, longer = (parse_mooncake(json.dumps(row).encode()) for row in MOONCAKE)

    for size in (2, 16, 128, 512):
        row = symbols_per_block("mooncake", size)
        left, right = symbols("mooncake", shorter, size), symbols("mooncake", longer, size)
        assert len(left) == 1024 // size * row
        assert right[: len(left)] == left
        assert len(set(zip(left[::2], left[1::2], strict=True))) == 1024 // size


def test_sizes_that_a_trace_cannot_tell_apart_are_refused() -> None:
    with pytest.raises(TraceError, match="legal are 8, 16, 32, 64, 128"):
        check_size("request-log", 4)
    with pytest.raises(TraceError, match="legal are 2, 4"):
        check_size("text", 3)


def test_our_log_tells_what_prompts_share_and_nothing_else(tmp_path: Path) -> None:
    secret = list(range(1000, 1020))
    root, other = namespace(b"layout", "salt-of-one"), namespace(b"layout", "salt-of-another")
    log = header_line(KEY) + b"".join(
        request_line(KEY, 10.0 + at, each, tokens, 7)
        for at, (each, tokens) in enumerate(
            [(root, secret), (root, [*secret[:16], 1, 2, 3, 4, 5, 6, 7, 8]), (other, secret)]
        )
    )
    (tmp_path / "log").write_bytes(log)

    requests, warnings, found = read(tmp_path / "log")

    first, second, foreign = requests
    assert (found, warnings) == ("request-log", [])
    assert (first.at_s, first.num_tokens, len(first.known)) == (10.0, 20, 2)
    assert list(first.known) == list(second.known)[:2]
    assert first.namespace == second.namespace != foreign.namespace
    assert not set(first.known) & set(foreign.known)
    assert b"salt-of" not in log
    assert b"1000" not in log


def test_equal_words_in_other_places_have_other_hashes_and_so_have_other_keys() -> None:
    root = namespace(b"layout", None)
    hashes = prompt_hashes(KEY, root, [5] * 16)

    assert hashes[:8] != hashes[8:]
    assert prompt_hashes(bytes(32), root, [5] * 16) != hashes
    assert len(prompt_hashes(KEY, root, [5] * 15)) == 8


def test_a_log_of_a_later_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b'{"halocline_request_log": 2}\n' + lines(MOONCAKE))

    with pytest.raises(TraceError, match="version 2, not 1"):
        read(tmp_path / "log")


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="--tokenizer DIR"):
        tokenizer_of(tmp_path)

"""Reads traces from disk as a stream of requests: compression, archives, directories, tokenizing, torn last lines.

Memory is bounded whatever the size of the trace: one line, one batch of texts, and what decompressors hold. What a line
means is `traces.py`'s.
"""

from __future__ import annotations

import contextlib
import gzip
import heapq
import io
import lzma
import shutil
import tarfile
import tempfile
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, TypeVar

from engine.errors import TraceError
from engine.traces import (
    LogHeader,
    TracedRequest,
    TracedText,
    TraceFormat,
    begins_log,
    detect_format,
    parse_log,
    parse_mooncake,
    parse_text,
)

MAX_LINE_BYTES = 64 << 20
MAX_FILES = 512
_BATCH_TEXTS = 32
_BATCH_CHARS = 1 << 20
_GZIP, _XZ = b"\x1f\x8b", b"\xfd7zXZ\x00"

Row = TypeVar("Row")
Warn = Callable[[str], object]
"""Hears one sentence for people; reading goes on."""
Tokenize = Callable[[list[str]], Iterable[list[int]]]


class Trace:
    """One trace, opened: what it is, and its requests in order of arrival. Close it, or use it in `with`."""

    def __init__(self, path: Path, tokenize: Callable[[], Tokenize] | None, warn: Warn) -> None:
        self.path = path
        self._tokenize = tokenize
        self._warn = warn
        self._unpacked: tempfile.TemporaryDirectory[str] | None = None
        self._last_warned = ""
        self._bytes_of: dict[Path, int] = {}
        self._files = self._find()
        self.num_bytes = sum(each.stat().st_size for each in self._files)
        try:
            self.format: TraceFormat = self._detect()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove what was unpacked."""
        if self._unpacked is not None:
            self._unpacked.cleanup()

    @property
    def bytes_read(self) -> int:
        """How far reading has come, in bytes of the files as they are stored."""
        return sum(self._bytes_of.values())

    def requests(self) -> Iterator[TracedRequest]:
        """The requests of all files, merged by time of arrival; raises TraceError naming file and line."""
        self._bytes_of = {}
        match self.format:
            case "mooncake":
                return _merged([self._parsed(each, parse_mooncake) for each in self._files])
            case "request-log":
                return _merged([self._log(each) for each in self._files])
            case "text":
                return self._tokenized(_merged_texts([self._parsed(each, parse_text) for each in self._files]))

    # Files. ---------------------------------------------------------------------------------------------------------

    def _find(self) -> list[Path]:
        if not self.path.exists():
            raise TraceError(f"there is no trace {self.path}")
        folder = self.path
        if self.path.is_file():
            if not _is_archive(self.path):
                return [self.path]
            self._unpacked = tempfile.TemporaryDirectory(prefix="halocline-trace-")
            folder = Path(self._unpacked.name)
            try:
                _unpack(self.path, folder)
            except BaseException:
                self._unpacked.cleanup()
                raise
        files = sorted(each for each in folder.rglob("*.jsonl*") if each.is_file() and each.stat().st_size)
        if not files:
            raise TraceError(f"{self.path} holds no file named *.jsonl, *.jsonl.gz or *.jsonl.xz")
        if len(files) > MAX_FILES:
            raise TraceError(f"{self.path} holds {len(files)} files; at most {MAX_FILES} are merged")
        return files

    def _detect(self) -> TraceFormat:
        first = self._files[0]
        for _, line in self._lines(first):
            found = detect_format(line, str(first))
            self._bytes_of = {}
            return found
        raise TraceError(f"{first} is empty; a trace has one JSON object in each line")

    def _lines(self, path: Path) -> Iterator[tuple[int, bytes]]:
        with contextlib.ExitStack() as stack:
            raw = stack.enter_context(path.open("rb"))
            stream = stack.enter_context(_decompressed(raw))
            number = 0
            while True:
                try:
                    line = stream.readline(MAX_LINE_BYTES + 1)
                except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
                    self._warn_torn(f"{path}: the file is torn after line {number} ({error}); what was read is used")
                    return
                self._bytes_of[path] = raw.tell()
                if not line:
                    return
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise TraceError(f"{path}, line {number} is longer than {MAX_LINE_BYTES} bytes")
                if line.strip():
                    yield number, line

    def _parsed(
        self, path: Path, parse: Callable[[bytes], Row], begins: Callable[[bytes], bool] = lambda _: False
    ) -> Iterator[Row]:
        """A line that cannot be read is an error, but for the last: a writer was stopped in the middle of it.

        The last is also the one before a line that `begins` what another writer wrote.
        """
        torn: tuple[int, TraceError] | None = None
        for number, line in self._lines(path):
            if torn is not None:
                if not begins(line):
                    raise TraceError(f"{path}, line {torn[0]}: {torn[1]}") from torn[1]
                self._warn_torn(f"{path}, line {torn[0]}, the last of its engine, is torn and was left out: {torn[1]}")
                torn = None
            try:
                row = parse(line)
            except TraceError as error:
                torn = (number, error)
                continue
            yield row
        if torn is not None:
            self._warn_torn(f"{path}, line {torn[0]}, the last, is torn and was left out: {torn[1]}")

    def _log(self, path: Path) -> Iterator[TracedRequest]:
        key_id = ""
        for row in self._parsed(path, parse_log, begins_log):
            if isinstance(row, LogHeader):
                key_id = row.key_id
            else:
                # Hashes of different keys have nothing to do with each other, nor have namespaces.
                yield TracedRequest(row.at_s, row.num_tokens, row.known, f"{key_id}/{row.namespace}")

    def _warn_torn(self, sentence: str) -> None:
        if sentence != self._last_warned:  # A trace may be read more than once.
            self._last_warned = sentence
            self._warn(sentence)

    # Text. ----------------------------------------------------------------------------------------------------------

    def _tokenized(self, texts: Iterator[TracedText]) -> Iterator[TracedRequest]:
        if self._tokenize is None:
            raise TraceError(f"{self.path} is a trace of text; give --tokenizer DIR")
        tokenize = self._tokenize()
        clock = 0.0
        for batch in _batches(texts):
            for text, tokens in zip(batch, tokenize([each.text for each in batch]), strict=True):
                clock = clock + 1.0 if text.at_s is None else text.at_s
                if tokens:
                    yield TracedRequest(clock, len(tokens), array("I", tokens))


def tokenizer_of(folder: Path) -> Tokenize:
    """The tokenizer of a model in Hugging Face layout. Raises TraceError."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise TraceError(f"there is no tokenizer {file}; give --tokenizer DIR with a tokenizer.json in it")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def tokenize(texts: list[str]) -> Iterable[list[int]]:
        return (each.ids for each in tokenizer.encode_batch_fast(texts, add_special_tokens=False))

    return tokenize


def _merged(streams: list[Iterator[TracedRequest]]) -> Iterator[TracedRequest]:
    return streams[0] if len(streams) == 1 else heapq.merge(*streams, key=lambda each: each.at_s)


def _merged_texts(streams: list[Iterator[TracedText]]) -> Iterator[TracedText]:
    return streams[0] if len(streams) == 1 else heapq.merge(*streams, key=lambda each: each.at_s or 0.0)


def _batches(texts: Iterator[TracedText]) -> Iterator[list[TracedText]]:
    """Enough texts for all cores, and not more than a machine can hold."""
    batch: list[TracedText] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text.text)
        if len(batch) == _BATCH_TEXTS or size >= _BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _magic(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(6)


def _decompressed(raw: IO[bytes]) -> contextlib.AbstractContextManager[IO[bytes]]:
    magic = raw.read(6)
    raw.seek(0)
    if magic.startswith(_GZIP):
        return io.BufferedReader(gzip.GzipFile(fileobj=raw))  # type: ignore[arg-type, return-value]
    if magic == _XZ:
        return io.BufferedReader(lzma.LZMAFile(raw))  # type: ignore[arg-type, return-value]
    return contextlib.nullcontext(raw)


def _is_archive(path: Path) -> bool:
    try:
        return tarfile.is_tarfile(path)
    except (OSError, EOFError, lzma.LZMAError, zlib.error):
        return False


def _unpack(path: Path, folder: Path) -> None:
    """The *.jsonl files of an archive, under names of our own: what an archive says of paths is not followed."""
    with tarfile.open(path, "r:*") as archive:
        wanted = (each for each in archive if each.isfile() and ".jsonl" in each.name)
        for number, member in enumerate(islice(wanted, MAX_FILES + 1)):
            content = archive.extractfile(member)
            assert content is not None, "a regular file has content"
            with (folder / f"{number:05}.jsonl").open("wb") as target:
                shutil.copyfileobj(content, target)

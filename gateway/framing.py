"""Where on a connection one request ends and the next begins, for the deadlines of headers and for nothing else.

aiohttp's parser does not tell whether it holds the beginning of a next request. So what arrives is given to it in pieces
that end where a header or a body may end; after each, `has_partial_header` is known. A body in chunks is not looked into,
only asked whether it is complete.
"""

from __future__ import annotations

from typing import Final, Protocol

END_OF_HEADER: Final = b"\r\n\r\n"


class Payload(Protocol):
    """A body as the parser fills it."""

    def is_eof(self) -> bool: ...


class Framing:
    """One connection's. What is wrong HTTP may be cut anywhere: the parser refuses it."""

    def __init__(self) -> None:
        self._num_body_bytes = 0
        self._chunked: Payload | None = None
        self._header_tail = b""

    @property
    def has_partial_header(self) -> bool:
        """Whether a header has begun whose end has not come."""
        return self._header_tail != b""

    def next_end(self, data: bytes, start: int) -> int:
        """Where the piece that begins at `start` is to end: after a header or a body, or with the data."""
        if self._num_body_bytes > 0:
            return min(start + self._num_body_bytes, len(data))
        if self._chunked is not None and not self._chunked.is_eof():
            return len(data)
        # The end of a header may lie across two arrivals.
        across = (self._header_tail + data[start : start + 3]).find(END_OF_HEADER)
        if across >= 0:
            return start + across + len(END_OF_HEADER) - len(self._header_tail)
        end = data.find(END_OF_HEADER, start)
        return len(data) if end < 0 else end + len(END_OF_HEADER)

    def header_ended(self, content_length: str | None, payload: Payload) -> None:
        """The last piece was the end of a header; what follows is its body, if it has one."""
        self._header_tail = b""
        self._chunked = None
        self._num_body_bytes = 0
        if content_length is not None and content_length.isascii() and content_length.isdigit():
            self._num_body_bytes = int(content_length)
        elif not payload.is_eof():
            self._chunked = payload

    def received(self, piece: bytes) -> None:
        """The last piece was not the end of a header."""
        if self._num_body_bytes > 0:
            self._num_body_bytes -= len(piece)
        elif self._chunked is None:
            # Empty lines before a request are none of it.
            begun = self._header_tail + piece if self._header_tail else piece.lstrip(b"\r\n")
            self._header_tail = begun[-3:]
        elif self._chunked.is_eof():
            self._chunked = None
            # What ends a body in chunks ends like a header; shorter pieces are taken for the last bytes of that.
            if len(piece) > len(END_OF_HEADER) and not piece.endswith(END_OF_HEADER):
                self._header_tail = piece[-3:]

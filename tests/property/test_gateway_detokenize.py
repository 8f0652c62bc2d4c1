"""Tokens to text: what comes piece by piece is what comes at once, and no character is ever cut."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gateway.detokenize import ByteDecoder, WindowDecoder
from gateway.tokenizer import TokenizerCodec


@given(st.lists(st.binary(min_size=0, max_size=4), max_size=12))
def test_bytes_cut_anywhere_become_the_text_of_all_bytes(pieces: list[bytes]) -> None:
    decoder = ByteDecoder(pieces)

    text = "".join([decoder.feed(index) for index in range(len(pieces))]) + decoder.flush()

    assert text == b"".join(pieces).decode("utf-8", "replace")


@given(st.text(max_size=40))
def test_a_character_is_handed_out_whole_when_its_last_byte_comes(text: str) -> None:
    data = text.encode("utf-8", "ignore")
    decoder = ByteDecoder([bytes([byte]) for byte in data])

    pieces = [decoder.feed(index) for index in range(len(data))]

    assert [piece for piece in pieces if piece] == list(data.decode())
    assert decoder.flush() == ""


@cache
def codec_of(model_dir: Path) -> TokenizerCodec:
    return TokenizerCodec(model_dir / "tokenizer.json")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_tokens_of_the_demo_model_decode_as_the_library_decodes_them_all(
    demo_model_dir: Path, data: st.DataObject
) -> None:
    codec = codec_of(demo_model_dir)
    tokens = data.draw(st.lists(st.integers(0, 49151), max_size=40))
    decoder = codec.new_decoder()

    text = "".join([decoder.feed(token) for token in tokens]) + decoder.flush()

    assert text == codec.decode(tokens)


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=60))
def test_text_comes_back_through_tokens_as_the_library_gives_it_back(demo_model_dir: Path, text: str) -> None:
    codec = codec_of(demo_model_dir)
    tokens = codec.encode_plain(text.encode("utf-8", "ignore").decode())
    decoder = codec.new_decoder()

    back = "".join([decoder.feed(token) for token in tokens]) + decoder.flush()

    assert back == codec.decode(tokens)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60))
def test_the_window_decoder_gives_back_whole_texts(demo_model_dir: Path, text: str) -> None:
    codec = codec_of(demo_model_dir)
    tokens = codec.encode_plain(text.encode("utf-8", "ignore").decode())
    expected = codec.decode(tokens)
    assume("\ufffd" not in expected)  # The demo model's vocabulary lacks a few bytes of rare characters.
    decoder = WindowDecoder(codec.decode, codec.special_ids)

    back = "".join([decoder.feed(token) for token in tokens]) + decoder.flush()

    assert back == expected

"""A model directory's tokenizer and chat template: loads them, and keeps long texts off the event loop.

Uses the `tokenizers` library alone; transformers would cost 50 MB and seconds for a file it reads the same way.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeVar

import jinja2
from tokenizers import Tokenizer

from gateway.chat import ChatEncoder, ChatTemplate
from gateway.detokenize import ByteDecoder, TextDecoder, WindowDecoder, byte_table
from gateway.errors import GatewayConfigError, bad_request, context_length_exceeded
from gateway.values import Message, TokenText

THREAD_CHARS: Final = 20_000
"""Texts longer than this are rendered and encoded in a thread; shorter ones take less than the hand-over is worth."""

_Result = TypeVar("_Result")


class ModelText:
    """Everything between text and tokens for one model."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise GatewayConfigError(f"{path} does not exist; the gateway needs the model's tokenizer.json")
        self._codec = TokenizerCodec(path)
        self._chat = self._load_chat(model_dir)

    async def encode_chat(self, messages: Sequence[Message], max_tokens: int) -> list[int]:
        """The prompt of a conversation; refused at once when it cannot have as few as `max_tokens` tokens."""
        if self._chat is None:
            raise bad_request("This model has no chat template; use /v1/completions.", "messages", "no_chat_template")
        chat = self._chat
        num_chars = sum(len(message.content) for message in messages)
        self._check_may_fit(num_chars, max_tokens, "messages")
        return await _off_loop_when_large(num_chars + 64 * len(messages), lambda: chat.encode(messages))

    async def encode_prompts(self, prompts: Sequence[str | Sequence[int]], max_tokens: int) -> list[Sequence[int]]:
        """The prompts of a text completion: what transformers gives, except that no text becomes a control token."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        for text in texts:
            self._check_may_fit(len(text), max_tokens, "prompt")

        def encode() -> list[Sequence[int]]:
            return [self._codec.encode_prompt(each) if isinstance(each, str) else each for each in prompts]

        return await _off_loop_when_large(sum(map(len, texts)), encode)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of a prompt given as ids, special tokens left out."""
        return self._codec.decode(list(tokens))

    def new_decoder(self) -> TextDecoder:
        """For the text of one sequence."""
        return self._codec.new_decoder()

    def describe(self, token: int, logprob: float) -> TokenText:
        """One token by itself, for log-probabilities."""
        return self._codec.describe(token, logprob)

    @property
    def skipped(self) -> frozenset[int]:
        """Tokens that have no text in an answer."""
        return self._codec.special_ids

    def _check_may_fit(self, num_chars: int, max_tokens: int, param: str) -> None:
        """Megabytes that cannot fit are refused without the seconds that it takes to encode them."""
        longest = self._codec.longest_token_bytes
        if longest is not None and num_chars > max_tokens * longest:
            raise context_length_exceeded(
                f"{param} has {num_chars} characters, which are at least {num_chars // longest} tokens; a prompt may have "
                f"at most {max_tokens} tokens here.",
                param,
            )

    def _load_chat(self, model_dir: Path) -> ChatEncoder | None:
        config = _read_json(model_dir / "tokenizer_config.json")
        source = _template_source(model_dir, config)
        if source is None:
            return None
        special_tokens = {
            key: token["content"] if isinstance(token, dict) else token
            for key, token in config.items()
            if key.endswith("_token") and isinstance(token, str | dict)
        }
        try:
            template = ChatTemplate(source, special_tokens, lambda form: datetime.now().strftime(form))
        except jinja2.TemplateError as error:
            raise GatewayConfigError(f"the chat template of {model_dir} cannot be compiled: {error}") from error
        return ChatEncoder(template, self._codec)


class TokenizerCodec:
    """The library's tokenizer twice: with special tokens read from text, and with them switched off."""

    def __init__(self, path: Path) -> None:
        self._control = _load_tokenizer(path)
        self._plain = _load_tokenizer(path)
        self._plain.encode_special_tokens = True
        for tokenizer in (self._control, self._plain):
            tokenizer.no_truncation()
            tokenizer.no_padding()
        added = self._control.get_added_tokens_decoder()
        specials = {token: each.content for token, each in added.items() if each.special}
        self.special_ids = frozenset(specials)
        longest_first = sorted(specials.values(), key=len, reverse=True)
        self._special_text = re.compile("|".join(map(re.escape, longest_first))) if specials else None
        vocabulary = self._control.get_vocab(with_added_tokens=False)
        self._added_text = {token: each.content for token, each in added.items()}
        self._token_bytes = byte_table(vocabulary, self._added_text, ()) if self._is_byte_level() else None
        self.longest_token_bytes = self._longest_token_bytes()
        self._answer_bytes = byte_table(vocabulary, self._added_text, self.special_ids) if self._token_bytes else None

    def has_special_text(self, text: str) -> bool:
        return self._special_text is not None and self._special_text.search(text) is not None

    def encode_control(self, text: str) -> list[int]:
        return _encode(self._control, text, add_special_tokens=False)

    def encode_plain(self, text: str) -> list[int]:
        tokens = _encode(self._plain, text, add_special_tokens=False)
        if self.special_ids.isdisjoint(tokens):
            return tokens
        # Some models (Unigram) know special tokens as ordinary pieces too; cut so that none can be seen whole.
        pieces = [piece for part in self._cut(text) for piece in _encode(self._plain, part, add_special_tokens=False)]
        if not self.special_ids.isdisjoint(pieces):
            raise bad_request("The text cannot be told apart from control tokens.", None, "special_token_text")
        return pieces

    def encode_prompt(self, text: str) -> list[int]:
        """With what the tokenizer puts around every text (a leading token, for some models), and nothing from within."""
        around = _encode(self._plain, text, add_special_tokens=True)
        if sum(map(self.special_ids.__contains__, around)) == self._plain.num_special_tokens_to_add(False):
            return around
        return self.encode_plain(text)

    def decode(self, tokens: list[int]) -> str:
        return str(self._control.decode(tokens, skip_special_tokens=True))

    def new_decoder(self) -> TextDecoder:
        if self._answer_bytes is not None:
            return ByteDecoder(self._answer_bytes)
        return WindowDecoder(self.decode, self.special_ids)

    def describe(self, token: int, logprob: float) -> TokenText:
        data = self._bytes_of(token)
        return TokenText(data.decode("utf-8", "replace"), data, logprob)

    def _bytes_of(self, token: int) -> bytes:
        if self._token_bytes is not None:
            return self._token_bytes[token] if token < len(self._token_bytes) else b""
        return str(self._control.decode([token], skip_special_tokens=False)).encode()

    def _cut(self, text: str) -> list[str]:
        assert self._special_text is not None, "a tokenizer without special tokens gives none"
        cuts = [match.start() + 1 for match in self._special_text.finditer(text)]
        return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    def _longest_token_bytes(self) -> int | None:
        """How much text one token can stand for, where that is known: nothing is lost before the tokens are cut."""
        if self._token_bytes is None or self._control.normalizer is not None:
            return None
        return max(map(len, self._token_bytes))

    def _is_byte_level(self) -> bool:
        decoder = json.loads(self._control.to_str())["decoder"]
        return decoder is not None and decoder["type"] == "ByteLevel"


def _load_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # The library has no class of its own for this.
        raise GatewayConfigError(f"{path} cannot be read as a tokenizer: {error}") from error


def _encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    if len(text) < THREAD_CHARS:
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
    # The batch call lets go of the interpreter lock while it works; plain `encode` would stop the event loop.
    return list(tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)


async def _off_loop_when_large(num_chars: int, work: Callable[[], _Result]) -> _Result:
    if num_chars < THREAD_CHARS:
        return work()
    return await asyncio.to_thread(work)


def _template_source(model_dir: Path, config: dict[str, Any]) -> str | None:
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):  # Several named ones; transformers takes the one named default.
        source = {each.get("name"): each.get("template") for each in source}.get("default")
    return source if isinstance(source, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (ValueError, OSError) as error:
        raise GatewayConfigError(f"{path} cannot be read: {error}") from error

"""A conversation to token ids: renders the model's own template and encodes it so that no client can write control tokens.

Text without special tokens' text gives exactly the tokens that transformers gives. A message whose text contains a
special token's text is replaced by a placeholder while the template is rendered, and encoded apart with special tokens
switched off (architecture decision 10). Files, threads and the tokenizer's library are the tokenizer module's business.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from gateway.errors import ApiError, bad_request
from gateway.sandbox import Budget, MeteredEnvironment, OverBudget, meter, spending
from gateway.values import Message

MAX_EXPANSION: Final = 8
"""How many times longer than its messages a rendering may be, beyond `FREE_CHARS`: a runaway template stops there."""
FREE_CHARS: Final = 2**20
FREE_STEPS: Final = 20_000
STEPS_A_MESSAGE: Final = 300
MAX_STEPS_OF_PAIRS: Final = 2**22
"""A template may look from every message at every other one, as long as there are not more pairs than this."""
MAX_CACHED_SHAPES: Final = 1024
_FIRST_PLACEHOLDER: Final = (
    0xF0000  # Plane 15, private use: no case, no white space, and nothing that templates look for.
)
_LAST_PLACEHOLDER: Final = 0xFFFFD


class Encoder(Protocol):
    """What a conversation needs of a tokenizer. Neither way adds anything to the text's own tokens."""

    special_ids: frozenset[int]

    def has_special_text(self, text: str) -> bool:
        """Whether `text` contains the text of a special token."""

    def encode_control(self, text: str) -> list[int]:
        """Text of the template, in which special tokens are themselves."""

    def encode_plain(self, text: str) -> list[int]:
        """Text of a client, which never gives a special token."""


class ChatTemplate:
    """A compiled template. `now_text(format)` is today's date for templates that print it."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], now_text: Callable[[str], str]) -> None:
        environment = MeteredEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = meter("tojson", _tojson)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = now_text
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation as text, up to where the answer begins; raises ApiError when the template refuses it."""
        plain = [{"role": message.role, "content": message.content} for message in messages]
        num_chars = sum(len(message.content) for message in messages)
        limit = FREE_CHARS + MAX_EXPANSION * num_chars
        budget = Budget(_max_steps(len(messages), num_chars), limit)
        variables = {
            **self._special_tokens,
            "messages": plain,
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        pieces: list[str] = []
        length = 0
        try:
            with spending(budget):
                for piece in self._template.generate(variables):
                    pieces.append(piece)
                    length += len(piece)
                    if length > limit:
                        raise _refused(f"its output is longer than {limit} characters")
        except (_TemplateRaised, OverBudget) as error:
            raise _refused(str(error)) from None
        except ApiError:
            raise
        except Exception as error:
            raise _refused(f"it failed with {type(error).__name__}") from error
        return "".join(pieces)


class ChatEncoder:
    """Template and tokenizer together. Owned by one event loop, called from any thread (its cache is only a cache)."""

    def __init__(self, template: ChatTemplate, encoder: Encoder) -> None:
        self._template = template
        self._encoder = encoder
        self._specials_by_shape: dict[tuple[tuple[str, bool], ...], int] = {}

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """The prompt's token ids."""
        suspicious = [self._encoder.has_special_text(message.content) for message in messages]
        if not any(suspicious):
            tokens = self._encoder.encode_control(self._template.render(messages))
            if self._num_specials(tokens) == self._expected_specials(messages):
                return tokens
            # Special tokens that are neither the template's nor visible in one message: normalised from other
            # characters, or made where a message meets the template. Then no message is trusted.
            suspicious = [True] * len(messages)
        return self._encode_apart(messages, suspicious)

    def _encode_apart(self, messages: Sequence[Message], apart: Sequence[bool]) -> list[int]:
        placeholder = _unused_char([message.content for message in messages])
        marked = list(messages)
        originals: list[str] = []
        for index, message in enumerate(messages):
            if apart[index] and message.content:
                marked[index] = Message(message.role, f"{placeholder}{len(originals)}{placeholder}")
                originals.append(message.content)
        # The template's text and the messages' numbers alternate between the placeholder characters.
        pieces = self._template.render(marked).split(placeholder)
        tokens: list[int] = []
        if len(pieces) % 2 == 0:
            raise _refused("it cuts a message that contains the text of special tokens")
        for position, piece in enumerate(pieces):
            if position % 2 == 0:
                tokens += self._encoder.encode_control(piece) if piece else []
            elif piece.isdigit() and int(piece) < len(originals):
                tokens += self._encoder.encode_plain(originals[int(piece)])
            else:
                raise _refused("it cuts a message that contains the text of special tokens")
        return tokens

    def _expected_specials(self, messages: Sequence[Message]) -> int:
        """How many special tokens the template writes for a conversation of this shape with harmless messages."""
        shape = tuple([(message.role, bool(message.content)) for message in messages])
        known = self._specials_by_shape.get(shape)
        if known is None:
            harmless = [Message(message.role, "x" if message.content else "") for message in messages]
            known = self._num_specials(self._encoder.encode_control(self._template.render(harmless)))
            if len(shape) <= 64:  # Longer ones come once each; they are not worth their memory.
                if len(self._specials_by_shape) >= MAX_CACHED_SHAPES:
                    self._specials_by_shape.clear()
                self._specials_by_shape[shape] = known
        return known

    def _num_specials(self, tokens: Sequence[int]) -> int:
        return sum(map(self._encoder.special_ids.__contains__, tokens))


def _max_steps(num_messages: int, num_chars: int) -> int:
    """Far more than templates take: some ten steps a message, and a few passes over its text at 64 characters a step."""
    pairs = min(num_messages * num_messages, MAX_STEPS_OF_PAIRS)
    return FREE_STEPS + STEPS_A_MESSAGE * num_messages + pairs + num_chars // 2


def _refused(why: str) -> ApiError:
    return bad_request(
        f"The model's chat template does not accept these messages: {why}.", "messages", "invalid_chat_messages"
    )


def _unused_char(texts: Sequence[str]) -> str:
    used = set().union(*texts)
    for code in range(_FIRST_PLACEHOLDER, _LAST_PLACEHOLDER + 1):
        if chr(code) not in used:
            return chr(code)
    raise _refused("they use up all private characters")


class _TemplateRaised(jinja2.TemplateError):
    """The template called raise_exception; its message is meant for the client."""


def _raise_exception(message: str) -> str:
    raise _TemplateRaised(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here it renders its content."""

    tags = {"generation"}  # noqa: RUF012 - the name and the kind are Jinja's.

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(lineno)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()

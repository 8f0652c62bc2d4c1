"""What the serving benchmarks share: a running stack, prompts of a given length that nobody has sent, and timed requests."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
from tokenizers import Tokenizer

from command.paths import default_state_dir
from tests.support.stack import Stack

WORDS = [
    "salt",
    "water",
    "layer",
    "depth",
    "river",
    "ocean",
    "wind",
    "cold",
    "warm",
    "light",
    "stone",
    "glass",
    "train",
    "paper",
    "music",
    "bread",
    "cloud",
    "tree",
]
MIB = 2**20
FIRST_UNIQUE_ID = 1000
"""Prompts begin with different tokens, so that not even a partial match (kv-semantics 3.4) joins two of them."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed completion: seconds to the first token and to the end, its text, and where its prompt came from."""

    ttft_s: float
    total_s: float
    text: str
    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    computed_tokens: int


def model_argument(description: str | None) -> Path:
    """The model directory named on the command line, or the demo model."""
    parser = argparse.ArgumentParser(description=description)
    place = Path(
        os.environ.get("HALOCLINE_TEST_MODEL") or default_state_dir(os.environ, Path.home()) / "models" / "demo"
    )
    parser.add_argument("--model", type=Path, default=place, help="directory in Hugging Face layout (%(default)s)")
    found: Path = parser.parse_args().model
    if not (found / "config.json").exists():
        parser.error(f"no model at {found}; run `halocline fetch-model` or name one with --model")
    return found


@contextlib.contextmanager
def serving(model: Path, **settings: object) -> Iterator[Stack]:
    """A stack with room for the prompts of a benchmark."""
    room = {"cached_host_cache_size": 1024 * MIB, "engine_device_cache_size": 1024 * MIB}
    with Stack.start(model, **{**room, **settings}) as stack:
        yield stack


def client(stack: Stack, key: str | None = None) -> openai.OpenAI:
    """An SDK client that does not try again by itself."""
    return openai.OpenAI(base_url=stack.base_url, api_key=key or stack.key, max_retries=0, timeout=300)


class Prompts:
    """Prompts as token ids, of exactly the wished length, each unlike all others from its first token on."""

    def __init__(self, model: Path, seed: int = 1) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._random = random.Random(seed)
        self._count = itertools.count(1)

    def fresh(self, num_tokens: int) -> list[int]:
        """`num_tokens` token ids of plain words that no earlier prompt began with."""
        words = [self._random.choice(WORDS) for _ in range(num_tokens)]
        ids: list[int] = self._tokenizer.encode(" ".join(words), add_special_tokens=False).ids
        return [FIRST_UNIQUE_ID + next(self._count), *ids[: num_tokens - 1]]


def ask(sdk: openai.OpenAI, prompt: list[int], max_tokens: int = 8) -> Answer:
    """One greedy streamed completion of token ids."""
    began = time.perf_counter()
    first_s = 0.0
    text = ""
    usage = None
    stream = sdk.completions.create(
        model="demo",
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].text:
            first_s = first_s or time.perf_counter() - began
            text += chunk.choices[0].text
        usage = chunk.usage or usage
    assert usage is not None
    served = usage.model_extra["halocline"]  # type: ignore[index]
    return Answer(
        first_s,
        time.perf_counter() - began,
        text,
        usage.prompt_tokens,
        served["device_tokens"],
        served["host_tokens"],
        served["computed_tokens"],
    )

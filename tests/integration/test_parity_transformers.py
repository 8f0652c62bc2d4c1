"""The engine gives what plain `transformers` gives, however the prompt's K and V came to be.

Twenty prompts, greedy, on the real model: computed cold, served from the device, served from the host, chunked at odd
sizes, and batched with one another. The reference is one forward pass over prompt and answer without any cache.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.config import EngineConfig
from engine.runner import ModelRunner, load_runner
from tests.support.engine_harness import EngineHarness, Generated, poison

MAX_TOKENS = 6
TOLERANCE = 5e-4
TIE = 1e-3
STATE: dict[str, Path] = {}  # Digests and kernels are computed once for all block sizes.

TEXTS = [
    "A",
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Übermäßig süße Äpfel schmecken",
    "日本の首都は",
    "🙂🙃🙂🙃 means",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "the the the the the the the the the the the the the the the the the",
    '{"name": "halocline", "kind": "layer", "salinity":',
    "SELECT tenant, COUNT(*) FROM requests WHERE status = 200 GROUP BY",
    "Question: Why is the sea salty?\nAnswer:",
    "Once upon a time, in a land far away, there lived",
    "<html><head><title>Layers</title></head><body><h1>",
    "To be, or not to be, that is the question: Whether 'tis nobler in the mind to suffer",
    "In 1969, the first humans landed on the Moon. The mission was called",
    "Water boils at 100 degrees Celsius at sea level, but on a mountain it boils at",
    "\n\n\n\t\t  indentation   matters   ",
    "A halocline is a layer in which the salinity of water changes quickly with depth. " * 12,
    "List of fruits: apple, banana, cherry, date, elderberry, fig, grape, honeydew, " * 8,
    "The quick brown fox jumps over the lazy dog. " * 30 + "The quick brown",
]


@pytest.fixture(scope="module")
def reference(demo_model_dir: Path):
    return AutoModelForCausalLM.from_pretrained(demo_model_dir, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def prompts(demo_model_dir: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(demo_model_dir)
    return [tokenizer.encode(text) for text in TEXTS]


@pytest.fixture(scope="module")
def runner(demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    config = EngineConfig(
        socket=Path("/unused"),
        model_dir=demo_model_dir,
        cached_socket=Path("/unused"),
        state_dir=tmp_path_factory.mktemp("state"),
        device="cpu",
        device_cache_size=320 * 737_280,
    )
    return load_runner(config)


@pytest.fixture(scope="module")
def host(runner: ModelRunner, prompts: list[list[int]]) -> dict[bytes, bytes]:
    """What the twenty prompts leave in the host tier."""
    stored: dict[bytes, bytes] = {}
    harness = EngineHarness(runner, stored)
    harness.generate(prompts, 1)
    harness.settle()
    return stored


def assert_equals_reference(reference, generated: list[Generated]) -> None:
    for one in generated:
        assert len(one.tokens) == len(one.logits)
        sequence = torch.tensor([[*one.prompt, *one.tokens]])
        with torch.inference_mode():
            expected = reference(sequence).logits[0, len(one.prompt) - 1 : -1]
        difference = (torch.stack(one.logits) - expected).abs().max().item()
        assert difference <= TOLERANCE, f"logits differ by {difference} after {one.prompt[:8]}…"
        for place, token in enumerate(one.tokens):
            best, second = expected[place].topk(2).values.tolist()
            if best - second < TIE:
                break
            assert token == expected[place].argmax().item(), f"token {place} after {one.prompt[:8]}…"


def test_cold_prompts_and_warm_ones_equal_transformers(reference, runner, prompts) -> None:
    poison(runner)
    harness = EngineHarness(runner)

    cold = [harness.generate([prompt], MAX_TOKENS)[0] for prompt in prompts]
    warm = [harness.generate([prompt], MAX_TOKENS)[0] for prompt in prompts]

    for one in warm:
        assert one.first is not None
        assert one.first.device_tokens == len(one.prompt) - 1, "3.1: all but one token"
    assert_equals_reference(reference, cold)
    assert_equals_reference(reference, warm)


def test_prompts_loaded_from_the_host_tier_equal_transformers(reference, runner, prompts, host) -> None:
    poison(runner)
    harness = EngineHarness(runner, dict(host))

    generated = [one for at in range(0, 20, 4) for one in harness.generate(prompts[at : at + 4], MAX_TOKENS)]

    for one in generated:
        assert one.first is not None
        assert one.first.host_tokens == (len(one.prompt) - 1) // 16 * 16
    assert_equals_reference(reference, generated)


@pytest.mark.parametrize("step_budget", [7, 33])
def test_prompts_chunked_at_odd_sizes_equal_transformers(reference, runner, prompts, step_budget: int) -> None:
    poison(runner)
    chosen = prompts[::2] if step_budget == 7 else prompts[1::2]
    harness = EngineHarness(runner, max_num_tokens=step_budget, max_batch_size=5)

    assert_equals_reference(reference, harness.generate(chosen, MAX_TOKENS))


def test_prompts_batched_with_one_another_equal_transformers(reference, runner, prompts) -> None:
    """Each prompt twice: the copies share blocks within the step that computes them (kv-semantics 3.2)."""
    poison(runner)
    harness = EngineHarness(runner)

    generated = harness.generate([*prompts, *prompts], MAX_TOKENS)

    assert_equals_reference(reference, generated)
    computed = sum(one.first.computed_tokens for one in generated if one.first)
    assert computed <= sum(map(len, prompts)) + 20 * 16


def test_a_pool_of_64_blocks_gives_eight_long_requests_the_text_of_a_large_pool(demo_model_dir, tmp_path) -> None:
    """Eight contexts of about 220 tokens need 112 blocks of 16: somebody is preempted, and nobody's text changes."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model_dir)
    topics = ["salt", "rivers", "engines", "trees", "glass", "clouds", "trains", "bread"]
    long_prompts = [tokenizer.encode(f"Tell me a long story about {topic}. " * 20)[:180] for topic in topics]
    texts = []
    for num_blocks in (64, 320):
        config = EngineConfig(
            socket=Path("/unused"),
            model_dir=demo_model_dir,
            cached_socket=Path("/unused"),
            state_dir=tmp_path,
            device="cpu",
            device_cache_size=num_blocks * 737_280,
        )
        small = load_runner(config)
        poison(small)
        harness = EngineHarness(small)
        generated = harness.generate(long_prompts, 40)
        texts.append([one.tokens for one in generated])
        statistics = harness.core.statistics()
        assert (statistics.preemptions > 0) == (num_blocks == 64)

    assert texts[0] == texts[1]


@pytest.mark.parametrize("tokens_per_block", [2, 4, 8, 32, 64, 128])
def test_every_block_size_equals_transformers_cold_warm_and_from_the_host(
    reference, prompts, demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory, tokens_per_block: int
) -> None:
    chosen = [prompts[2], prompts[13], prompts[17][:150]]
    config = EngineConfig(
        socket=Path("/unused"),
        model_dir=demo_model_dir,
        cached_socket=Path("/unused"),
        state_dir=STATE.setdefault("dir", tmp_path_factory.mktemp("sizes")),
        device="cpu",
        tokens_per_block=tokens_per_block,
        device_cache_size=60 * 2**20,
    )
    sized = load_runner(config)
    poison(sized)
    host: dict[bytes, bytes] = {}
    harness = EngineHarness(sized, host)

    cold = harness.generate(chosen, 2)
    warm = harness.generate(chosen, 2)
    harness.settle()
    poison(sized)
    loaded = EngineHarness(sized, host).generate(chosen, 2)

    for one in (*cold, *warm, *loaded):
        assert one.first is not None
    assert all(one.first and one.first.device_tokens == len(one.prompt) - 1 for one in warm)
    for one in loaded:
        whole_blocks = (len(one.prompt) - 1) // tokens_per_block * tokens_per_block
        assert one.first is not None
        assert one.first.host_tokens == whole_blocks
    assert_equals_reference(reference, [*cold, *warm, *loaded])

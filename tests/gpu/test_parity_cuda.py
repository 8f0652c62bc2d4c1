"""On a GPU the engine gives what plain `transformers` gives, however the prompt's K and V came to be.

In half precision two correct programs differ, so the measure is the error that `transformers` itself makes: its logits in
the same dtype against those in float32. Skipped, and told so, where there is no CUDA device.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cached.client import Lease
from engine.config import EngineConfig
from engine.runner import ModelRunner, load_runner
from engine.transfer import Arrived
from tests.support.engine_harness import EngineHarness, Generated, poison
from tests.support.fake_payload import FakePayload
from tests.support.tiny_model import write_tiny_model

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]
MAX_TOKENS = 6
TIMES_THEIR_ERROR = 4.0
FLOOR = 1e-3
"""Of the largest logit: what float32 programs that add in another order differ by."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Of lengths around a block's and a step's boundaries; token ids below every model's vocabulary.
PROMPTS = [[(7 * length + 3 * place) % 100 + 3 for place in range(length)] for length in (1, 5, 16, 17, 48, 131, 300)]


@dataclass
class Case:
    """One model in one dtype: the engine's runner and what the logits should be."""

    runner: ModelRunner
    reference: torch.nn.Module
    same_dtype: torch.nn.Module

    def expected(self, one: Generated) -> tuple[torch.Tensor, float]:
        """Logits in float32, and how far ours may be from them."""
        sequence = torch.tensor([[*one.prompt, *one.tokens]], device=DEVICE)
        with torch.inference_mode():
            exact, theirs = (
                model(sequence).logits[0, len(one.prompt) - 1 : -1].float().cpu()
                for model in (self.reference, self.same_dtype)
            )
        allowed = TIMES_THEIR_ERROR * (theirs - exact).abs().max().item() + FLOOR * exact.abs().max().item()
        return exact, allowed


@pytest.fixture(
    scope="module",
    params=[
        *(("tiny", "float32"), ("tiny", "bfloat16"), ("tiny", "float16")),
        *(("demo", "float32"), ("demo", "bfloat16"), ("demo", "float16")),
    ],
    ids="-".join,
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    name, dtype = request.param
    state = tmp_path_factory.mktemp("state")
    model_dir: Path = (
        write_tiny_model(state / "model", "qwen3") if name == "tiny" else request.getfixturevalue("demo_model_dir")
    )
    config = EngineConfig(
        socket=Path("/unused"),
        model_dir=model_dir,
        cached_socket=Path("/unused"),
        state_dir=state,
        device=DEVICE,
        dtype=dtype,
        device_cache_size=96 * 737_280,
    )
    runner = load_runner(config)
    assert runner.info.device.startswith(DEVICE)
    reference, same_dtype = (
        AutoModelForCausalLM.from_pretrained(model_dir, dtype=each, attn_implementation="eager").eval().to(DEVICE)
        for each in (torch.float32, DTYPES[dtype])
    )
    yield Case(runner, reference, same_dtype)
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def assert_parity(case: Case, generated: list[Generated]) -> None:
    for one in generated:
        assert len(one.tokens) == len(one.logits) > 0
        exact, allowed = case.expected(one)
        found = torch.stack([each.float().cpu() for each in one.logits])
        difference = (found - exact).abs().max().item()
        assert difference <= allowed, f"logits differ by {difference}, allowed {allowed}, {len(one.prompt)} tokens"
        for place, token in enumerate(one.tokens):
            best, second = exact[place].topk(2).values.tolist()
            if best - second < 2 * allowed:
                break  # Both are right, and what follows depends on which it was.
            assert token == exact[place].argmax().item(), f"token {place} after {len(one.prompt)} tokens"


def test_cold_warm_and_host_served_prompts_equal_transformers(case: Case) -> None:
    """Computed; then served from the device; then the pool is spoiled and all comes back from the host's bytes."""
    poison(case.runner)
    host: dict[bytes, bytes] = {}
    harness = EngineHarness(case.runner, host)

    cold = [one for prompt in PROMPTS for one in harness.generate([prompt], MAX_TOKENS)]
    warm = [one for prompt in PROMPTS for one in harness.generate([prompt], MAX_TOKENS)]
    harness.settle()
    poison(case.runner)
    loaded = [one for prompt in PROMPTS for one in EngineHarness(case.runner, host).generate([prompt], MAX_TOKENS)]

    for one in warm:
        assert one.first is not None
        assert one.first.device_tokens == len(one.prompt) - 1
    for one in loaded:
        assert one.first is not None
        assert one.first.host_tokens == (len(one.prompt) - 1) // 16 * 16
    assert_parity(case, [*cold, *warm, *loaded])


@pytest.mark.parametrize("step_budget", [7, 64])
def test_prompts_in_chunks_and_batches_equal_transformers(case: Case, step_budget: int) -> None:
    """All at once, each twice: chunks end inside blocks, and copies share blocks within the step that writes them."""
    poison(case.runner)
    harness = EngineHarness(case.runner, max_num_tokens=step_budget, max_batch_size=7)

    generated = harness.generate([*PROMPTS, *PROMPTS], MAX_TOKENS)

    harness.settle()
    assert_parity(case, generated)


def test_every_block_comes_back_byte_for_byte_while_the_device_computes(case: Case) -> None:
    """Stores and loads of blocks that no step names, on another thread, as the tier worker does them."""
    runner = case.runner
    poison(runner)
    num_blocks, size = runner.info.num_blocks, runner.info.block_bytes
    half = num_blocks // 2
    blocks = range(half, min(num_blocks, half + 16))
    contents = {
        block: torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(block)).numpy()
        for block in blocks
    }
    for block, content in contents.items():
        runner.kv.write_block(block, memoryview(content.tobytes()))
    payload = FakePayload(2 * len(blocks), -(-size // 4096) * 4096, size)
    transfer = runner.kv.transfer(1 << 24)
    wrong: list[object] = []

    def copy() -> None:
        for _ in range(5):
            transfer.look(payload)
            for first in range(0, len(blocks), transfer.batch_blocks):
                batch = list(blocks)[first : first + transfer.batch_blocks]
                transfer.store(payload, [(block, payload.reserved(block - half)) for block in batch])
                leased = [(block, payload.leased(block - half)) for block in batch]
                if transfer.load(payload, Lease(1, 1, ()), leased, verify=True) != Arrived():
                    wrong.append(batch)
        for block, content in contents.items():
            out = bytearray(size)
            runner.kv.read_block(block, memoryview(out))
            if bytes(out) != content.tobytes():
                wrong.append(block)

    thread = threading.Thread(target=copy)
    thread.start()
    harness = EngineHarness(runner, num_blocks=half)
    generated = [one for prompt in PROMPTS[:5] for one in harness.generate([prompt], MAX_TOKENS)]
    thread.join()
    transfer.close()

    assert wrong == []
    assert_parity(case, generated)

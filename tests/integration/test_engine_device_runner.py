"""The device side against plain transformers: cold, chunked, batched, copied, reused inside a step, abandoned."""

from __future__ import annotations

import engine.environment  # isort: skip

import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import engine.runner
from engine.attention.gather import GatherAttention
from engine.attention.interface import Attention, StepContext, choose_attention
from engine.attention.paged_decode import segment_kernel
from engine.attention.tiled import attend_parts
from engine.batch import pack
from engine.config import EngineConfig
from engine.errors import ModelRefused
from engine.fused import fuse
from engine.kernel_builds import BUILDS
from engine.kernel_cache import is_ours
from engine.kv_memory import KvMemory
from engine.model import load_model
from engine.model_files import inspect_model
from engine.narrow_weights import fewest_bytes
from engine.panel_block import between_attentions
from engine.plan import BlockCopy, Chunk, SampleRequest, StepPlan
from engine.protocol import Sampling
from engine.runner import ForwardPass, ModelRunner, load_runner
from tests.support.tiny_model import FAMILIES, VOCAB_SIZE, write_tiny_model

TOLERANCE = 5e-4
PATHS = ("gather", "cpu", "fused")
TOKENS_PER_BLOCK = 4
CPU = torch.device("cpu")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_plain_transformers_whatever_the_chunks_and_the_company(
    family: str, path: str, tmp_path: Path
) -> None:
    rig = _Rig(write_tiny_model(tmp_path, family), path)
    prompts = [_tokens(37, 1), _tokens(21, 2), _tokens(3, 3)]
    expected = [rig.reference(prompt) for prompt in prompts]

    for chunk_sizes in ([64], [1], [5], [7, 1, 3], [2, 13]):
        found = rig.in_company(prompts, chunk_sizes)

        for logits, wanted in zip(found, expected, strict=True):
            assert (logits - wanted).abs().max() < TOLERANCE


@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 2), (torch.float16, 3)])
@pytest.mark.parametrize("family", ["llama", "llama_mha", "qwen2"])
def test_a_checkpoint_of_narrow_numbers_is_read_as_such_and_computed_as_float32(
    family: str, dtype: torch.dtype, width: int, tmp_path: Path
) -> None:
    rig = _Rig(write_tiny_model(tmp_path, family, dtype=dtype), "fused")
    widths = {fewest_bytes(weight.float().numpy()) for weight in load_file(tmp_path / "model.safetensors").values()}
    prompts = [_tokens(37, 1), _tokens(21, 2), _tokens(3, 3)]

    found = [rig.in_company(prompts, sizes) for sizes in ([64], [1], [7, 1, 3])]

    assert widths == {width}
    for prompt, *logits in zip(prompts, *found, strict=True):
        wanted = rig.reference(prompt)
        assert all((one - wanted).abs().max() < TOLERANCE for one in logits)


@pytest.mark.parametrize("path", PATHS)
def test_a_sequence_may_use_blocks_that_another_computes_in_the_same_step(path: str, tmp_path: Path) -> None:
    rig = _Rig(write_tiny_model(tmp_path), path)
    shared, own, other = _tokens(8, 1), _tokens(5, 2), _tokens(1, 3)

    producer = Chunk(1, 0, (*shared, *own), (6, 3, 9, 1), None)
    consumer = Chunk(2, 8, other, (6, 3, 2), None)
    logits = rig.logits(StepPlan(1, (), (consumer, producer)))

    assert (logits[:1] - rig.reference((*shared, *other))[8:]).abs().max() < TOLERANCE
    assert (logits[1:] - rig.reference((*shared, *own))).abs().max() < TOLERANCE


def test_a_copied_beginning_of_a_block_serves_another_sequence(tmp_path: Path) -> None:
    rig = _Rig(write_tiny_model(tmp_path), "cpu")
    shared, rest, other = _tokens(7, 1), _tokens(1, 2), _tokens(3, 3)
    rig.logits(StepPlan(1, (), (Chunk(1, 0, (*shared, *rest), (4, 8), None),)))
    untouched = rig.kv.pool[8].clone()

    plan = StepPlan(2, (BlockCopy(8, 5, 3),), (Chunk(2, 7, other, (4, 5, 0), None),))
    rig.kv.copy_tokens(plan.copies)
    logits = rig.logits(plan)

    assert (logits - rig.reference((*shared, *other))[7:]).abs().max() < TOLERANCE
    assert torch.equal(rig.kv.pool[8], untouched)


def test_blocks_that_went_out_and_in_again_serve_as_before(tmp_path: Path) -> None:
    rig = _Rig(write_tiny_model(tmp_path), "cpu")
    prompt = _tokens(8, 1)
    rig.logits(StepPlan(1, (), (Chunk(1, 0, prompt, (4, 8), None),)))

    for old, new in ((4, 1), (8, 2)):
        copy = bytearray(rig.kv.layout.block_bytes)
        rig.kv.read_block(old, memoryview(copy))
        rig.kv.write_block(new, memoryview(bytes(copy)))
    logits = rig.logits(StepPlan(2, (), (Chunk(2, 8, (5,), (1, 2, 3), None),)))

    assert (logits - rig.reference((*prompt, 5))[8:]).abs().max() < TOLERANCE


def test_greedy_text_is_the_same_alone_chunked_and_in_company(tmp_path: Path) -> None:
    runner = _runner(tmp_path)
    prompts = [_tokens(30, 1), _tokens(11, 2), _tokens(19, 3)]

    alone = [_generate(runner, [prompt], 12, 64)[0] for prompt in prompts]

    assert _generate(runner, prompts, 12, 64) == alone
    assert _generate(runner, prompts, 12, 7) == alone


def test_sampled_text_is_the_same_alone_and_in_company(tmp_path: Path) -> None:
    runner = _runner(tmp_path)
    prompts = [_tokens(30, 1), _tokens(11, 2), _tokens(19, 3)]
    sampling = Sampling(temperature=0.8, top_p=0.95)

    alone = [_generate(runner, [prompt], 12, 64, sampling, [seed])[0] for seed, prompt in enumerate(prompts)]

    assert _generate(runner, prompts, 12, 64, sampling, [0, 1, 2]) == alone
    assert _generate(runner, prompts, 12, 64, sampling, [3, 4, 5]) != alone


def test_a_step_is_abandoned_between_layers_and_the_next_one_is_right(tmp_path: Path) -> None:
    runner = _runner(tmp_path)
    prompt = _tokens(30, 1)
    undisturbed = _generate(runner, [prompt], 6, 64)
    asked = itertools.count()
    plan = StepPlan(7, (), (Chunk(1, 0, prompt, tuple(range(8)), _request(Sampling(temperature=0.0), 0, 0)),))

    result = runner.execute(plan, lambda: next(asked) >= 1)

    assert result.aborted
    assert (result.step_id, result.sampled, result.failed) == (7, (), ())
    assert next(asked) == 2  # Asked before the first layer and before the second, then no more.
    assert _generate(runner, [prompt], 6, 64) == undisturbed


def test_a_sequence_whose_cache_is_broken_fails_alone(tmp_path: Path) -> None:
    runner = _runner(tmp_path)
    runner.kv.pool[3].fill_(torch.nan)
    greedy = Sampling(temperature=0.0)

    plan = StepPlan(
        1,
        (),
        (
            Chunk(1, 4, (5,), (3, 4), _request(greedy, 0, 0)),
            Chunk(2, 0, (5,), (6,), _request(greedy, 0, 0)),
        ),
    )
    result = runner.execute(plan, lambda: False)

    assert [sequence_id for sequence_id, _ in result.failed] == [1]
    assert "not finite" in result.failed[0][1]
    assert [sampled.sequence_id for sampled in result.sampled] == [2]


def test_a_step_without_a_sample_gives_no_token(tmp_path: Path) -> None:
    runner = _runner(tmp_path)

    result = runner.execute(StepPlan(4, (), (Chunk(1, 0, (1, 2, 3), (0,), None),)), lambda: False)

    assert (result.step_id, result.sampled, result.failed, result.aborted) == (4, (), (), False)


def test_the_ends_of_turns_of_a_chat_model_are_known(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model")
    generation = json.loads((directory / "generation_config.json").read_text())
    (directory / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": [2, 7]}))

    assert _runner(tmp_path / "1", directory).info.eos_token_ids == (2, 7)
    (directory / "generation_config.json").unlink()
    assert _runner(tmp_path / "2", directory).info.eos_token_ids == (2,)


def test_another_data_type_is_another_layout(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model")

    wide, narrow = _runner(tmp_path, directory), _runner(tmp_path, directory, dtype="bfloat16")

    assert (wide.info.dtype, narrow.info.dtype) == ("float32", "bfloat16")
    assert wide.info.block_bytes == 2 * narrow.info.block_bytes
    assert wide.info.layout_fingerprint != narrow.info.layout_fingerprint
    assert len(_generate(narrow, [_tokens(9, 1), _tokens(30, 2)], 5, 7)[0]) == 5


def test_a_model_is_the_same_wherever_it_lies_and_another_one_is_not(tmp_path: Path) -> None:
    first = _runner(tmp_path / "1", write_tiny_model(tmp_path / "a", seed=1))
    moved = _runner(tmp_path / "2", write_tiny_model(tmp_path / "b", seed=1))
    other = _runner(tmp_path / "3", write_tiny_model(tmp_path / "c", seed=2))

    assert first.info.layout_fingerprint == moved.info.layout_fingerprint
    assert first.info.layout_fingerprint != other.info.layout_fingerprint


def test_weights_that_change_while_they_are_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_tiny_model(tmp_path / "model")
    load = engine.runner.load_model

    def load_and_touch(*args: Any) -> object:
        loaded = load(*args)
        os.utime(directory / "model.safetensors")
        return loaded

    monkeypatch.setattr(engine.runner, "load_model", load_and_touch)

    with pytest.raises(ModelRefused, match="changed while they were being read"):
        _runner(tmp_path, directory)


def test_kernels_are_compiled_ahead_for_the_arrays_that_the_engine_has(tmp_path: Path) -> None:
    """Compiled for any others, they would be compiled once more, when the start has already waited for them."""
    _runner(tmp_path)  # Has run a chunk and a decode: tiny_config's heads are of 8, three of them for each KV head.
    kernels = (attend_parts, segment_kernel(8, 3), between_attentions)
    before = [list(kernel.signatures) for kernel in kernels]
    assert all(before)

    for build in BUILDS.values():
        build(8, 3)

    assert [list(kernel.signatures) for kernel in kernels] == before


def test_kernels_are_kept_only_where_nobody_else_may_write(tmp_path: Path) -> None:
    """What numba finds in its cache it executes."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "file").touch()

    assert is_ours(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert not is_ours(tmp_path / "open")
    assert not is_ours(tmp_path / "file" / "below")


def test_the_demo_model_equals_plain_transformers_cold_chunked_and_in_company(demo_model_dir: Path) -> None:
    rig = _Rig(demo_model_dir, "cpu", tokens_per_block=16, num_blocks=40)
    prompts = [_tokens(70, 1, 49152), _tokens(41, 2, 49152), _tokens(9, 3, 49152)]
    expected = [rig.reference(prompt) for prompt in prompts]

    for chunk_sizes in ([256], [17, 3]):
        found = rig.in_company(prompts, chunk_sizes)

        for logits, wanted in zip(found, expected, strict=True):
            assert (logits - wanted).abs().max() < TOLERANCE


def test_the_demo_model_writes_the_reference_text(demo_model_dir: Path, tmp_path: Path) -> None:
    runner = _runner(tmp_path, demo_model_dir, tokens_per_block=16, device_cache_size="100MB")
    prompts = [(1, *_tokens(60, 1, 49152)), (1, 504, 3575, 282, 4649, 314), (1, 2683, 28, 665, 20)]
    reference = AutoModelForCausalLM.from_pretrained(demo_model_dir, dtype=torch.float32)

    cold = [_generate(runner, [prompt], 10, 256)[0] for prompt in prompts]
    together = _generate(runner, prompts, 10, 23)

    assert together == cold
    for prompt, tokens in zip(prompts, cold, strict=True):
        _assert_greedy(reference, prompt, tokens)


class _Rig:
    """Model, pool and attention without the runner, so that the logits of every row can be seen. `path`: transformers'
    layers with plain or compiled attention, or fused layers with the latter."""

    def __init__(
        self, directory: Path, path: str, tokens_per_block: int = TOKENS_PER_BLOCK, num_blocks: int = 64
    ) -> None:
        loaded = load_model(inspect_model(directory), torch.float32, CPU)
        self.model: ForwardPass = loaded
        if path == "fused":
            fused = fuse(loaded)
            assert fused is not None
            self.model = fused
        self._reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.kv = KvMemory(self.model.shape.block_layout(tokens_per_block, "float32"), num_blocks, CPU)
        self.kv.pool.fill_(torch.nan)
        self._attention: Attention = GatherAttention(self.kv) if path == "gather" else choose_attention(self.kv, None)
        assert self._attention.name == ("gather" if path == "gather" else "cpu")

    @torch.inference_mode()
    def reference(self, tokens: Sequence[int]) -> torch.Tensor:
        return self._reference(torch.tensor([list(tokens)]), use_cache=False).logits[0]

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> torch.Tensor:
        layout = self.kv.layout
        batch = pack(plan, layout.tokens_per_block, self.kv.num_blocks, self._attention.max_short_tokens)
        batch = dataclasses.replace(batch, logit_rows=batch.positions * 0 + range(len(batch.positions)))
        return self.model.forward(batch, StepContext(self._attention.begin(batch), lambda: False))

    def in_company(self, prompts: Sequence[Sequence[int]], chunk_sizes: Sequence[int]) -> list[torch.Tensor]:
        """All logits of all prompts, computed together in chunks of these sizes, in turn."""
        tables = _tables(prompts, self.kv.layout.tokens_per_block, self.kv.num_blocks)
        found: list[list[torch.Tensor]] = [[] for _ in prompts]
        done = [0] * len(prompts)
        sizes = itertools.cycle(chunk_sizes)
        while any(done[i] < len(prompt) for i, prompt in enumerate(prompts)):
            chunks = []
            for i, prompt in enumerate(prompts):
                if tokens := tuple(prompt[done[i] : done[i] + next(sizes)]):
                    chunks.append(Chunk(i, done[i], tokens, tables[i], None))
            logits, row = self.logits(StepPlan(1, (), tuple(chunks))), 0
            for chunk in chunks:
                found[chunk.sequence_id].append(logits[row : row + len(chunk.tokens)])
                done[chunk.sequence_id] += len(chunk.tokens)
                row += len(chunk.tokens)
        return [torch.cat(parts) for parts in found]


def _generate(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    chunk: int,
    sampling: Sampling | None = None,
    seeds: Sequence[int] | None = None,
) -> list[list[int]]:
    """What a scheduler without a cache would do: a chunk of each prompt, then a token of each, all in one batch."""
    sampling = sampling or Sampling(temperature=0.0)
    seeds = seeds or [0] * len(prompts)
    full = [list(prompt) + [0] * num_tokens for prompt in prompts]
    tables = _tables(full, runner.info.tokens_per_block, runner.info.num_blocks)
    outputs: list[list[int]] = [[] for _ in prompts]
    done = [0] * len(prompts)
    while any(len(output) < num_tokens for output in outputs):
        chunks = []
        for i, prompt in enumerate(prompts):
            if len(outputs[i]) == num_tokens:
                continue
            known = [*prompt, *outputs[i]]
            tokens = tuple(known[done[i] : done[i] + chunk])
            done[i] += len(tokens)
            request = _request(sampling, seeds[i], len(outputs[i])) if done[i] == len(known) else None
            chunks.append(Chunk(i, done[i] - len(tokens), tokens, tables[i], request))
        result = runner.execute(StepPlan(1, (), tuple(chunks)), lambda: False)
        assert not result.failed
        for sampled in result.sampled:
            outputs[sampled.sequence_id].append(sampled.token)
    return outputs


def _assert_greedy(reference: Callable, prompt: Sequence[int], tokens: Sequence[int]) -> None:
    """Equal up to the first place where the reference's two best are closer than rounding."""
    with torch.inference_mode():
        logits = reference(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    for token, row in zip(tokens, logits, strict=True):
        best, second = row.topk(2).values.tolist()
        if best - second < 1e-3:
            return
        assert token == int(row.argmax())


def _tables(prompts: Sequence[Sequence[int]], tokens_per_block: int, num_blocks: int) -> list[tuple[int, ...]]:
    """Blocks in no order, never one twice."""
    scattered = iter(torch.randperm(num_blocks, generator=torch.Generator().manual_seed(5)).tolist())
    return [tuple(itertools.islice(scattered, -(-len(prompt) // tokens_per_block))) for prompt in prompts]


def _tokens(count: int, seed: int, vocabulary: int = VOCAB_SIZE) -> tuple[int, ...]:
    return tuple(torch.randint(3, vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def _request(sampling: Sampling, seed: int, output_index: int) -> SampleRequest:
    return SampleRequest(sampling, seed, output_index, (), (), eos_allowed=True)


def _runner(tmp_path: Path, directory: Path | None = None, **settings: object) -> ModelRunner:
    directory = directory or write_tiny_model(tmp_path / "model")
    chosen = {"tokens_per_block": TOKENS_PER_BLOCK, "device_cache_size": "200kB", "device": "cpu"} | settings
    return load_runner(
        EngineConfig(socket=tmp_path / "e.sock", model_dir=directory, state_dir=tmp_path / "state", **chosen)
    )

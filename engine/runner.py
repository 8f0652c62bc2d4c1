"""Starts the device side and executes plans: copies, one packed forward pass, sampling.

It decides how large the pool is and refuses one that does not fit; what runs in a step is for the core. One thread
owns the runner; the copies of `KvMemory.transfer` are another's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import torch

from engine.attention.interface import Attention, StepAbandoned, StepContext, choose_attention
from engine.batch import PackedBatch, pack
from engine.config import EngineConfig
from engine.errors import EngineConfigError, ModelRefused
from engine.kernel_builds import KernelBuilds
from engine.kernel_cache import can_compile
from engine.kv_memory import TORCH_DTYPES, KvMemory
from engine.layout import BlockLayout, layout_fingerprint
from engine.memory_limits import available_memory
from engine.model import LoadedModel, ModelShape, load_model
from engine.model_files import ModelFiles, inspect_model
from engine.plan import Chunk, Sampled, SampleRequest, StepPlan, StepResult
from engine.protocol import Sampling
from engine.sampler import Broken, Scan, sample, scan
from engine.weights_digest import file_state, weights_digest

DEFAULT_CPU_POOL_BYTES: Final = 2**30
# What a step takes beside the pool; a pool that leaves less would be killed, or would swap, at the first long prompt.
_WORKING_BYTES: Final = 256 * 2**20

Progress = Callable[[str, float], None]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the rest of the engine, and the gateway, must know of the model and its pool."""

    model_id: str
    architecture: str
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    layout_fingerprint: bytes
    block_bytes: int
    tokens_per_block: int
    num_blocks: int
    device: str
    dtype: str
    attention: str = ""
    attended_at_once: float = 1.0
    """Tokens of a chunk that attention takes at once."""
    quantization: str = "none"


class ForwardPass(Protocol):
    """A model as the runner needs it: transformers' module, or the same by hand."""

    shape: ModelShape
    dtype: torch.dtype

    def forward(self, batch: PackedBatch, context: StepContext) -> torch.Tensor: ...


class ModelRunner:
    """A loaded model, its pool and its attention."""

    def __init__(
        self, model: ForwardPass, kv: KvMemory, attention: Attention, info: ModelInfo, scan: Scan = scan
    ) -> None:
        self._scan = scan
        self.info = info
        self.kv = kv
        self._model = model
        self._attention = attention

    @torch.inference_mode()
    def execute(self, plan: StepPlan, abandon: Callable[[], bool]) -> StepResult:
        """Runs `plan` to its end, or until `abandon` says, between two layers, that nobody wants it any more."""
        began = time.perf_counter()
        self.kv.begin_step(plan)
        try:
            self.kv.copy_tokens(plan.copies)
            sampled, failed = self._compute(plan, abandon) if plan.chunks else ((), ())
        except StepAbandoned:
            return StepResult(plan.step_id, (), aborted=True, duration_s=time.perf_counter() - began)
        finally:
            self.kv.end_step()  # A step is over when the device is done with its blocks, abandoned or not.
        return StepResult(plan.step_id, sampled, failed, duration_s=time.perf_counter() - began)

    def _compute(
        self, plan: StepPlan, abandon: Callable[[], bool]
    ) -> tuple[tuple[Sampled, ...], tuple[tuple[int, str], ...]]:
        attention = self._attention
        batch = pack(
            plan,
            self.info.tokens_per_block,
            self.info.num_blocks,
            attention.max_short_tokens,
            attention.shares_prefixes,
        )
        logits = self._model.forward(batch, StepContext(attention.begin(batch), abandon))
        wanted = [(chunk.sequence_id, chunk.sample) for chunk in plan.chunks if chunk.sample is not None]
        if not wanted:
            return (), ()
        sampled, failed = [], []
        outcomes = sample(logits, [request for _, request in wanted], self.info.eos_token_ids, self._scan)
        for (sequence_id, _), outcome in zip(wanted, outcomes, strict=True):
            if isinstance(outcome, Broken):
                failed.append((sequence_id, outcome.reason))
            else:
                sampled.append(Sampled(sequence_id, outcome.token, outcome.logprob))
        return tuple(sampled), tuple(failed)


def load_runner(
    config: EngineConfig, progress: Progress = lambda what, share: None, builds: KernelBuilds | None = None
) -> ModelRunner:
    """Loads, sizes and warms up, the latter two when `builds` are over. Raises ModelRefused or EngineConfigError with what to
    change.

    `progress` is told what is being done and how far it is, from 0 to 1; it may be called from another thread.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = _device(config)
    progress("checking the model", 0.0)
    files = inspect_model(config.model_dir)
    before = [file_state(path) for path in files.weights]

    with _Digest(files, config.state_dir / "weights-digests.json", progress) as digest:
        progress("loading the model", 0.0)
        loaded = load_model(files, _dtype(config, files, device), device)
        progress("loading the model", 1.0)
    if [file_state(path) for path in files.weights] != before:
        raise ModelRefused(f"the weights in {files.directory} changed while they were being read; start again")

    progress("arranging the weights", 0.0)
    kernels = config.state_dir / "kernels"
    if config.quantization == "int8":
        model, rounding = _rounded(loaded, kernels)
    else:
        model, rounding = _fastest(loaded, kernels), ""
    progress("arranging the weights", 1.0)

    if builds is not None:
        builds.wait(progress)  # Before the memory is counted that they take.
    dtype = _dtype_name(model)
    layout = model.shape.block_layout(config.tokens_per_block, dtype)
    num_blocks = _num_blocks(config, layout, device)
    progress("allocating the KV pool", 0.0)
    kv = KvMemory(layout, num_blocks, device)
    # Memory touched when first written would be paid for by prompts: by a tenth of the time they take, or more, where a
    # host has to find it.
    kv.take_pages(partial(progress, "allocating the KV pool"))
    attention = choose_attention(kv, kernels)
    info = ModelInfo(
        model_id=config.model_id,
        architecture=model.shape.architecture,
        vocab_size=model.shape.vocab_size,
        max_context_tokens=model.shape.max_context_tokens,
        eos_token_ids=model.shape.eos_token_ids,
        layout_fingerprint=layout_fingerprint(model.shape.config, digest.result, layout, rounding),
        block_bytes=layout.block_bytes,
        tokens_per_block=config.tokens_per_block,
        num_blocks=num_blocks,
        device=str(device),
        dtype=dtype,
        attention=attention.name,
        attended_at_once=max(1.0, attention.queries_at_once * layout.num_kv_heads / model.shape.num_heads),
        quantization=config.quantization,
    )
    runner = ModelRunner(model, kv, attention, info, _quickest_scan(device, kernels))
    progress("warming up", 0.0)
    _warm_up(runner)
    progress("ready", 1.0)
    return runner


def _fastest(model: LoadedModel, kernel_cache_dir: Path) -> ForwardPass:
    """The model with the quickest layers that this machine has for it."""
    if not can_compile(kernel_cache_dir):
        return model
    from engine.fused import fuse  # Imports kernels, which may be neither possible nor kept elsewhere before this.

    return fuse(model) or model


def _rounded(model: LoadedModel, kernel_cache_dir: Path) -> tuple[ForwardPass, str]:
    """The model with int8 weights, and the name of that rounding. Whoever asked for it is refused where it cannot be
    had, and not served more slowly than he reckons with."""
    advice = "set quantization to none"
    if not can_compile(kernel_cache_dir):
        raise EngineConfigError(f"quantization int8 needs numba, which does not work here; {advice}")
    from engine.fused import FAMILY, fuse
    from engine.int8_linear import ROUNDING, Int8Linear, is_available

    if not is_available():
        raise EngineConfigError(
            f"quantization int8 needs FBGEMM, which this build of torch does not have on this processor; {advice}"
        )
    rounded = fuse(model, Int8Linear)
    if rounded is None:
        raise EngineConfigError(
            f"quantization int8 is not there for {model.shape.architecture} as it is configured (it is for "
            f"{', '.join(sorted(FAMILY))} with SiLU and whole heads rotated); {advice}"
        )
    return rounded, ROUNDING


def _quickest_scan(device: torch.device, kernel_cache_dir: Path) -> Scan:
    if device.type != "cpu" or not can_compile(kernel_cache_dir):
        return scan
    from engine.row_scan import scan_compiled

    return scan_compiled


class _Digest:
    """Computes the weights' digest on a thread while the model is being loaded; both read the same file once."""

    def __init__(self, files: ModelFiles, memory: Path, progress: Progress) -> None:
        self._files = files
        self._memory = memory
        self._progress = progress
        self._thread = threading.Thread(target=self._run, name="weights-digest", daemon=True)
        self._error: OSError | None = None
        self.result = b""

    def __enter__(self) -> _Digest:
        self._thread.start()
        return self

    def __exit__(self, exception_type: object, *_: object) -> None:
        if exception_type is not None:
            return  # The model was refused; nobody waits for the digest of it.
        self._thread.join()
        if self._error is not None:
            raise ModelRefused(f"the weights in {self._files.directory} cannot be read: {self._error}")

    def _run(self) -> None:
        try:
            self.result = weights_digest(
                self._files.weights, self._memory, lambda share: self._progress("hashing the weights", share)
            )
        except OSError as error:
            self._error = error


def _device(config: EngineConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise EngineConfigError(
            "device is cuda, and torch finds no CUDA device; use cpu or auto, or a CUDA build of torch"
        )
    if config.device == "cpu" or not torch.cuda.is_available():
        if config.dtype == "float16":
            raise EngineConfigError("dtype float16 is for CUDA; on the CPU use float32 (bfloat16 works and is slower)")
        return torch.device("cpu")
    if config.quantization == "int8":
        raise EngineConfigError(
            "quantization int8 is for the CPU, and device auto has found a GPU; set device to cpu, or quantization to none"
        )
    return torch.device("cuda", torch.cuda.current_device())


def _dtype(config: EngineConfig, files: ModelFiles, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return TORCH_DTYPES[config.dtype]
    if device.type == "cpu":
        return torch.float32
    written = files.config.get("dtype", files.config.get("torch_dtype"))
    return TORCH_DTYPES[written] if written in ("bfloat16", "float16") else torch.bfloat16


def _dtype_name(model: ForwardPass) -> str:
    return next(name for name, dtype in TORCH_DTYPES.items() if dtype is model.dtype)


def _num_blocks(config: EngineConfig, layout: BlockLayout, device: torch.device) -> int:
    """As many blocks as the settings say. Raises EngineConfigError, with the numbers, for more than fits."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        limit, source = int(free), "memory free on the GPU after loading the model"
        wanted = config.device_cache_size or int(free * config.free_gpu_memory_fraction)
    else:
        wanted = config.device_cache_size or DEFAULT_CPU_POOL_BYTES
        memory = available_memory()
        limit = memory.available_bytes - _WORKING_BYTES if memory is not None else wanted
        source = f"{memory.source}, less {_WORKING_BYTES} bytes to work with" if memory is not None else ""
    if wanted > limit:
        raise EngineConfigError(
            f"device_cache_size: the KV pool wants {wanted} bytes and {max(0, limit)} can be had ({source}); "
            "set device_cache_size to less"
        )
    num_blocks = wanted // layout.block_bytes
    if num_blocks < 2:
        raise EngineConfigError(
            f"device_cache_size: {wanted} bytes hold {num_blocks} blocks of {layout.block_bytes} bytes "
            f"({layout.tokens_per_block} tokens); at least 2 are needed"
        )
    return num_blocks


def _warm_up(runner: ModelRunner) -> None:
    """Compiles the kernels, or loads them, and wakes the libraries up, before the first request would wait for it.
    It writes to block 0, which nobody has been given yet."""
    request = SampleRequest(Sampling(temperature=0.0), seed=0, output_index=0, prompt=(), output=(), eos_allowed=True)
    tokens = min(runner.info.tokens_per_block, 8)
    for chunk in (Chunk(0, 0, (0,) * tokens, (0,), None), Chunk(0, tokens - 1, (0,), (0,), request)):
        runner.execute(StepPlan(0, (), (chunk,)), lambda: False)

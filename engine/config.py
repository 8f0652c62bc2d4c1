"""What an engine may be told: one frozen object, checked once and passed explicitly.

It decides what is legal, alone and together; whether the model fits the machine is for `engine/runner.py` to find out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ByteSize, ConfigDict, Field, field_validator, model_validator

LEGAL_TOKENS_PER_BLOCK = (2, 4, 8, 16, 32, 64, 128)
MAX_SOCKET_PATH_BYTES = 107

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["none", "int8"]
OffloadPolicy = Literal["on_release", "on_evict"]
LogLevel = Literal["debug", "info", "warning", "error"]


class EngineConfig(BaseModel):
    """The settings of one engine process. Unknown names are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    socket: Path = Field(description="Unix socket on which gateways are served.")
    allowed_users: tuple[str, ...] = Field(
        default=(), description="Names or numbers of users that may connect besides the engine's own and root."
    )
    model_dir: Path = Field(description="Directory of the model, in Hugging Face layout with safetensors weights.")
    model_id: str = Field(default="demo", min_length=1, max_length=256, description="Name under which it is served.")
    state_dir: Path = Field(description="Where digests of weights and compiled kernels are remembered between starts.")

    device: Device = Field(default="auto", description="auto: the GPU where there is one, else the CPU.")
    dtype: Dtype = Field(default="auto", description="auto: float32 on the CPU, what the weights are in on a GPU.")
    quantization: Quantization = Field(
        default="none", description="int8: weights of the linear layers rounded to 8 bits, on an x86 CPU; faster."
    )
    threads: int | None = Field(default=None, ge=1, le=1024, description="CPU threads of a step; none: torch decides.")

    tokens_per_block: int = Field(default=16, description="Tokens in one KV block: a power of two from 2 to 128.")
    device_cache_size: ByteSize | None = Field(
        default=None,
        description="Bytes of the device's KV pool, all taken at the start; none: 1 GiB on the CPU, a fraction of a GPU's memory.",
    )
    free_gpu_memory_fraction: float = Field(
        default=0.9, gt=0.0, lt=1.0, description="Share of the GPU memory left free by the model that the pool takes."
    )

    # A bound: below it the pace chooses (`engine/pace.py`). A full step is run at start.
    max_num_tokens: int = Field(
        default=512, ge=1, le=1 << 20, description="Tokens that one step may have at most, prefill and decode."
    )
    decode_pace: float = Field(
        default=3.0,
        ge=1.0,
        le=1e6,
        allow_inf_nan=False,
        description="How many times as long as without prefill a step may take while streams run beside a prefill.",
    )
    max_batch_size: int = Field(default=64, ge=1, le=65536, description="Sequences that run at once.")
    max_queue: int = Field(
        default=1024,
        ge=0,
        le=1 << 20,
        description="Sequences that wait, half of them at most of one owner alone; more are refused.",
    )

    enable_block_reuse: bool = Field(default=True, description="Serve prefixes from blocks computed before.")
    enable_partial_reuse: bool = Field(default=True, description="Also serve the shared beginning of a block.")
    copy_on_partial_reuse: bool = Field(default=True, description="Copy that beginning, leave its source as it was.")

    cached_socket: Path | None = Field(default=None, description="Unix socket of the cache daemon; none: no host tier.")
    host_cache_size: ByteSize = Field(default=ByteSize(1 << 30), description="0 switches the host tier off.")
    onboard_blocks: bool = Field(default=True, description="Copy host blocks to the device when a prompt hits them.")
    secondary_offload_min_priority: int = Field(
        default=35, ge=0, le=100, description="Blocks below this priority are not offered to the host tier."
    )
    offload_policy: OffloadPolicy = Field(default="on_release", description="When idle blocks are offered.")
    verify_loads: bool = Field(default=True, description="Compare the checksum of each block that is loaded.")
    pin_chunk_size: ByteSize = Field(
        default=ByteSize(1 << 30),
        ge=0,
        le=1 << 36,
        description="Bytes of the host tier that are registered with CUDA at once; 0: none, copies go through a buffer.",
    )
    tier_timeout_ms: int = Field(default=50, ge=1, le=10_000, description="Longest wait for one answer of the tier.")

    event_buffer_max_size: int = Field(default=16384, ge=0, le=1 << 24, description="KV events kept; 0: none.")
    event_token_ids: bool = Field(default=False, description="Events carry the token ids of their blocks.")

    record: Path | None = Field(
        default=None,
        description="Request log to append to, for replays: lengths and keyed hashes, never text; none: off.",
    )

    metrics_listen: str | None = Field(default=None, description="HOST:PORT or unix:/path of the metrics endpoint.")
    log_level: LogLevel = "info"

    @field_validator("tokens_per_block")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value not in LEGAL_TOKENS_PER_BLOCK:
            raise ValueError(f"{value} is not legal; legal are {', '.join(map(str, LEGAL_TOKENS_PER_BLOCK))}")
        return value

    @field_validator("device_cache_size")
    @classmethod
    def _some_cache(cls, value: ByteSize | None) -> ByteSize | None:
        if value is not None and value <= 0:
            raise ValueError("the device pool cannot be empty; give a size such as 1GiB, or leave it out")
        return value

    @field_validator("socket", "cached_socket")
    @classmethod
    def _short_path(cls, value: Path | None) -> Path | None:
        if value is not None and len(str(value).encode()) > MAX_SOCKET_PATH_BYTES:
            raise ValueError(f"{value} is longer than the {MAX_SOCKET_PATH_BYTES} bytes a Unix socket path may have")
        return value

    @model_validator(mode="after")
    def _relations(self) -> Self:
        if self.max_num_tokens < self.max_batch_size:
            raise ValueError(
                f"max_num_tokens ({self.max_num_tokens}) is below max_batch_size ({self.max_batch_size}): "
                "a step must have room for one token of every running sequence"
            )
        if self.device == "cpu" and self.dtype == "float16":
            raise ValueError("dtype float16 is for CUDA; on the CPU use float32 (bfloat16 works and is slower)")
        if self.quantization == "int8" and (self.device == "cuda" or self.dtype not in ("auto", "float32")):
            raise ValueError(
                f"quantization int8 is for the CPU and float32, not for device {self.device} with dtype {self.dtype}; "
                "set device to cpu and dtype to auto, or quantization to none"
            )
        return self

    @property
    def tier_enabled(self) -> bool:
        """Whether a host tier is to be used, when its daemon is there."""
        return self.cached_socket is not None and self.host_cache_size > 0

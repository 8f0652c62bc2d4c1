"""What is, and is not, the same model to a cache: weights digests and layout fingerprints."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from engine import weights_digest as module
from engine.layout import BlockLayout, layout_fingerprint
from engine.weights_digest import weights_digest

LAYOUT = BlockLayout(num_layers=30, tokens_per_block=16, num_kv_heads=3, head_dim=64, dtype="float32")
ARCHITECTURE = {"architectures": ["LlamaForCausalLM"], "hidden_size": 576, "rope_parameters": {"rope_theta": 1e5}}


def test_one_block_of_the_demo_model_has_the_known_size() -> None:
    assert LAYOUT.block_bytes == 737_280


def test_the_fingerprint_is_pinned() -> None:
    """Changing it silently would make every stored block a miss; a change here must be meant."""
    assert layout_fingerprint(ARCHITECTURE, b"w" * 32, LAYOUT).hex() == PINNED


def test_everything_that_changes_the_bytes_or_their_meaning_changes_the_fingerprint() -> None:
    """kv-semantics 1.2."""
    others = [
        layout_fingerprint(ARCHITECTURE | {"hidden_size": 577}, b"w" * 32, LAYOUT),
        layout_fingerprint(ARCHITECTURE | {"rope_parameters": {"rope_theta": 1e4}}, b"w" * 32, LAYOUT),
        layout_fingerprint(ARCHITECTURE | {"a_field_not_known_today": 1}, b"w" * 32, LAYOUT),
        layout_fingerprint(ARCHITECTURE, b"v" * 32, LAYOUT),
        *(
            layout_fingerprint(ARCHITECTURE, b"w" * 32, dataclasses.replace(LAYOUT, **change))
            for change in (
                {"dtype": "bfloat16"},
                {"dtype": "float16"},
                {"tokens_per_block": 32},
                {"num_kv_heads": 6, "head_dim": 32},
                {"num_layers": 31},
            )
        ),
    ]

    assert len({layout_fingerprint(ARCHITECTURE, b"w" * 32, LAYOUT), *others}) == len(others) + 1


def test_names_paths_and_versions_do_not_change_the_fingerprint() -> None:
    renamed = ARCHITECTURE | {"_name_or_path": "/elsewhere", "transformers_version": "9", "use_cache": False}

    assert layout_fingerprint(renamed, b"w" * 32, LAYOUT) == layout_fingerprint(ARCHITECTURE, b"w" * 32, LAYOUT)


def test_other_weights_under_the_same_name_have_another_digest(tmp_path: Path) -> None:
    file, memory = tmp_path / "model.safetensors", tmp_path / "state" / "digests.json"
    file.write_bytes(b"one")
    first = weights_digest([file], memory)
    status = file.stat()

    file.write_bytes(b"two")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))

    assert weights_digest([file], memory) != first


def test_weights_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kv-semantics 1.2: computed once, remembered by path, size and mtime."""
    file, memory = tmp_path / "model.safetensors", tmp_path / "digests.json"
    file.write_bytes(b"weights")
    first = weights_digest([file], memory)

    def fail(*_: object) -> bytes:
        raise AssertionError("read again")

    monkeypatch.setattr(module, "_hash", fail)

    assert weights_digest([file], memory) == first


@pytest.mark.parametrize("content", ["", "[]", "{", '{"%s": 3}', '{"%s": {"state": 1}}', '{"%s": {"sha256": "zz"}}'])
def test_a_damaged_memory_costs_time_and_nothing_else(content: str, tmp_path: Path) -> None:
    file, memory = tmp_path / "model.safetensors", tmp_path / "digests.json"
    file.write_bytes(b"weights")
    expected = weights_digest([file], tmp_path / "other.json")

    memory.write_text(content.replace("%s", str(file)))

    assert weights_digest([file], memory) == expected
    assert json.loads(memory.read_text())[str(file.resolve())]["sha256"]


def test_a_state_directory_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"weights")

    assert weights_digest([file], file / "not-a-directory" / "digests.json")


def test_the_digest_does_not_depend_on_where_the_files_lie(tmp_path: Path) -> None:
    digests = []
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        files = [tmp_path / place / name for name in ("model-1.safetensors", "model-2.safetensors")]
        for file in files:
            file.write_bytes(file.name.encode() * 100)
        digests.append(weights_digest(files, tmp_path / "digests.json"))

    assert digests[0] == digests[1]


PINNED = "7fb2b12fb64da5f7d9b0ee773eae6076a4158a64aa473dc65c8fc656b9f77d95"

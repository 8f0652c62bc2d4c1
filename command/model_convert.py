"""Converts one GGUF file into a directory in Hugging Face layout; run as a process of its own by `fetch-model`.

    python -P command/model_convert.py GGUF OUT_DIR

A process of its own because torch and transformers take a gigabyte that the caller need not keep, and because it can
be killed. It prints one word per step on stdout; the directory it writes is not published until the caller renames it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

STEPS = ("import", "read", "write", "tokenizer", "sync")


def main(gguf: Path, out: Path) -> None:
    """Writes model.safetensors, config.json, the tokenizer and the chat template to `out`, and syncs them to disk."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", OMP_WAIT_POLICY="PASSIVE")
    _say("import")
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    transformers.utils.logging.disable_progress_bar()
    _say("read")
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    # The weights are plain float32 now; with these two still set save_pretrained believes otherwise and refuses.
    # (setattr, because the stubs know no None here.)
    setattr(model, "hf_quantizer", None)  # noqa: B010
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    _say("write")
    model.save_pretrained(str(out))
    _say("tokenizer")
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(str(out))
    _forget_local_paths(out)
    _say("sync")
    for file in out.iterdir():
        file.chmod(0o644)
        with file.open("rb") as stream:
            os.fsync(stream.fileno())


def _forget_local_paths(out: Path) -> None:
    """Where the model was converted is nobody's business, and would make equal models differ."""
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        file = out / name
        if not file.exists():
            continue
        document = json.loads(file.read_text(encoding="utf-8"))
        for key in ("_name_or_path", "name_or_path"):
            document.pop(key, None)
        file.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _say(step: str) -> None:
    print(step, flush=True)  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

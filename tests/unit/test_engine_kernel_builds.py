"""At a first start the dearest kernels are compiled in processes of their own; nothing depends on them but time."""

from __future__ import annotations

import json
import logging
import re
import signal
import sys
from pathlib import Path

import pytest

from engine import kernel_builds, kernel_cache
from engine.config import EngineConfig
from engine.kernel_builds import start_builds
from engine.kernel_cache import directory_in, kernel_sources

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "hidden_size": 48,
}
KERNELS = ["block", "segments", "tiles"]
LAST_NUMBERS = "import sys; from pathlib import Path; Path(sys.argv[2], '-'.join(sys.argv[1:2] + sys.argv[3:])).touch()"


def config(tmp_path: Path, model: dict[str, object] = MODEL, **settings: object) -> EngineConfig:
    directory = tmp_path / "model"
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(model))
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    return EngineConfig(socket=Path("/unused"), model_dir=directory, state_dir=tmp_path, **settings)  # type: ignore[arg-type]


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_builds, "_GPU", Path("/nowhere"))


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_gpu: None) -> Path:
    """A directory in which each process that would compile leaves its arguments as a file's name."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{LAST_NUMBERS}" "$4" {tmp_path} "$6" "$7"\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    return tmp_path


def wait(builds: kernel_builds.KernelBuilds) -> list[tuple[str, float]]:
    told: list[tuple[str, float]] = []
    builds.wait(lambda stage, share: told.append((stage, share)))
    return told


@pytest.mark.parametrize(
    ("model", "settings", "wanted"),
    [
        (MODEL, {}, ["block-8-3", "segments-8-3", "tiles-8-3"]),
        (MODEL | {"head_dim": 16}, {}, ["block-16-3", "segments-16-3", "tiles-16-3"]),
        (MODEL | {"num_key_value_heads": None}, {}, ["block-8-1", "segments-8-1", "tiles-8-1"]),
        (MODEL, {"quantization": "int8"}, ["segments-8-3", "tiles-8-3"]),
        (MODEL, {"device": "cuda"}, []),
        (MODEL, {"dtype": "bfloat16"}, []),
        (MODEL | {"num_attention_heads": 0}, {}, []),
        (MODEL | {"num_attention_heads": "six"}, {}, []),
        ({"architectures": ["LlamaForCausalLM"]}, {}, []),
        ({}, {}, []),
    ],
)
def test_a_process_is_started_for_each_kernel_that_the_model_will_want(
    noted: Path, model: dict[str, object], settings: dict[str, object], wanted: list[str]
) -> None:
    told = wait(start_builds(config(noted, model, **settings)))

    assert sorted(path.name for path in noted.glob("*-*-*")) == wanted
    assert [stage for stage, _ in told] == ["compiling kernels"] * len(wanted)


def test_where_there_is_a_gpu_none_is_started(noted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_builds, "_GPU", noted)

    assert wait(start_builds(config(noted))) == []
    assert wait(start_builds(config(noted, device="cpu"))) != []


def test_what_others_may_write_to_nobody_compiles_into(noted: Path) -> None:
    kernels = noted / "kernels"
    directory_in(kernels).mkdir(parents=True)
    for directory in (directory_in(kernels), kernels):
        directory.chmod(0o770)
        assert wait(start_builds(config(noted))) == []
        directory.chmod(0o700)
    assert len(wait(start_builds(config(noted)))) == len(KERNELS)


def test_none_is_compiled_by_what_lies_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_gpu: None
) -> None:
    """`python -m` looks there first, and executed it."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "numba.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(kernel_builds, "BUILDS", {"none": None})  # Which the process does not know: it ends at once.

    wait(start_builds(config(tmp_path)))

    assert not (tmp_path / "executed").exists()


def test_a_kernel_that_is_there_is_not_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_gpu: None
) -> None:
    monkeypatch.setattr(kernel_builds, "BUILDS", {"block": kernel_builds.build_block})
    given = config(tmp_path)

    assert len(wait(start_builds(given))) == 1
    compiled = sorted(path.name.partition("-")[0] for path in directory_in(tmp_path / "kernels").rglob("*.nbc"))
    assert "panel_block._between_attentions" in compiled
    # One product, whatever becomes of its sums: for each of three there was one of its own, more than half of the time.
    assert compiled.count("panel_products.multiply") == 1
    assert wait(start_builds(given)) == []
    assert wait(start_builds(config(tmp_path, MODEL | {"head_dim": 16}))) == []  # It does not depend on it.


def test_processes_that_fail_or_cannot_be_started_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_gpu: None, caplog: pytest.LogCaptureFixture
) -> None:
    given = config(tmp_path)
    for executable, said in (("/bin/false", "ended with 1"), (str(tmp_path / "none"), "No such file")):
        monkeypatch.setattr(sys, "executable", executable)
        with caplog.at_level(logging.WARNING):
            wait(start_builds(given))
        assert caplog.text.count(said) == len(KERNELS)
        caplog.clear()
    assert list(directory_in(tmp_path / "kernels").iterdir()) == []


def test_one_that_hangs_is_ended_and_so_are_all_when_the_engine_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_gpu: None
) -> None:
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 600\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(sleeper))
    monkeypatch.setattr(kernel_builds, "_LONGEST_S", 0.2)
    for end in (wait, kernel_builds.KernelBuilds.stop):
        builds = start_builds(config(tmp_path))
        processes = list(builds._processes.values())
        assert len(processes) == len(KERNELS)

        end(builds)

        assert [process.returncode for process in processes] == [-signal.SIGKILL] * len(KERNELS)


def test_all_that_kernels_are_made_of_is_in_the_name_of_their_directory() -> None:
    """What widens narrow weights was not: of a version that changed it, kernels of the one before would have been loaded."""
    sources = kernel_sources()
    package = Path(kernel_cache.__file__).parent
    kernels = [path for path in sources if re.search(r"njit|@intrinsic", path.read_text())]

    used = {
        package.parent.joinpath(*module.split(".")).with_suffix(".py")
        for path in kernels
        for module in re.findall(r"^from (engine\.\S+) import", path.read_text(), re.MULTILINE)
    }

    assert package / "narrow_weights.py" in used
    assert used <= set(sources)

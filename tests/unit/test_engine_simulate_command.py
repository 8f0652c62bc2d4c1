"""`halocline simulate` and `halocline tune`, as a person and as a script meet them."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import halocline
from cached.keys import namespace
from command.group import CommandContext
from engine.request_log import header_line, request_line
from tests.support.engine_stub import EngineStub

ROWS = [
    {"timestamp": 1000 * n, "input_length": 2000, "hash_ids": [0, 1 + n % 3, 4 + n % 5, 100 + n]} for n in range(60)
]
KEY = bytes(32)

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def invoke(*words: object) -> Result:
        argv = ["--state-dir", str(tmp_path / "state"), *map(str, words)]
        return CliRunner().invoke(halocline.cli, argv, obj=CommandContext())

    return invoke


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "requests.log"
    root = namespace(b"layout", None)
    prompts = [[*range(100), *range(1000 * n, 1000 * n + 60)] for n in range(30)]
    rows = [request_line(KEY, 1000.0 + n, root, prompt, 1) for n, prompt in enumerate(prompts)]
    path.write_bytes(header_line(KEY) + b"".join(rows))
    return path


def tokenizer(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, "c": 3}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return folder


def document(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_the_table_has_a_row_for_every_policy_and_capacity(run: Run, trace: Path) -> None:
    result = run("simulate", trace, "--blocks", "8,16", "--blocks", "50%", "--policy", "lru,priority,adaptive,belady")

    header, *rows = result.stdout.splitlines()
    assert header.split("\t")[:3] == ["policy", "blocks", "hit rate"]
    assert [row.split("\t")[0] for row in rows] == [name for name in ("lru", "priority", "adaptive", "belady") for _ in range(3)]  # fmt: skip
    assert "60 requests, 120,000 prompt tokens, 512 tokens per block" in result.stderr


def test_the_json_keeps_its_shape(run: Run, trace: Path) -> None:
    shown = document(run("simulate", trace, "--blocks", "16", "--policy", "lru", "--host-blocks", "100", "--json"))

    assert shown["schema"] == "halocline.simulate.v1"
    assert shown.keys() == {"schema", "trace", "tokens_per_block", "runs"}
    assert shown["trace"] == {
        "path": str(trace), "format": "mooncake", "requests": 60, "prompt_tokens": 120_000, "block_references": 180,
    }  # fmt: skip
    assert shown["runs"][0].keys() == {
        "policy", "blocks", "host_blocks", "requests", "refused", "tokens_prompt", "tokens_device", "tokens_host",
        "evicted", "expired", "dropped_unused", "host_stored", "host_evicted", "host_refused", "hit_rate",
    }  # fmt: skip
    assert shown["runs"][0]["tokens_host"] > 0


def test_a_retention_file_is_a_policy_of_its_own(run: Run, trace: Path, tmp_path: Path) -> None:
    retention = {"token_ranges": [{"start": 0, "end": 1024, "priority": 90}], "decode_priority": 1}
    (tmp_path / "r.json").write_text(json.dumps(retention))

    shown = document(run("simulate", trace, "--blocks", "6", "--retention", tmp_path / "r.json", "--policy", "lru", "--json"))  # fmt: skip

    rates = {each["policy"]: each["hit_rate"] for each in shown["runs"]}
    assert rates["retention"] > rates["lru"]


def test_text_is_tokenized_and_may_be_shared_in_part(run: Run, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"input": "a b c a b c a b c"}\n{"input": "a b c a b c a c c"}\n')
    said = ("simulate", tmp_path / "t.jsonl", "--tokenizer", tokenizer(tmp_path / "tok"), "--tokens-per-block", "4", "--blocks", "9", "--policy", "lru", "--json")  # fmt: skip

    partly, whole = document(run(*said)), document(run(*said, "--no-partial-reuse"))

    assert partly["runs"][0]["tokens_device"] == 7
    assert whole["runs"][0]["tokens_device"] == 4


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--blocks", "0"), 6, "legal are 1 to"),
        (("--blocks", "many"), 6, "neither a number nor a percentage"),
        (("--blocks", "nan%"), 6, "neither a number nor a percentage"),
        (("--blocks", "0%"), 6, "neither a number nor a percentage"),
        (("--blocks", "1e9"), 6, "neither a number"),
        (("--blocks", "99999999"), 6, "legal are 1 to"),
        (("--blocks", ","), 2, "--blocks is empty"),
        (("--policy", "mru"), 6, "there are lru, priority"),
        (("--policy", "retention"), 6, "give --retention FILE"),
        (("--tokens-per-block", "3"), 6, "legal are 2, 4, 8"),
        (("--tokens-per-block", "0"), 6, "legal are 2, 4, 8"),
        (("--retention", "nowhere.json"), 3, "there is no file nowhere.json"),
        (("--blocks", ",".join(map(str, range(1, 40)))), 6, "more than 64 runs"),
    ],
)
def test_what_is_not_legal_is_refused_in_one_sentence(
    trace: Path, words: tuple[str, ...], code: int, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ended = halocline.run(["--state-dir", str(tmp_path), "simulate", str(trace), *words])

    shown = capsys.readouterr().err
    assert (ended, said in shown) == (code, True), shown
    assert len(shown.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--blocks", "2%", "--policy", "lru"),
            "more than 15 different blocks, too many to count for a percentage; give --blocks N",
        ),
        (
            ("--blocks", "9", "--policy", "lru,belady"),
            "too many for belady, which knows all of them; leave it out of --policy",
        ),
    ],
)
def test_more_different_blocks_than_memory_should_hold_are_refused_with_what_to_do(
    words: tuple[str, ...],
    said: str,
    trace: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.ceiling.MAX_DISTINCT_BLOCKS", 15)

    ended = halocline.run(["--state-dir", str(tmp_path), "simulate", str(trace), *words])

    assert (ended, said in capsys.readouterr().err) == (6, True)


def test_a_capacity_in_blocks_has_no_limit_of_different_blocks(
    run: Run, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.ceiling.MAX_DISTINCT_BLOCKS", 15)

    assert run("simulate", trace, "--blocks", "9").exit_code == 0


@pytest.mark.parametrize("content", [b'{"when": 1}\n', b"", b"PK\x03\x04"])
def test_a_file_that_is_no_trace_ends_the_command_with_one_sentence(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t").write_bytes(content)

    ended = halocline.run(["--state-dir", str(tmp_path), "simulate", str(tmp_path / "t")])

    assert ended == 6
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_torn_line_is_told_once_on_stderr(run: Run, trace: Path) -> None:
    with trace.open("a") as file:
        file.write('{"timest')

    result = run("simulate", trace, "--blocks", "10%")

    assert result.exit_code == 0
    assert result.stderr.count("line 61, the last, is torn") == 1


def test_a_chart_without_matplotlib_is_refused_before_anything_is_replayed(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    ended = halocline.run(["--state-dir", str(tmp_path), "simulate", str(trace), "--plot", str(tmp_path / "h.png")])

    assert ended == 1
    assert "pip install 'halocline[plot]'" in capsys.readouterr().err
    assert not (tmp_path / "h.png").exists()


def test_the_chart_is_a_picture(run: Run, trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    result = run("simulate", trace, "--blocks", "8,16", "--plot", tmp_path / "h.png")

    assert result.exit_code == 0
    assert (tmp_path / "h.png").read_bytes().startswith(b"\x89PNG")


def test_tuning_from_a_log_compares_the_sizes_it_knows(run: Run, log: Path) -> None:
    shown = document(run("tune", "block-size", "--from", log, "--capacity", 4096, "--prefill-rate", 1000, "--json"))

    assert shown["schema"] == "halocline.tune.v1"
    assert [each["tokens_per_block"] for each in shown["sizes"]] == [8, 16, 32, 64, 128]
    by_size = {each["tokens_per_block"]: each for each in shown["sizes"]}
    assert by_size[8]["hit_rate"] == pytest.approx(29 * 96 / (30 * 160))
    assert by_size[128]["hit_rate"] == 0
    assert by_size[8]["blocks"] * 8 == by_size[128]["blocks"] * 128 == 4096
    assert shown["recommended"] in (8, 16, 32)
    assert f"{by_size[shown['recommended']]['hit_rate']:.1%} of prompt tokens reused" in shown["reason"]


def test_tuning_from_text_knows_every_size(run: Run, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"input": "a b c a b c a b c a b c"}\n' * 5)

    shown = document(run("tune", "block-size", "--from", tmp_path / "t.jsonl", "--tokenizer", tokenizer(tmp_path / "tok"), "--capacity", 1024, "--prefill-rate", 10, "--json"))  # fmt: skip

    assert [each["tokens_per_block"] for each in shown["sizes"]] == [2, 4, 8, 16, 32, 64, 128]


def test_the_last_hours_are_those_of_the_engines_own_log(run: Run, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALOCLINE_ENGINE_RECORD", str(log))
    monkeypatch.setattr("command.simulate_cli.time.time", lambda: 1000.0 + 29 + 9.5)

    shown = document(run("tune", "block-size", "--last", 10 / 3600, "--capacity", 4096, "--prefill-rate", 9, "--json"))

    assert shown["requests"] == 1


def test_the_last_hours_without_a_log_say_how_to_get_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended = halocline.run(["--state-dir", str(tmp_path), "tune", "block-size", "--last", "24"])

    assert ended == 6
    assert "engine.record" in capsys.readouterr().err


async def test_the_last_hours_are_those_of_the_running_engines_log_wherever_it_writes(
    run: Run, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("command.simulate_cli.time.time", lambda: 1000.0 + 29 + 9.5)
    # The setting names another one: `halocline engine --record FILE` said where this engine writes.
    monkeypatch.setenv("HALOCLINE_ENGINE_RECORD", str(tmp_path / "elsewhere.log"))
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setenv("HALOCLINE_ENGINE_SOCKET", f"{short}/engine.sock")
        async with EngineStub(f"{short}/engine.sock") as stub:
            stub.stats = {"settings": {"record": str(log)}, "rates": {"prefill_tokens_per_s": 77.0}}
            words = ("tune", "block-size", "--last", 10 / 3600, "--capacity", 4096, "--json")
            shown = document(await asyncio.to_thread(run, *words))

    assert (shown["trace"], shown["requests"]) == (str(log), 1)
    assert (shown["prefill_tokens_per_s"], shown["prefill_origin"]) == (77.0, "measured by the running engine")


async def test_a_running_engine_without_a_log_leaves_it_to_the_setting(
    run: Run, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("command.simulate_cli.time.time", lambda: 1000.0 + 29 + 9.5)
    monkeypatch.setenv("HALOCLINE_ENGINE_RECORD", str(log))
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setenv("HALOCLINE_ENGINE_SOCKET", f"{short}/engine.sock")
        async with EngineStub(f"{short}/engine.sock") as stub:
            stub.stats = {"settings": {"record": None}}
            words = ("tune", "block-size", "--last", 10 / 3600, "--capacity", 4096, "--json")
            shown = document(await asyncio.to_thread(run, *words))

    assert (shown["trace"], shown["requests"]) == (str(log), 1)
    assert "has measured none yet" in shown["prefill_origin"]


def test_without_an_engine_the_prefill_rate_is_assumed_and_that_is_said(run: Run, log: Path) -> None:
    shown = document(run("tune", "block-size", "--from", log, "--json"))

    assert shown["prefill_origin"].startswith("assumed")
    assert shown["capacity_origin"].startswith("assumed")

"""The openai SDK of the major version before: installed beside the tests' own, it runs a script of its own against us.

Skipped, and told so, where no package index can be reached. What was installed is kept in the checkout's test cache.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine.protocol import Rejected, Submit
from tests.support.engine_stub import Script
from tests.support.gateway_stand import Stand, standing

VERSION = "1.109.1"
ROOT = Path(__file__).parents[2]
INSTALL_S, RUN_S = 90.0, 60.0
OVERLOADED_AT = 77
"""A request for so many tokens finds the engine full."""

USER = """
import json, sys, openai

said = {"version": openai.__version__}
client = openai.OpenAI(base_url=sys.argv[1], api_key=sys.argv[2], max_retries=0)
messages = [{"role": "user", "content": "Hello"}]
create = client.chat.completions.create

whole = create(model="demo", messages=messages, max_tokens=5)
said["whole"] = [whole.choices[0].message.content, whole.choices[0].finish_reason, whole.usage.total_tokens]
said["request_id"] = whole._request_id

text, reasons, usages = "", [], []
for chunk in create(model="demo", messages=messages, stream=True, stream_options={"include_usage": True}):
    for choice in chunk.choices:
        text += choice.delta.content or ""
        reasons += [choice.finish_reason] if choice.finish_reason else []
    usages += [[len(chunk.choices), chunk.usage.total_tokens]] if chunk.usage else []
said["streamed"] = [text, reasons, usages]

said["completions"] = []
for prompt in ("one", [1, 2, 3], [[1], [2]], ["one", "two"]):
    answer = client.completions.create(model="demo", prompt=prompt, logprobs=1)
    said["completions"].append([[c.text for c in answer.choices], answer.usage.prompt_tokens])
said["models"] = [model.id for model in client.models.list()]

def error_of(act):
    try:
        act()
    except openai.APIStatusError as error:
        return [type(error).__name__, error.status_code, error.code, error.param]
    return None

said["errors"] = [
    error_of(lambda: create(model="demo", messages=messages, temperature=3)),
    error_of(lambda: client.with_options(api_key="wrong").models.list()),
    error_of(lambda: create(model="other", messages=messages)),
    error_of(lambda: create(model="demo", messages=messages, max_tokens=int(sys.argv[3]))),
]
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def sdk_of_before() -> Path:
    """A folder with the SDK and all it needs; never half of it, since it is renamed into its place."""
    place = ROOT / ".pytest_cache" / f"openai-{VERSION}-python{sys.version_info[0]}.{sys.version_info[1]}"
    if place.exists():
        return place
    half = place.with_name(f"{place.name}.{os.getpid()}")
    words = ["install", "-q", "--retries", "0", "--timeout", "10", "--target", str(half), f"openai=={VERSION}"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=INSTALL_S,
            check=False,
        )
        said = None if done.returncode == 0 else done.stderr.strip().splitlines()[-1:]
    except subprocess.TimeoutExpired:
        said = [f"it took more than {INSTALL_S:.0f} s"]
    if said is not None:
        shutil.rmtree(half, ignore_errors=True)
        pytest.skip(f"pip could not install openai {VERSION}: {' '.join(said)}")
    half.rename(place)
    return place


@pytest.fixture
async def stand(demo_model_dir: Path) -> AsyncIterator[Stand]:
    async with standing(demo_model_dir) as made:
        yield made


async def test_the_sdk_of_the_major_version_before_works_unchanged(sdk_of_before: Path, stand: Stand) -> None:
    said = await use_with(sdk_of_before, stand)

    assert said["version"] == VERSION
    text, reason, total = said["whole"]
    assert (text, reason) == ("The of the", "stop")
    assert said["request_id"].startswith("req_")
    assert said["streamed"] == [text, ["stop"], [[0, total]]], "one usage, in a last chunk without choices"
    assert [texts for texts, _ in said["completions"]] == [[text], [text], [text] * 2, [text] * 2]
    assert [num_prompt for _, num_prompt in said["completions"]][1:3] == [3, 2]
    assert [[*submit.prompt] for submit in stand.stub.submits if len(submit.prompt) == 12][:1] == [[*ids(1, 2, 3)]]
    assert said["models"] == ["demo"]
    assert said["errors"] == [
        ["BadRequestError", 400, "invalid_value", "temperature"],
        ["AuthenticationError", 401, "invalid_api_key", None],
        ["NotFoundError", 404, "model_not_found", "model"],
        ["InternalServerError", 503, "engine_overloaded", None],
    ]


async def use_with(sdk: Path, stand: Stand) -> Any:
    """What the script says when it imports the SDK from `sdk`; the gateway answers meanwhile, in this process."""

    def script(submit: Submit, number: int) -> Script:
        is_full = submit.max_tokens == OVERLOADED_AT
        return Script(reject=Rejected(0, "engine_overloaded", "Full.", None, True)) if is_full else Script()

    stand.stub.script_for = script
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "PYTHON"))}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", USER, f"{stand.url}/v1", stand.key, str(OVERLOADED_AT)),
        env={**environ, "PYTHONPATH": str(sdk)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), RUN_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, err.decode(errors="replace")[-3000:]
    return json.loads(out)


def ids(*tokens: int) -> bytes:
    """Token ids as they travel to the engine."""
    return b"".join(token.to_bytes(4, "little") for token in tokens)

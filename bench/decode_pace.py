"""What do running streams and a long prompt that arrives beside them cost each other, by `decode_pace`?

Four streams run alone, then a prompt of 4,000 tokens comes, through the engine's step loop, core and runner: the pauses
between a stream's tokens meanwhile, and how fast the prompt is prefilled. Baselines, in the same run: the streams' pauses
just before and just after (memory may be twice as quick from one moment to the next), and the same prompt with nobody
beside it. The last row is a step of `max_num_tokens` whatever runs.

Prediction: at a pace of p pauses become p times as long, and the prompt keeps (p − 1) ÷ p of the time, less what each of
its many chunks costs for reading the context before it: 3 × and at most 67 % of its rate alone, at the default.
"""

from __future__ import annotations

import copy
import queue
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import engine.environment  # noqa: F401  (before torch)

# isort: split
from bench.burst import p95
from bench.report import finish, median
from bench.serving import Prompts, model_argument
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.loop import Admit, Ended, Inbox, Outbound, Outputs, Refusal, StepLoop, now_s
from engine.main import core_settings, warm_up
from engine.protocol import Sampling
from engine.runner import ModelRunner, load_runner
from engine.values import NewRequest

NUM_STREAMS, STREAM_PROMPT, LONG_PROMPT = 4, 200, 4000
TOKENS_ALONE = 50
"""Of each stream, between which pauses are measured before the prompt comes, and again behind its first token."""
SETTINGS: tuple[float | None, ...] = (1.5, 2.0, 2.5, 3.0, 3.5, 5.0, 8.0, None)
ROUNDS = 5
PAUSE_BAR, RATE_BAR = 3.0, 0.6
GREEDY = Sampling(temperature=0.0, ignore_eos=True)
WAIT_S = 600.0


def main() -> NoReturn:
    model = model_argument(__doc__)
    prompts = Prompts(model)
    with tempfile.TemporaryDirectory() as state:
        config = EngineConfig(socket=Path("/unused"), model_dir=model, state_dir=Path(state), device="cpu")
        # In a thread that is over before steps are measured, as the engine does (`engine.main`): with the team of threads
        # of this one beside the step thread's, OpenMP lets none wait a moment for work, and steps take half again as long.
        with ThreadPoolExecutor(1) as loader:
            bench = loader.submit(lambda: Bench(config, load_runner(config), prompts)).result()
    default = config.decode_pace
    found = [bench.measure(default) for _ in range(ROUNDS)]
    rows = {str(pace): bench.measure(pace) for pace in SETTINGS}
    pauses, rates = [one["pause_ratio"] for one in found], [one["rate_share"] for one in found]
    rows[str(default)] = {name: median([one[name] for one in found]) for name in found[0]}
    for pace, row in rows.items():
        print(f"decode_pace {pace:>5}: " + ", ".join(f"{name} {value:.3f}" for name, value in row.items()), flush=True)
    finish(
        "decode_pace",
        value=rows[str(default)]["pause_p95_s"],
        baseline=rows[str(default)]["pause_alone_p95_s"],
        ratio=median(pauses),
        bar=f"p95 of pauses beside a prefill / alone <= {PAUSE_BAR:g}; rate beside streams / alone >= {RATE_BAR:g}",
        holds=median(pauses) <= PAUSE_BAR and median(rates) >= RATE_BAR,
        spread=[min(pauses), max(pauses)],
        config={
            "streams": NUM_STREAMS,
            "prompt_tokens": LONG_PROMPT,
            "decode_pace": default,
            "max_num_tokens": config.max_num_tokens,
            "rounds": ROUNDS,
            "unit": "s",
            "spread_of": "ratio",
        },
        details={"rate_share": rates, "by_decode_pace": rows},
    )


class Bench:
    """One runner, and a fresh core and step loop for each scenario. `clock` times steps, pauses and prompts."""

    def __init__(
        self, config: EngineConfig, runner: ModelRunner, prompts: Prompts, clock: Callable[[], float] = now_s
    ) -> None:
        self._config = config
        self._runner = runner
        self._prompts = prompts
        self._clock = clock
        _, self._step_rates = warm_up(runner, config.max_num_tokens)
        self._last_id = 0

    def measure(self, pace: float | None) -> dict[str, float]:
        """Pauses and rates at one setting, and how they compare with those alone."""
        _, alone_s = self._run(pace, 0)
        (without, beside), beside_s = self._run(pace, NUM_STREAMS)
        return {
            "pause_alone_p95_s": p95(without),
            "pause_p95_s": p95(beside),
            "pause_ratio": p95(beside) / p95(without),
            "rate_alone_per_s": LONG_PROMPT / alone_s,
            "rate_share": alone_s / beside_s,
        }

    def _run(self, pace: float | None, num_streams: int) -> tuple[tuple[list[float], list[float]], float]:
        """Pauses of the streams without and beside the prompt, and the seconds to its first token."""
        inbox, seen = Inbox(), queue.SimpleQueue[tuple[float, Outbound]]()
        steps = StepLoop(
            EngineCore(core_settings(self._config, self._runner), self._runner.info.layout_fingerprint),
            self._runner,
            inbox,
            lambda item: seen.put((self._clock(), item)),
            tier=None,
            step_rates=copy.deepcopy(self._step_rates),
            decode_pace=pace,
            clock=self._clock,
        )
        steps.start()
        times: dict[int, list[float]] = {}
        streams = [self._submit(inbox, STREAM_PROMPT, 4000) for _ in range(num_streams)]
        while any(len(times.get(each, ())) < TOKENS_ALONE for each in streams):
            self._note(seen, times)
        submitted = self._clock()
        prompt = self._submit(inbox, LONG_PROMPT, 1)
        while prompt not in times:
            self._note(seen, times)
        ended = times[prompt][0]
        enough = {each: len(times[each]) + TOKENS_ALONE for each in streams}
        while any(len(times[each]) < enough[each] for each in streams):
            self._note(seen, times)
        inbox.stop()
        assert steps.join(WAIT_S)
        without: list[float] = []
        beside: list[float] = []
        for each in streams:
            began = max(times[one][0] for one in streams)
            for last, this in zip(times[each], times[each][1:], strict=False):
                if last >= began:
                    (beside if submitted < this <= ended else without).append(this - last)
        return (without, beside), ended - submitted

    def _submit(self, inbox: Inbox, num_tokens: int, max_tokens: int) -> int:
        self._last_id += 1
        request = NewRequest(self._last_id, tuple(self._prompts.fresh(num_tokens)), max_tokens, GREEDY, seed=1)
        inbox.put(Admit(request, self._clock()))
        return self._last_id

    def _note(self, seen: queue.SimpleQueue[tuple[float, Outbound]], times: dict[int, list[float]]) -> None:
        at, item = seen.get(timeout=WAIT_S)
        assert not isinstance(item, Refusal | Ended), item
        for output in item.outputs if isinstance(item, Outputs) else ():
            times.setdefault(output.sequence_id, []).append(at)


if __name__ == "__main__":
    main()

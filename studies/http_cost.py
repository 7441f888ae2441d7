"""What HTTP costs: processor time of the server for a streamed token, beside an engine whose steps cost nothing.

    python studies/http_cost.py            16 clients, 32 requests of 256 tokens
    python studies/http_cost.py --quick    does it run? (the figures mean nothing)

The server is the one of `megatron-mtp serve`, with a byte-level tokenizer; its engine hands out a token of every text,
then sleeps. OpenAI's client asks in a process of its own, which does not count. Every token is an event of its own, as
when texts are decoded without drafts.

Run at 40f73be, beside other work.
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # started by path, `benchmarks` would not be found

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.harness import add_common_flags, hardware, limit_threads, report, Table
from megatron_mtp.acceptance import AcceptanceStats
from megatron_mtp.decoding.requests import Finish, Load, Request, Update
from megatron_mtp.server.api import Served, Server, address_of, listener, make_app
from megatron_mtp.server.async_engine import AsyncEngine
from megatron_mtp.server.detokenizer import Codec

STEP = 0.004
"""Seconds that the engine sleeps; the tokens of a step go out together."""

CLIENT = """
import asyncio, sys
from openai import AsyncOpenAI

async def main(url, requests, tokens):
    client, places = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), asyncio.Semaphore(16)

    async def ask(number):
        async with places:
            prompt = f"{number}: " + "word " * 70
            async for _ in await client.completions.create(
                model="bytes", prompt=prompt, max_tokens=int(tokens), stream=True
            ):
                pass

    await asyncio.gather(*map(ask, range(int(requests))))

asyncio.run(main(*sys.argv[1:]))
"""
"""Sixteen requests at a time, each read to its end."""


def main() -> None:
    """Measure, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_flags(parser, {"here": 3})
    args = parser.parse_args()
    limit_threads(args)
    requests, tokens = (4, 8) if args.quick else (32, 256)
    micros = measured(requests, tokens, args.repeats or (1 if args.quick else 3))
    results = {"requests": requests, "tokens": tokens, "microseconds_per_token": [round(one, 1) for one in micros]}
    rows = [["streamed token", round(statistics.median(micros), 1)]]
    report("http_cost", hardware(True), results, [], [Table(["", "processor time, microseconds"], rows)])


def measured(requests: int, tokens: int, repeats: int) -> list[float]:
    """Microseconds of processor time for a token, of every round; one round before them does not count."""
    listening, micros = listener("127.0.0.1", 0), list[float]()
    engine = AsyncEngine(Tokens())
    served = Served("bytes", byte_level(), positions=2**16, vocabulary=256, most_outputs=256, created=0)

    def ask() -> None:
        for _ in range(1 + repeats):
            began = time.process_time()
            ask_once(address_of(listening), requests, tokens)
            micros.append((time.process_time() - began) / (requests * tokens) * 1e6)
        engine.draining = True

    asker = Thread(target=ask, daemon=True)
    Server(make_app(engine, served), engine, asker.start).run([listening])
    return micros[1:]


def ask_once(url: str, requests: int, tokens: int) -> None:
    """Ask from another process."""
    subprocess.run([sys.executable, "-c", CLIENT, url, str(requests), str(tokens)], check=True)


def byte_level() -> Codec:
    """A tokenizer whose tokens are bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return Codec(PreTrainedTokenizerFast(tokenizer_object=made))


class Tokens:
    """An engine as `requests.EngineCore` describes it, which continues every text with the same letter."""

    def __init__(self) -> None:
        self._left: dict[int, int] = {}
        self._added = 0

    def add(self, request: Request) -> int:
        """Begin a text."""
        self._added += 1
        self._left[self._added] = request.max_new_tokens
        return self._added

    def cancel(self, request: int) -> None:
        """Forget a text."""
        self._left.pop(request, None)

    def step(self) -> list[Update]:
        """A token of every text."""
        time.sleep(STEP)
        self._left = {number: left - 1 for number, left in self._left.items()}
        made = [Update(number, [64], finish=None if left else Finish.LENGTH) for number, left in self._left.items()]
        self._left = {number: left for number, left in self._left.items() if left}
        return made

    @property
    def busy(self) -> bool:
        """Whether any text goes on."""
        return bool(self._left)

    @property
    def load(self) -> Load:
        """How busy it is; it has no cache."""
        return Load(len(self._left), 0, 0, 1, 0, 0, 0, AcceptanceStats())


if __name__ == "__main__":
    main()

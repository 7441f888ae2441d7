"""`megatron-mtp bench-serve URL`: requests out, how fast they were answered in."""

import asyncio
import json
import logging
import math
from argparse import Namespace
from typing import Any

from tqdm import tqdm

from megatron_mtp.errors import status_of
from megatron_mtp.serving.bench.client import Answer, Server, at_random, by_clients
from megatron_mtp.serving.bench.drafts import acceptance, counts
from megatron_mtp.serving.bench.figures import figures, table
from megatron_mtp.serving.bench.flags import parser
from megatron_mtp.serving.bench.workload import bodies

CLIENTS = 16
KINDS = (".png", ".svg", ".pdf")


def main(arguments: list[str], program: str) -> int:
    """Measure; bad input ends with one sentence and exit status 2."""
    args = parser(program).parse_args(arguments)
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # which has a line for every request
    return status_of(program, lambda: measure(args))


def measure(args: Namespace) -> int:
    """Ask, and print the figures; ValueError for flags that do not fit, or a server that does not answer."""
    _check(args)
    answers, found = asyncio.run(_measured(args))
    if args.out is not None:
        from megatron_mtp.serving.bench.picture import draw

        draw(answers, found, args.out)
    print(json.dumps(found) if args.json else table(found))
    return 0


async def _measured(args: Namespace) -> tuple[list[Answer], dict[str, Any]]:
    server = Server(args.url, args.api_key)
    async with server.client:
        model = args.model or await server.first_model()
        asked = bodies(args, model)
        before = counts(await server.metrics())
        with tqdm(total=len(asked), unit="request", disable=args.json or None) as bar:
            answers = await _asked(server, asked, args, bar)
        drafted = acceptance(before, counts(await server.metrics()))
    return answers, {"model": model, "load": _load(args), **figures(answers), "acceptance": drafted}


async def _asked(server: Server, asked: list[dict[str, Any]], args: Namespace, bar: Any) -> list[Answer]:
    if args.rate is not None:
        return await at_random(server.ask, asked, args.rate, args.seed, bar.update)
    return await by_clients(server.ask, asked, args.concurrency or CLIENTS, bar.update)


def _load(args: Namespace) -> str:
    """How requests came, in words."""
    if args.rate is not None:
        return f"{args.rate:g} requests a second"
    return f"{args.concurrency or CLIENTS} clients"


def _check(args: Namespace) -> None:
    for name, least in (("requests", 1), ("concurrency", 1), ("max_tokens", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; give {least} or more.")
    if args.rate is not None and args.concurrency is not None:
        raise ValueError("--rate and --concurrency were both given; give one of them.")
    if args.rate is not None and not 0 < args.rate < math.inf:
        raise ValueError(f"--rate is {args.rate}; give requests a second, above 0.")
    if args.out is not None and args.out.suffix not in KINDS:
        raise ValueError(f"--out is '{args.out}'; give a file that ends in {', '.join(KINDS)}.")
    if args.out is not None and not args.out.parent.is_dir():
        raise ValueError(f"--out is '{args.out}', whose folder is not there; make it first.")

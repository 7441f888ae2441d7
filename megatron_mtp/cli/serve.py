"""`megatron-mtp serve`: serve a checkpoint over an OpenAI-compatible API until a signal."""

import os
import time
from argparse import ArgumentTypeError, BooleanOptionalAction, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_mtp.cli.terminal import OF_OTHER_ENGINES, add_checkpoint_flags, add_ranks_flags, say_if_lossy
from megatron_mtp.common.command import check_counts, from_extra
from megatron_mtp.common.errors import Parser, add_foreign_flags, sentences
from megatron_mtp.megatron.runtime import quieten

if TYPE_CHECKING:
    from megatron_mtp.decoding.engine import Engine

_CACHE = "--cache-gib, the GiB for keys, values and states"
OF_OTHER_SERVERS = {
    **OF_OTHER_ENGINES,
    **dict.fromkeys(
        ("--max-num-seqs", "--max-running-requests", "--max-concurrent-requests", "--parallel"), "--max-running"
    ),
    "--max-queued-requests": "--max-waiting",
    **dict.fromkeys(("--gpu-memory-utilization", "--mem-fraction-static", "--cuda-memory-fraction"), _CACHE),
    **dict.fromkeys(("--kv-cache-memory-bytes", "--num-gpu-blocks-override", "--max-total-tokens"), _CACHE),
    **dict.fromkeys(("--context-length", "--ctx-size"), "--max-model-len"),
    **dict.fromkeys(("--enable-log-requests", "--log-requests", "--uvicorn-log-level"), "--access-log"),
    "--hostname": "--host",
    "--alias": "--served-model-name",
}
"""Flags of vLLM, SGLang, TGI and llama.cpp, and what to use instead."""

API_KEY = "MEGATRON_MTP_API_KEY"
"""Environment variable with the key that clients must send."""

LARGEST_GIB = 2**20
"""No machine has more memory; a larger number is a mistake."""

EXAMPLES = """examples:
  # OpenAI-compatible API at http://127.0.0.1:8000/v1, two draft tokens per step
  megatron-mtp serve --load runs/quickstart/checkpoint \\
      --speculative-config '{"method": "mtp_eagle", "num_speculative_tokens": 2}'

  # for other machines, with an API key, up to 64 concurrent requests and 8 GiB of KV cache
  MEGATRON_MTP_API_KEY=$KEY megatron-mtp serve --load runs/mine/checkpoint --host 0.0.0.0 --port 8080 \\
      --max-running 64 --cache-gib 8

  # a request
  curl -N http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
      -d '{"prompt": "def ", "max_tokens": 32, "stream": true}'
"""


def main(arguments: list[str], program: str) -> int:
    """Serve. Invalid input ends with one sentence and exit status 2, a bug of the engine with status 1."""
    args = parser(program).parse_args(arguments)
    quieten()
    with sentences(program):
        return run(args)


def parser(program: str) -> Parser:
    """Create the parser of the command."""
    made = Parser(
        program,
        description="Serve a checkpoint over an OpenAI-compatible API, with continuous batching, per-request "
        "speculative decoding and prefix caching (not on hybrids with recurrent layers).",
        epilog=f"{EXAMPLES}\nSIGTERM or Ctrl-C stops the server after its requests finish; a second one, at once.\n",
    )
    add_foreign_flags(made, OF_OTHER_SERVERS)
    add_checkpoint_flags(made)
    add_ranks_flags(made)
    add = made.add_argument
    add("--host", default="127.0.0.1", metavar="H", help="address to listen on; default: 127.0.0.1, this machine only")
    add("--port", type=int, default=8000, metavar="N", help="port; 0: any free one; default: 8000")
    keys = made.add_mutually_exclusive_group()
    keys.add_argument("--api-key", metavar="KEY", default=os.environ.get(API_KEY), help="key that clients must send; "
        f"visible in the process list, unlike a file or the variable {API_KEY}; default: that variable, or no key"
    )  # fmt: skip
    keys.add_argument("--api-key-file", dest="api_key", type=_key_in, metavar="FILE", help="file with the key alone")
    add("--allowed-origins", nargs="+", default=[], metavar="URL", help="web origins that may call the server "
        "(CORS), such as http://localhost:3000, or '*' for all; default: none")  # fmt: skip
    add("--keep-alive", type=int, default=120, metavar="S", help="seconds before idle connections are closed; "
        "default: 120")  # fmt: skip
    add("--shutdown-timeout", type=float, metavar="S", help="seconds that requests may still run after a stop "
        "signal, before they get status 503; default: no limit")  # fmt: skip
    add("--access-log", action="store_true", help="print a line for each request")
    add("--served-model-name", metavar="NAME", help="model name for clients; default: the name of its folder")
    add("--speculative-config", metavar="JSON", help="how to draft, as in generate; default: plain decoding")
    add("--warm-up", action=BooleanOptionalAction, help="run every batch size before the first request, so that no "
        "request waits for compilation or CUDA graphs; default: on a GPU")  # fmt: skip
    add("--max-running", type=int, default=16, metavar="N", help="requests per step; default: 16")
    add(
        "--max-waiting",
        type=int,
        default=256,
        metavar="N",
        help="requests that may wait; more are rejected; default: 256",
    )
    add("--max-model-len", type=int, metavar="N", help="most tokens of a prompt and its output; default: the "
        "model's positions, or fewer if the cache is smaller")  # fmt: skip
    add("--cache-gib", type=float, metavar="G", help="GiB for the KV cache and recurrent states; default: what "
        "--max-running full requests need, at most 4, or 80 %% of free GPU memory")  # fmt: skip
    return made


def _key_in(file: str) -> str:
    """Read the key from a file, without surrounding white space. Raise ArgumentTypeError if that fails."""
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentTypeError(f"{file} cannot be read ({error}); give a text file with the key alone") from None


def run(args: Namespace) -> int:
    """Load, listen and serve; with several ranks, rank 0 handles HTTP. Raise ValueError for invalid input."""
    with from_extra("serve", "the server", "fastapi", "uvicorn", "prometheus_client"):
        from megatron_mtp.server.api import Served, ServerSettings, listener, serve
        from megatron_mtp.server.async_engine import AsyncEngine
        from megatron_mtp.server.codec import Codec
        from megatron_mtp.server.ranks import follow, group_of_all

    import torch

    from megatron_mtp.data.tokenizer import sampling_defaults
    from megatron_mtp.decoding.engine import Engine, block_bytes, blocks_for, blocks_in, entry_bytes, warm_up
    from megatron_mtp.decoding.load import load_checkpoint, load_drafter
    from megatron_mtp.decoding.method import parse_config
    from megatron_mtp.decoding.scheduler import EngineSettings

    _check(args)
    config = None if args.speculative_config is None else parse_config(args.speculative_config)
    is_first = os.environ.get("RANK", "0") == "0"
    listening = listener(args.host, args.port) if is_first else None

    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    trusted, spread = args.trust_remote_code, args.expert_model_parallel_size
    loaded = load_checkpoint(args.load, None, dtype, "--load", trusted, config, spread)
    runner, drafter = loaded.runner, load_drafter(config, dtype)
    tokenizer = loaded.read_tokenizer(args.tokenizer, args.trust_remote_code)
    if args.max_model_len is not None and args.max_model_len > runner.positions:
        raise ValueError(
            f"--max-model-len is {args.max_model_len}, and the model has {runner.positions} positions; give no more."
        )
    if args.cache_gib is None:
        blocks = blocks_for(args.max_running, runner, drafter, args.max_model_len)
    else:
        blocks = blocks_in(args.cache_gib, args.max_running, runner, drafter)
    sizes = EngineSettings(args.max_running, args.max_waiting, blocks, positions=args.max_model_len)
    engine = Engine(runner, sizes, config, drafter)
    began = time.monotonic()
    if warms := runner.device.type == "cuda" if args.warm_up is None else args.warm_up:
        warm_up(engine)
    folder = Path(args.load).resolve()  # for a run's `checkpoint` folder, use the run's name
    served = Served(
        name=args.served_model_name or (folder.parent if folder.name == "checkpoint" else folder).name,
        codec=Codec(tokenizer),
        positions=engine.max_length,
        vocabulary=runner.vocab_size,
        most_outputs=args.max_waiting,  # each waits for a step before it runs
        created=int(time.time()),
    )
    group = group_of_all() if int(os.environ.get("WORLD_SIZE", "1")) > 1 else None
    if listening is None:
        follow(engine, served.codec, group)
        return 0
    print(f"> {loaded.line(args.load)}")
    print(f"> {drafting_line(engine)}")
    say_if_lossy(config)
    if warms:
        print(f"> warm-up: {time.monotonic() - began:.1f} s")
    used = blocks * block_bytes(runner, drafter) + args.max_running * entry_bytes(runner, drafter)
    cache = f"{blocks} blocks of {sizes.block_size} tokens, {used / 2**30:.3g} GiB"
    print(f"> cache: {cache}; {args.max_running} requests run and {args.max_waiting} wait, at most", flush=True)
    if engine.max_length < engine.scheduler.positions:
        print(f"> {length_line(engine)}", flush=True)
    if tokenizer is not None and (unused := sampling_defaults(tokenizer)):
        print(f"> sampling defaults of generation_config.json are ignored: {unused}", flush=True)
    settings = ServerSettings(args.keep_alive, args.shutdown_timeout, args.access_log)
    return serve(AsyncEngine(engine, group), served, listening, args.api_key, args.allowed_origins, settings)


def drafting_line(engine: "Engine") -> str:
    """Describe method, K and verifier of requests that do not set a drafting method."""
    from megatron_mtp.decoding.method import make_method
    from megatron_mtp.decoding.sampling import Sampling

    config = engine.speculative
    method = make_method(engine.runner, config, Sampling(), engine.drafter)
    if config.method == "plain":
        return "drafts: none, plain decoding"
    count = f"0 to {method.count} tokens a step, as pays," if method.auto else f"{method.count} tokens a step,"
    verifier = config.verifier or "greedy at temperature 0 and rejection above"
    return f"drafts: {config.method}, {count} verified by {verifier}"


def length_line(engine: "Engine") -> str:
    """Describe the length limit of the cache, if it is below the model's positions or --max-model-len."""
    most = f"{engine.max_length} tokens, not {engine.scheduler.positions}"
    return f"a prompt with its answer has at most {most}: the cache holds no more; --cache-gib makes it larger"


def _check(args: Namespace) -> None:
    """Raise ValueError for flags that cannot be served."""
    if args.max_model_len is not None and args.max_model_len < 2:
        raise ValueError(f"--max-model-len is {args.max_model_len}; give 2 or more, for a prompt and a new token.")
    check_counts(args, "max_running", "max_waiting", "keep_alive", "expert_model_parallel_size")
    if args.cache_gib is not None and not 0 < args.cache_gib <= LARGEST_GIB:
        raise ValueError(
            f"--cache-gib is {args.cache_gib}; give the GiB of memory that the cache may take, at most {LARGEST_GIB}."
        )
    if args.shutdown_timeout is not None and not args.shutdown_timeout >= 0:
        raise ValueError(f"--shutdown-timeout is {args.shutdown_timeout}; give seconds, 0 or more.")
    if args.api_key == "":
        raise ValueError(f"the key of --api-key, --api-key-file or {API_KEY} is empty; give a key, or leave it out.")

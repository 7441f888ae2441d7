"""Sampling from a checkpoint: the engine runs several prompts at a time and drafts with the model's MTP layers."""

from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_mtp.cli.terminal import say_if_lossy
from megatron_mtp.common.outputs import check_outside
from megatron_mtp.data.samples import Sample, seed_of
from megatron_mtp.decoding.sampling import Sampling
from megatron_mtp.spec.kinds import DRAFTERS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatron_mtp.decoding.config import SpeculativeConfig
    from megatron_mtp.decoding.runner import Runner


class Checkpoint:
    """A checkpoint saved by Megatron.

    Args:
        args: flags of `sample`.

    Attributes:
        settings: settings that samples depend on, by flag name.
        tokenizer: folder of its tokenizer.

    Raises:
        ValueError: there is no such checkpoint, or a flag is wrong.
    """

    def __init__(self, args: Namespace) -> None:
        from megatron_mtp.decoding.method import parse_config
        from megatron_mtp.megatron.checkpoint.iterations import run_tokenizer
        from megatron_mtp.megatron.checkpoint.reader import DistReader

        self._args = args
        self._speculative = None if args.speculative_config is None else parse_config(args.speculative_config)
        by_the_clock = self._speculative is not None and self._speculative.num_speculative_tokens == "auto"
        if by_the_clock and not Sampling.of(args).greedy:
            raise ValueError(
                "--speculative-config has num_speculative_tokens 'auto', with which samples depend on measured time; "
                "give a number."
            )
        check_outside(Path(f"{args.output_prefix}.texts.jsonl"), Path(args.load))
        reader = DistReader(Path(args.load))
        found = args.tokenizer or run_tokenizer(reader.common()["args"], reader.folder.parent)
        if found is None:
            raise ValueError(f"--load is {args.load}, which names no tokenizer that is there; give --tokenizer.")
        self.tokenizer: Path = found
        self.settings: dict[str, Any] = {
            "load": reader.fingerprint()["catalogue"],  # identifies the model by its checksums
            "dtype": args.dtype,
            "speculative-config": None if self._speculative is None else self._speculative.flat(),
        }

    def start(self, tokenizer: "PreTrainedTokenizerBase", ends: frozenset[int]) -> int:
        """Load the model and set the end tokens. Return the number of positions of a prompt and its continuation."""
        import torch

        from megatron_mtp.data.tokenizer import entries
        from megatron_mtp.decoding.load import load_checkpoint

        args, self._ends = self._args, ends
        say_if_lossy(self._speculative)
        dtype = None if args.dtype is None else getattr(torch, args.dtype)
        trusted, config = args.trust_remote_code, self._speculative
        loaded = load_checkpoint(args.load, entries(tokenizer), dtype, trust_remote_code=trusted, config=config)
        self._runner = loaded.runner
        return self._runner.positions

    def continue_all(self, prompts: Iterable[tuple[int, list[int]]], keep: Callable[[Sample], object]) -> None:
        """Continue every numbered prompt, taking the next one when a place is free, and `keep` each result."""
        from megatron_mtp.decoding.engine import Engine, blocks_for
        from megatron_mtp.decoding.requests import Finish, Request
        from megatron_mtp.decoding.scheduler import EngineSettings

        args, runner, speculative = self._args, self._runner, self._speculative or _default_method(self._runner)
        together, sampling, logprobs = args.batch_size, Sampling.of(args), 0 if args.logprobs else None
        engine = Engine(runner, EngineSettings(together, 2 * together, blocks_for(together, runner)), speculative)
        live: dict[int, Sample] = {}
        left = iter(prompts)
        while True:
            while len(live) < 2 * together and (following := next(left, None)) is not None:
                number, prompt = following
                seed = seed_of(args.seed, number)
                asked = Request(prompt, args.max_new_tokens, sampling, seed, stop_ids=self._ends, logprobs=logprobs)
                live[engine.add(asked)] = Sample(number, prompt, [], "", [] if args.logprobs else None)
            if not live:
                break
            for update in engine.step():
                sample = live[update.request]
                sample.tokens.extend(update.tokens)
                if sample.logprobs is not None:
                    sample.logprobs.extend(one.logprob for one in update.logprobs)
                if update.finish is Finish.ERROR:
                    raise RuntimeError(
                        f"the continuation of prompt {sample.number} has failed; the log has the reason."
                    )
                if update.finish is not None:
                    del live[update.request]
                    keep(replace(sample, finish=update.finish))
        if engine.stats.drafted:
            print(f"drafting: {engine.stats.accepted_length:.2f} tokens per forward")


def _default_method(runner: "Runner") -> "SpeculativeConfig | None":
    """Return drafting by the MTP layers or a drafter as trained; None, for plain decoding, without either."""
    from megatron_mtp.decoding.config import SpeculativeConfig

    if runner.kind and runner.kind in DRAFTERS:
        return SpeculativeConfig(runner.kind)
    if not (runner.depths and runner.sequential):
        return None
    return SpeculativeConfig("mtp_eagle" if runner.shares_kv else "mtp")

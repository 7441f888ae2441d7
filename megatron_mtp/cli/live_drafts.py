"""--mtp-draft-prompts: measure the accepted length by decoding with drafts, at the evaluations of a run."""

import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from megatron_mtp.cli.terminal import read_prompts
from megatron_mtp.data.tokenizer import read_tokenizer
from megatron_mtp.spec.head import only_drafter

TAU, COUNT, NEW_TOKENS = "tau_real", 8, 64
"""Name of the metric, default number of prompts, and new tokens of each."""


class LiveDrafts:
    """Drafts for the prompts of --mtp-draft-prompts with the model of a run. Does nothing without the flag.

    Called on every rank after an evaluation on validation data.
    """

    def __init__(self) -> None:
        self._live: Any = None
        self._prompts: list[list[int]] = []

    def __call__(self, model: Any, args: Namespace) -> dict[str, float]:
        """Return the metrics of an evaluation: accepted length (1 if no draft is ever accepted) and seconds."""
        if args.mtp_draft_prompts is None:
            return {}
        from megatron.core.utils import unwrap_model

        from megatron_mtp.decoding.engine import generate
        from megatron_mtp.decoding.live import LiveRunner, random_states_kept

        began = time.perf_counter()
        with random_states_kept():
            if self._live is None:
                self._live, self._prompts = LiveRunner(unwrap_model(model)[0], args), prompts_of(args)
            generated = generate(self._live.runner(), self._prompts, NEW_TOKENS, speculative=method_of(args))
        return {TAU: generated.stats.accepted_length, "drafting seconds": time.perf_counter() - began}


def method_of(args: Namespace) -> dict[str, Any]:
    """Return how to draft with a run's MTP layers or drafter: greedily, with as many tokens as in training."""
    if (kind := only_drafter(args)) is not None:
        return {"method": kind}
    if args.mtp_use_repeated_layer:
        return {"method": "mtp_eagle", "num_speculative_tokens": args.mtp_unroll or args.mtp_num_layers}
    return {"method": "mtp"}


def prompts_of(args: Namespace) -> list[list[int]]:
    """Return the token ids of the first prompts of the file. Raise ValueError if there are none."""
    file, *more = args.mtp_draft_prompts
    tokenizer = read_tokenizer(Path(args.tokenizer_model), args.trust_remote_code)
    prompts = read_prompts([], file, [], tokenizer)[: int(more[0]) if more else COUNT]
    if not prompts:
        raise ValueError(f"--mtp-draft-prompts: '{file}' has no prompts; give a file with some.")
    return prompts

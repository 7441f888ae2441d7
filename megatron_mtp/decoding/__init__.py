"""Speculative decoding: several tokens per forward pass of the trunk, with the modules as trained.

The Python API is `load_runner` and `generate`. They are imported on first use, because they need Megatron on a prepared
machine; the modules for drafts, sampling and verifiers do not.

    config.py            PROPOSERS, VERIFIERS and SpeculativeConfig: methods by name with their settings, as plain data
    sampling.py          logits to probabilities to tokens; penalties, log-probabilities, seeded random numbers
    draft.py             data passed between the parts of a step: Draft (a tree), Verdict, StepOutput, Round
    requests.py          messages to and from an engine: Request, Update, Load
    proposers/           drafting methods, behind one interface
    verifiers.py         acceptance rules
    method.py            a config from JSON: proposer, verifier, K
    alarm.py             a warning where drafts are accepted less often than was recorded
    auto_count.py        automatic K, including K = 0 where drafting does not pay off
    block_tables.py      slots of sequences in shared blocks of memory
    rows.py              rows of a forward pass: chains, trees, without padding; their positions and masks
    kv_cache.py          keys and values of a model's layers; all caches of an engine
    sequences.py         tensors of a batch of growing sequences
    block_manager.py     free blocks, and blocks with a prefix that sequences share
    batch.py             propose, verify and keep for sequences with the same method; ends at EOS, even inside a draft
    scheduler.py         what runs in a step: prompts, decoding sequences; preemption
    runner.py            a loaded model row by row: trunk, MTP layers, output layer
    backend.py           Modules, which runs rows through all layers; the table of backends
    dense_layer.py       a dense layer with little overhead between its products
    cached_attention.py  attention over the cache, including latent attention, replacing a trained model's
    recurrent_layers.py  Mamba-2 and Gated DeltaNet row by row, replacing a hybrid model's; states that can roll back
    experts.py           expert layers for few rows, without reading the routing back to the host
    graphs.py            steps as CUDA graphs, kept for later sequences
    engine.py            continuous batching: requests join and leave between steps; memory size; generate(): prompts
                         in, sequences and statistics out, on a temporary engine
    load.py              a checkpoint folder to a runner
    live.py              a runner for a model in training that shares its parameters
    update_weights.py    new weights for a running engine
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_mtp.decoding.engine import Generated, generate
    from megatron_mtp.decoding.load import load_runner

__all__ = ["Generated", "generate", "load_runner"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megatron_mtp.decoding import engine, load

    return getattr(load if name == "load_runner" else engine, name)

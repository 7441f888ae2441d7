"""Drafting: several tokens per forward of the trunk, with the modules as trained.

The Python API is `load_runner` and `generate`, which are looked up when asked for: they need Megatron on a prepared
machine, and the rules in this room (draft, sampling, verifiers) do not.

    config.py            PROPOSERS, VERIFIERS and SpeculativeConfig: methods by name with their settings, as plain data
    sampling.py          logits to probabilities to tokens; penalties, log-probabilities, random numbers by seed
    draft.py             what passes between the parts of a step: Draft (a tree), Verdict, StepOutput, Round
    requests.py          messages to and from an engine: Request, Update, Load
    proposers/           what drafts, by one interface
    verifiers.py         which drafts are accepted
    method.py            a config from JSON: proposer, verifier, K
    auto_count.py        automatic K, and K = 0 where drafting does not pay
    block_tables.py      slots of sequences in blocks of memory that they share
    rows.py              rows of a forward: chains, trees, without padding; their positions and masks
    kv_cache.py          keys and values of a model's layers; all caches of an engine
    sequences.py         the tensors of a batch of sequences while they grow
    block_manager.py     which blocks are free, and which hold a beginning that sequences share
    batch.py             propose, verify and keep for sequences that draft alike; one ends at EOS, also inside a draft
    scheduler.py         who runs in a step: prompts, sequences that are decoded, and those that are put back
    runner.py            a loaded model row by row: trunk, MTP layers, head
    backend.py           Modules, which runs rows through all layers; the table of backends
    dense_layer.py       a dense layer with little between its products
    cached_attention.py  attention over the cache, of latents too, in the place of a trained model's
    recurrent_layers.py  Mamba-2 and Gated DeltaNet row by row in the places of a hybrid's; states that are rolled back
    experts.py           layers of experts for few rows, without reading back where they go
    graphs.py            steps as CUDA graphs, kept for later sequences
    engine.py            continuous batching: requests join and leave between steps; the size of the memory;
                         generate(): prompts in, sequences and statistics out, by an engine of their own
    load.py              a checkpoint folder to a runner
    live.py              a runner of a model that goes on training, with its parameters
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

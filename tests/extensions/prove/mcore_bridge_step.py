"""A step of mcore-bridge's own model, as in ms-swift, on the CPU, written by the function of docs/extensions/prove.md.

    PYTHONPATH=.venv-stacks/ms_swift:.:tests/support python tests/extensions/prove/mcore_bridge_step.py FOLDER BATCH

BATCH is a kind of cases.py, optionally followed by --per-token for a per-token loss. Transformer Engine's modules are
those of te_names.py. The script prints the flags that describe the model.
"""

import sys
from typing import Any

import te_names
import torch
from own_step import write_step
from stack_worker import OFF

DEPTHS, LAYERS, HIDDEN, HEADS, GROUPS, FFN = 2, 2, 32, 4, 2, 64
FLAGS = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads {HEADS} --group-query-attention "
    f"--num-query-groups {GROUPS} --ffn-hidden-size {FFN} --mtp-num-layers {DEPTHS} --position-embedding-type rope "
    "--qk-layernorm --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
    "--hidden-dropout 0 --attention-dropout 0"
)


def model_of(vocabulary: int, positions: int, per_token: bool) -> Any:
    """Build a small Qwen3 with MTP layers in mcore-bridge."""
    from mcore_bridge import ModelConfig, get_mcore_model, hf_to_mcore_config
    from transformers import Qwen3Config

    described = Qwen3Config(
        num_hidden_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=HIDDEN // HEADS,
        intermediate_size=FFN,
        vocab_size=vocabulary,
        max_position_embeddings=positions,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=False,
    )
    fields = hf_to_mcore_config(described)
    own = {"mtp_num_layers": DEPTHS, "mtp_loss_scaling_factor": 0.1, "calculate_per_token_loss": per_token}
    [model] = get_mcore_model(ModelConfig(**{**fields, **OFF, **own}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2 + float("norm" in name))
    return model.train()


def main(folder: str, kind: str, per_token: bool) -> None:
    te_names.install()
    import mcore_bridge  # noqa: F401  # before the CPU stand-ins

    from megatron_mtp.megatron import cpu

    cpu.install()
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_mtp.extensions.prove.cases import batch_of
    from megatron_mtp.extensions.prove.shrink import POSITIONS, VOCAB

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    model, batch = model_of(VOCAB, POSITIONS, per_token), batch_of(kind, 0)
    assert batch.labels is not None
    given: dict[str, Any] = {"tokens": batch.tokens, "labels": batch.labels, "loss_mask": batch.mask}
    packed = {}
    if batch.held is not None and batch.true is not None:
        true, held = (torch.tensor(one, dtype=torch.int32) for one in (batch.true, batch.held))
        behind = (held, held) if batch.held != batch.true else (None, None)
        packed = {"packed_seq_params": PackedSeqParams("thd", true, true, *behind, POSITIONS, POSITIONS)}
        given |= {"cu_seqlens": true, "cu_seqlens_padded": held}
    labels = batch.labels.masked_fill(batch.mask == 0, -100)  # ms-swift's mark for positions without a loss
    losses = model(batch.tokens, batch.positions, None, labels=labels, loss_mask=torch.ones_like(labels), **packed)
    (losses * batch.mask / (1 if per_token else batch.mask.sum())).sum().backward()
    for weight in model.parameters():
        weight.grad /= batch.mask.sum() if per_token else 1  # Megatron does this at the end of a step
    write_step(model, [given], DEPTHS, folder)
    print(FLAGS, "--vocab-size", VOCAB, *(["--calculate-per-token-loss"] if per_token else []))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], "--per-token" in sys.argv)

"""Compares two steps of the user's own training script, on the CPU with mock data, with the reference."""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_mtp.extensions.prove import script_worker
from megatron_mtp.extensions.prove.grads import proof_of_steps
from megatron_mtp.extensions.prove.proving import Proof, environment_of
from megatron_mtp.extensions.prove.shrink import (
    EXPERT_FFN,
    EXPERTS,
    FFN,
    GROUPS,
    HEADS,
    HIDDEN,
    LATENT,
    LAYERS,
    POSITIONS,
    READ,
    VOCAB,
    Tiny,
    read,
    shrink,
)

SECONDS = 600
"""Seconds after which a script is killed."""

SIZES: dict[str, object] = {
    "--num-query-groups": GROUPS,
    "--num-experts": EXPERTS,
    "--moe-ffn-hidden-size": EXPERT_FFN,
    "--moe-shared-expert-intermediate-size": EXPERT_FFN,
    **{f"--{name.replace('_', '-')}": size for name, size in LATENT.items()},
}
"""Tiny values for flags that the launch line has."""

LEFT = re.compile(r"--bf16|--.*-parallel|--(micro|global)-batch-size|--kv-channels|--rope-type|--recompute-")
"""Flags of READ that are dropped for one process in float32."""

TRAINING = (
    "--train-iters 2 --micro-batch-size 2 --global-batch-size 6 --mock-data --tokenizer-type NullTokenizer "
    "--make-vocab-size-divisible-by 1 --transformer-impl local --attention-backend unfused --no-persist-layer-norm "
    "--distributed-backend gloo --eval-interval 1000 --eval-iters 0 --log-interval 1 --lr 1e-3 --min-lr 1e-4 "
    "--num-workers 0 --use-cpu-initialization --hidden-dropout 0 --attention-dropout 0 "
    "--no-gradient-accumulation-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-masked-softmax-fusion "
    "--no-rope-fusion"
).split()
"""Two steps of three microbatches, with Megatron's local layers."""


def proof_of_script(script: Path, words: Sequence[str], megatron: Path | None) -> Proof:
    """Judge two steps of a training script.

    Args:
        words: launch flags; those that do not affect the loss are dropped.
        megatron: folder that comes first in its module path.

    Raises:
        ValueError: the script is missing, fails, takes too long or trains no GPTModel.
    """
    if not script.is_file():
        raise ValueError(f"--script {script} is not a file; give your training script, such as pretrain_gpt.py.")
    tiny = shrink(words)
    if tiny.is_hybrid:
        raise ValueError(
            "--script judges GPT models, and the launch flags have the layers of a hybrid; leave out --script."
        )
    flags = [*_flags(words, tiny), *TRAINING]
    with tempfile.TemporaryDirectory(prefix="prove-") as folder:
        _run(script, flags, megatron, Path(folder))
        steps = sorted(Path(folder).glob("step-*"))
        if not steps:
            raise ValueError(f"--script {script} has taken no step of a GPTModel with MTP layers.")
        return proof_of_steps({f"{script.name}, step {number}": one for number, one in enumerate(steps, 1)}, flags)


def _flags(words: Sequence[str], tiny: Tiny) -> Iterator[str]:
    """Return the launch flags that affect the loss, with tiny sizes."""
    own: dict[str, object] = {
        "--num-layers": LAYERS,
        "--hidden-size": HIDDEN,
        "--ffn-hidden-size": FFN,
        "--num-attention-heads": HEADS,
        "--kv-channels": tiny.config["kv_channels"],
        "--mtp-num-layers": tiny.depths,
        "--vocab-size": VOCAB - 1,  # NullTokenizer adds an end-of-document token
        "--seq-length": POSITIONS,
        "--max-position-embeddings": POSITIONS,
        "--position-embedding-type": tiny.model["position_embedding"],
    }
    if tiny.config.get("multi_latent_attention"):
        own["--rope-type"] = "rope"
    if "num_moe_experts" in tiny.config:
        own |= {"--moe-router-topk": tiny.config["moe_router_topk"], "--moe-layer-freq": tiny.config["moe_layer_freq"]}
        own |= {"--moe-router-load-balancing-type": "none", "--moe-token-dispatcher-type": "allgather"}
    for flag, values in read(words).items():
        if flag in READ and flag not in own and not LEFT.match(flag):
            yield from (flag, str(SIZES[flag])) if flag in SIZES else (flag, *values)
    for flag, value in own.items():
        yield from (flag, str(value))


def _run(script: Path, flags: Sequence[str], megatron: Path | None, folder: Path) -> None:
    """Run the script, which saves its steps to a folder."""
    environment = environment_of(megatron, reads_package=True) | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
    }
    command = [sys.executable, "-P", script_worker.__file__, str(folder), str(script.absolute()), *flags]
    try:
        ended = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"--script {script} has not ended within {SECONDS} seconds, and was ended.") from error
    if ended.returncode:
        said = [
            line
            for line in ended.stderr.splitlines()
            if re.match(r"(\[rank0\]: )?[\w.]*(Error|Exception|Exit)\b", line)
        ]
        last = said or ended.stderr.strip().splitlines() or [f"exit status {ended.returncode}"]
        raise ValueError(f"--script {script} fails on the CPU with tiny sizes ({last[-1].strip()[:200]}).")

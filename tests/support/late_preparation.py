"""Train, save and resume with Megatron imported before or after `prepare()`; print metrics as JSON.

python late_preparation.py early|late FOLDER
"""

import json
import os
import pkgutil
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import megatron_mtp
from megatron_mtp.megatron import cpu
from megatron_mtp.megatron.runtime import prepare

RUN = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope --micro-batch-size 2 "
    "--global-batch-size 4 --lr 1e-2 --mtp-num-layers 2 --mock-data --num-workers 0 --tokenizer-type NullTokenizer "
    "--vocab-size 127 --eval-interval 100 --eval-iters 1 --log-interval 1 --use-distributed-optimizer "
    "--hidden-dropout 0.1 --attention-dropout 0.1 --save-interval 3 --override-opt-param-scheduler "
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --multi-latent-attention --q-lora-rank 16 "
    "--kv-lora-rank 12 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8 --qk-layernorm --no-rope-fusion"
).split()
"""Flags with latent attention and experts, which use most of Megatron."""
MEASURED = {"step seconds", "peak memory bytes"}


def import_everything() -> None:
    """Import every module of the package, and with them every Megatron module that it uses."""
    for module in pkgutil.walk_packages(megatron_mtp.__path__, "megatron_mtp."):
        if not module.name.endswith("__main__"):
            import_module(module.name)


def copies(originals: dict[int, str]) -> list[str]:
    """Return where Megatron's modules hold an original: as a name, in a tuple, as a default argument."""
    found = []
    for module in [module for name, module in sys.modules.items() if name.split(".")[0] == "megatron"]:
        for name, value in vars(module).items():
            values = value if isinstance(value, tuple) else (value,)
            found += [f"{module.__name__}.{name}" for one in values if id(one) in originals]
        for function in cpu._functions(module):
            given = function.__defaults__ or ()
            found += [f"{module.__name__}.{function.__qualname__}" for one in given if id(one) in originals]
    return sorted(set(found))


def learned(folder: Path) -> list[dict[str, Any]]:
    """Run three steps, save, and resume for two more steps, each run in a fork."""
    for steps in (3, 5):
        saved = ["--save", str(folder), "--load", str(folder), "--mtp-metrics-dir", str(folder)]
        if (process := os.fork()) == 0:
            train([*RUN, *saved, "--train-iters", str(steps)])
        assert os.waitpid(process, 0)[1] == 0
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: figure for name, figure in row.items() if name not in MEASURED} for row in rows]


def train(flags: list[str]) -> None:
    """Train. Never returns."""
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    from megatron_mtp.training.run import main

    MockGPTLowLevelDataset.size = 1_000  # as in forks of the tests' server
    status = 1
    try:
        sys.stdout = sys.stderr
        sys.argv = ["pretrain_gpt.py", *flags]
        main(sys.argv, on_cpu=True)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    kept = [getattr(torch, name) for name in cpu._FACTORIES] + [torch.compile, torch.cuda.FloatTensor]
    if sys.argv[1] == "late":
        import_everything()
    before = copies({id(one): "" for one in kept})
    prepare()
    figures = learned(Path(sys.argv[2]))
    print(json.dumps({"before": before, "after": copies({id(one): "" for one in kept}), "learned": figures}))

"""train --dry-run: a plan needs neither a GPU, nor GPU libraries, nor files on the cluster."""

import socket
import sys
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig
from run_flags import DEPTHS, MOCK, MODEL, ROPE, _in_no_job  # noqa: F401  # a fixture

from megatron_mtp.extensions.plan.dry_run import plan
from megatron_mtp.extensions.plan.elsewhere import OF_LIBRARIES, machine_of_the_job
from megatron_mtp.extensions.plan.memory import PARTS as HELD
from megatron_mtp.megatron.machine import transformer_engine_works
from megatron_mtp.training import checks

BATCH = f"{ROPE} --global-batch-size 8"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"
DELTA = (
    "--linear-conv-kernel-dim 4 --linear-key-head-dim 8 --linear-value-head-dim 8 --linear-num-key-heads 2 "
    "--linear-num-value-heads 4 --swiglu"
)
SPARSE = (
    "--multi-latent-attention --qk-layernorm --no-rope-fusion --q-lora-rank 8 --kv-lora-rank 8 --disable-bias-linear "
    "--dsa-indexer-n-heads 2 --dsa-indexer-head-dim 64 --dsa-indexer-topk 8 --v-head-dim 8 --qk-pos-emb-head-dim 8"
)


_all = partial(pytest.param, marks=pytest.mark.matrix)
"""A case that runs only with --all."""


@pytest.fixture(autouse=True)
def _job(monkeypatch: pytest.MonkeyPatch, megatron: None) -> Iterator[None]:
    """Restore process groups and the job environment that a plan sets."""
    import torch
    from megatron.core import parallel_state
    from megatron_single import join_world_of_one

    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "CUDA_GRAPHS_USE_NODE_PRIORITY", "NVTE_CPU_OFFLOAD_V1"):
        monkeypatch.delenv(name, raising=False)
    yield
    join_world_of_one()


def planned(flags: str, monkeypatch: pytest.MonkeyPatch, ranks: int = 8) -> list[str]:
    """Return the lines of a plan."""
    monkeypatch.setattr(sys, "argv", ["train", *MODEL.split(), *flags.split()])
    return plan(sys.argv, ranks).splitlines()


def trunk(lines: list[str]) -> str:
    """Return the line with the trunk's parameter count."""
    return next(line for line in lines if line.startswith("  trunk"))


def test_omitted_settings_are_fields_of_megatrons_config() -> None:
    assert OF_LIBRARIES.keys() <= {field.name for field in fields(TransformerConfig)}


@pytest.mark.parametrize(
    ("flags", "libraries"),
    [
        (f"{EXPERTS} --fp8-format hybrid --fp8-recipe blockwise --moe-router-padding-for-fp8", "Transformer Engine"),
        _all(f"{EXPERTS} --fp4-format e2m1", "Transformer Engine"),
        _all("--fine-grained-activation-offloading --offload-modules core_attn", "Transformer Engine"),
        _all(f"{EXPERTS} --moe-permute-fusion --moe-router-fusion --moe-grouped-gemm", "Transformer Engine"),
        _all(
            f"{EXPERTS} --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep --fp8-format hybrid",
            "Transformer Engine and DeepEP",
        ),
        _all("--log-max-attention-logit", None),
        _all("--cuda-graph-impl local", None),
        _all(f"{EXPERTS} --bf16 --moe-latent-size 16 --disable-bias-linear", None),
        _all("--non-persistent-ckpt-type local --non-persistent-local-ckpt-dir x", None),
    ],
)
def test_a_plan_needs_no_library_of_gpus(flags: str, libraries: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron checks the flags as on the job's machines; each of these failed for lack of a library here."""
    assert not transformer_engine_works()
    lines = planned(f"{BATCH} {MOCK} {DEPTHS} {flags}", monkeypatch)
    said = [line for line in lines if line.startswith("planned as for a machine with ")]
    assert said == ([] if libraries is None else [f"planned as for a machine with {libraries}"])
    assert "parameters: " in "\n".join(lines)


def test_stub_modules_are_removed_but_other_imports_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, other = "nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager", "colorsys"
    monkeypatch.delitem(sys.modules, other, raising=False)
    before = set(sys.modules)
    with machine_of_the_job():
        assert import_module(manager).LocalCheckpointManager
        import_module(other)
    assert sys.modules.keys() - before == {other}


@pytest.mark.parametrize(
    ("gpt", "pattern", "sizes"),
    [
        ("--experimental-attention-variant gated_delta_net --linear-attention-freq 2", "G-*-", DELTA),
        _all("--experimental-attention-variant dsa", "D-D-", SPARSE),
    ],
)
def test_experimental_attention_has_as_many_parameters_in_a_hybrid(
    gpt: str, pattern: str, sizes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with a GPT, which Megatron builds only with Transformer Engine's modules."""
    as_gpt = trunk(planned(f"{BATCH} {MOCK} {sizes} {gpt}", monkeypatch))
    _forget()
    assert as_gpt == trunk(planned(f"{BATCH} {MOCK} {sizes} --hybrid-layer-pattern {pattern}", monkeypatch))


def _forget() -> None:
    from forgotten_flags import forget

    forget()


def test_memory_of_a_drafter_is_that_of_its_counted_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = "--num-layers 4 --hidden-size 1024 --load /cluster/x --mtp-train-only --drafter eagle3"
    lines = planned(f"{BATCH} {MOCK} {flags}", monkeypatch)
    counted = int(next(line for line in lines if line.startswith("  depths")).split()[1].replace(",", ""))
    cells = lines[-1].split()
    assert cells[1 + HELD.index("MTP layers")] == f"{16 * counted / 2**30:.2f}"
    assert counted > 10_000_000


def test_a_layer_without_a_memory_formula_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = planned(f"{BATCH} {MOCK} {SPARSE} --hybrid-layer-pattern D-", monkeypatch)
    assert lines[-1].startswith("memory: --hybrid-layer-pattern has 'D'")


def test_cluster_files_are_skipped_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = (
        f"{BATCH} {DEPTHS} --tokenizer-type HuggingFaceTokenizer --tokenizer-model /cluster/Kimi-K2 --load=/cluster/x "
        "--mtp-train-only --mtp-draft-vocab-size 7 --data-path /cluster/data"
    )
    lines = planned(flags, monkeypatch)
    for named in (
        "--tokenizer-model /cluster/Kimi-K2",
        "--load /cluster/x",
        "--mtp-draft-vocab-size 7, which counts tokens of --data-path",
    ):
        assert f"not on this machine, and planned without: {named}" in lines
    assert "  --tokenizer-type HuggingFaceTokenizer" in lines
    assert lines[-1].startswith("data: --data-path: there is no dataset '/cluster/data'")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (f"{MOCK} --mtp-train-only", "--mtp-train-only was given with --load None, where there is no checkpoint of"),
        (f"{MOCK} --load /cluster/x --use-checkpoint-args", "--load /cluster/x is not on this machine; give the flags"),
    ],
)
def test_a_dry_run_rejects_what_the_job_would_reject(flags: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=says):
        planned(f"{BATCH} {DEPTHS} {flags}", monkeypatch)


@pytest.mark.parametrize(
    "tokenizer",
    [
        _all("HuggingFaceTokenizer --tokenizer-model /cluster/x"),
        _all("SentencePieceTokenizer --tokenizer-model /cluster/x"),
        "GPT2BPETokenizer --vocab-file /cluster/x --merge-file /cluster/y",
    ],
)
def test_without_a_tokenizer_the_size_of_the_vocabulary_is_needed(
    tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "getproxies", lambda: {})
    monkeypatch.setattr(socket, "getaddrinfo", _unknown)
    sizes = MODEL.replace("--tokenizer-type NullTokenizer --vocab-size 99", "")
    monkeypatch.setattr(sys, "argv", ["train", *f"{sizes} {BATCH} {MOCK} --tokenizer-type {tokenizer}".split()])
    with pytest.raises(ValueError, match="give --vocab-size, and the plan needs no tokenizer"):
        plan(sys.argv, 8)
    sys.argv += ["--vocab-size", "99"]
    assert "not on this machine, and planned without: " in plan(sys.argv, 8)


def _unknown(*_: object) -> None:
    raise OSError("Name or service not known")


def test_loading_from_an_empty_save_folder_is_not_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = f"--save {tmp_path}/x --load {tmp_path}/x --save-interval 1"
    assert not any("not on this machine" in line for line in planned(f"{BATCH} {MOCK} {DEPTHS} {saves}", monkeypatch))

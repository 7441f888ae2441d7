"""training/checks.py: what Megatron would silently accept, or abort on without an exception, is one sentence."""

import os
import platform
from argparse import ArgumentParser
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.training.arguments import add_megatron_arguments
from run_flags import DEPTHS, MOCK, ROPE, _in_no_job, refusal  # noqa: F401  # a fixture

from megatron_mtp.megatron.flags import RANGES
from megatron_mtp.megatron.machine import ALLOW_CPU, GIVEN_GPUS, check_device
from megatron_mtp.model.build import join_world
from megatron_mtp.spec.config import flag_of
from megatron_mtp.training import checks, run
from megatron_mtp.training.arguments import set_connections
from megatron_mtp.training.checks import check_hub, check_ranges

PATTERN = "--hybrid-layer-pattern"
HEADS = "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 8"
MAMBA = "--mamba-head-dim 8 --mamba-state-dim 8"


def test_every_flag_of_the_ranges_is_one_of_megatrons() -> None:
    """A misspelled name would never be checked."""
    known = {action.dest: action.option_strings for action in add_megatron_arguments(ArgumentParser())._actions}
    names = [name for _, _, named in RANGES for name in named.split()]
    assert len(names) == len(set(names))
    assert {name: flag_of(name) for name in names if flag_of(name) not in known.get(name, [])} == {}


@pytest.mark.parametrize(
    ("name", "number", "allowed"),
    [
        ("seq_length", 0, "1 or more"),
        ("eval_iters", -1, "0 or more"),
        ("loss_scale", 0.0, "a number above 0"),
        ("rotary_percent", float("nan"), "a number above 0, and at most 1"),
        ("clip_grad", float("nan"), "a number, 0 for no clipping"),
        ("sgd_momentum", 1.0, "a number from 0 to less than 1"),
    ],
)
def test_invalid_numbers_that_megatron_accepts_are_rejected(name: str, number: float, allowed: str) -> None:
    with pytest.raises(ValueError, match=f"^{flag_of(name)} is {number}; give {allowed}.$"):
        check_ranges(SimpleNamespace(**{name: number}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            f"{DEPTHS} --mtp-patience 3 --save here --save-interval 2 --save-retain-interval 9",
            "--save-retain-interval 9 was given with --mtp-patience, and would remove the best state",
        ),
        (f"{DEPTHS} {PATTERN} *-*-/*-", f"--mtp-num-layers is 2, but {PATTERN} *-*-/*- has 1 MTP layers"),
        (f"{DEPTHS} {PATTERN} *-*-", f"--mtp-num-layers is 2, but {PATTERN} *-*- has 0 MTP layers"),
        (f"{PATTERN} *-*-/*-/*E", f"{PATTERN} cannot be read: All MTP patterns must be identical"),
        (f"{PATTERN} *-X-/*-", f"{PATTERN} cannot be read: In main pattern, 'X' is not a valid layer symbol"),
        ("--hybrid-override-pattern *-", f"--hybrid-override-pattern is deprecated; give {PATTERN}"),
        ("--mtp-hybrid-override-pattern *-", f"--mtp-hybrid-override-pattern is deprecated; give {PATTERN}"),
        (f"{PATTERN} *E/*E", f"{PATTERN} has E, but --num-experts is missing; give it, or - for an MLP"),
        (f"{PATTERN} *G/*- {HEADS}", f"{PATTERN} has G, whose layers take SiLU for their convolution and gate"),
        (f"{PATTERN} *-/*- --use-rope-scaling", f"--use-rope-scaling was given with {PATTERN}"),
        (
            f"{PATTERN} *-/*- --overlap-moe-expert-parallel-comm",
            f"--overlap-moe-expert-parallel-comm was given with {PATTERN}, whose model has no plan",
        ),
        (f"{PATTERN} M-/*- {MAMBA} --reset-attention-mask", "recurrent layers of --hybrid-layer-pattern M-/*- take"),
        ("--chat x", "data comes from one source: give only one of --chat, --mock-data"),
        ("--show-example", "--show-example needs --chat"),
        ("--chat-mask-history", "--chat-mask-history was given without --chat, and data that is tokenized already"),
        ("--full-validation", "--full-validation works only with --multiple-validation-sets"),
        ("--data-path x", "data comes from one source: give only one of --chat, --mock-data"),
        (f"{DEPTHS} --mtp-mask-prompts", "--mtp-mask-prompts was given with --mock-data or chats"),
        (f"{DEPTHS} --seq-length 2", "--mtp-num-layers is 2 (--mtp-unroll None), but sequences of --seq-length 2 have"),
        ("--drafter eagle2 --load x", "EAGLE-2 is --drafter eagle, drafted with the method eagle_tree"),
        (
            "--drafter EAGLE-3 --load x",
            "domino, dspark, eagle, eagle3, peagle; did you mean eagle3?",
        ),
        (
            "--drafter lookahead --load x",
            "--drafter is 'lookahead'; choose one of dflash, dflash2, domino, dspark, eagle, eagle3, peagle.",
        ),
        ("--fp8-format hybrid", "--fp8-format is hybrid, which Megatron computes with Transformer Engine alone"),
    ],
)
def test_settings_that_would_be_silently_ignored_are_rejected(
    flags: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: without Transformer Engine, a run with --fp8-format silently trained in full precision."""
    assert says in refusal(f"{ROPE} {MOCK} {flags}", monkeypatch, capsys)


@pytest.mark.parametrize("name", ["/nowhere", "nobody/has-it"])
def test_a_tokenizer_that_cannot_be_looked_up_is_rejected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would retry for most of a minute, and print its attempts."""

    def unknown(*_: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr(checks, "getproxies", dict)
    monkeypatch.setattr(checks.socket, "getaddrinfo", unknown)
    with pytest.raises(ValueError, match="which is not a folder here, and the Hugging Face Hub cannot"):
        check_hub(SimpleNamespace(tokenizer_model=name, tokenizer_type="HuggingFaceTokenizer"))  # type: ignore[arg-type]
    check_hub(SimpleNamespace(tokenizer_model=name, tokenizer_type="NullTokenizer"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^--tokenizer-type is GPT2BPETokenizer, .* model gpt2"):
        check_hub(SimpleNamespace(tokenizer_model=None, tokenizer_type="GPT2BPETokenizer"))  # type: ignore[arg-type]


# --- the machine -----------------------------------------------------------------------------------------------------


@pytest.fixture
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*GIVEN_GPUS, "CUDA_DEVICE_MAX_CONNECTIONS", ALLOW_CPU):
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("_nothing_set")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CUDA_VISIBLE_DEVICES", "0"),
        ("CUDA_VISIBLE_DEVICES", "GPU-8f7d"),
        ("SLURM_JOB_GPUS", "0,1"),
        ("SLURM_GPUS_ON_NODE", "8"),
        ("SLURM_GPUS_PER_NODE", "h100:4"),
    ],
)
def test_a_rank_on_the_cpu_in_a_job_with_gpus_is_refused(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        run.fit_to_machine(["pretrain_gpt.py"], on_cpu=True)
    assert ended.value.code == 2
    said = f"error: rank 0 on {platform.node()} finds no CUDA device, but {name} is {value}; "
    assert said in capsys.readouterr().err
    check_device(on_cpu=False)
    monkeypatch.setenv("MEGATRON_MTP_ALLOW_CPU", "1")
    check_device(on_cpu=True)


@pytest.mark.usefixtures("_nothing_set")
def test_a_drafting_rank_selects_its_device_before_nccl_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise NCCL would put all ranks of a node on the first device."""
    taken: list[Any] = []
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    monkeypatch.setattr("torch.cuda.set_device", taken.append)
    monkeypatch.setattr("torch.distributed.init_process_group", taken.append)
    monkeypatch.setattr("megatron.core.parallel_state.model_parallel_is_initialized", lambda: True)
    monkeypatch.setenv("RANK", "11")
    monkeypatch.setenv("LOCAL_RANK", "3")
    join_world()
    assert taken == [3, "gloo"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ValueError, match=r"rank 11 on .* finds no CUDA device"):
        join_world()
    assert len(taken) == 2


@pytest.mark.usefixtures("_nothing_set")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CUDA_VISIBLE_DEVICES", ""),
        ("CUDA_VISIBLE_DEVICES", "-1"),
        ("CUDA_VISIBLE_DEVICES", "NoDevFiles"),
        ("SLURM_GPUS_ON_NODE", "0"),
        ("SLURM_CPUS_ON_NODE", "8"),
    ],
)
def test_a_job_without_gpus_runs_on_the_cpu(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    check_device(on_cpu=True)


@pytest.mark.usefixtures("_nothing_set")
@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("--tensor-model-parallel-size 2", "1"),
        ("--context-parallel-size=4", "1"),
        ("--tensor-model-parallel-size 1 --context-parallel-size 2", "1"),
        ("--tensor-model-parallel-size 1", None),
        ("--pipeline-model-parallel-size 2", None),
        ("--tensor-model-parallel-size 2 --use-megatron-fsdp", None),
    ],
)
def test_megatrons_required_number_of_cuda_connections_is_set(
    words: str, value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "set_machine_flags", lambda argv, on_cpu: None)
    run.fit_to_machine(["pretrain_gpt.py", *words.split()], on_cpu=False)
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == value


@pytest.mark.usefixtures("_nothing_set")
def test_a_users_number_of_cuda_connections_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    set_connections(["--tensor-model-parallel-size", "2"])
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"

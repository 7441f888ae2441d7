"""`generate_gpt.py` as a user runs it: on a newly trained checkpoint, with one process and two, and with bad input."""

import json
import sys
from pathlib import Path
from typing import Any

import launch
import pytest
from tiers import tiered

PROMPTS = ["--prompt-ids", "1,2,3", "--prompt-ids", "9,8", "--max-new-tokens", "24"]
WORKER = Path(__file__).parents[1] / "support" / "generate_worker.py"
RANKS_WORKER = Path(__file__).parents[1] / "support" / "drafting_ranks_worker.py"
MTP = ["--speculative-config", '{"method": "mtp"}']


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two MTP layers for six steps and save the last."""
    folder = tmp_path_factory.mktemp("trained")
    steps = f"--train-iters 6 --eval-interval 6 --eval-iters 1 --save-interval 6 --save {folder / 'checkpoint'} "
    steps += f"--mtp-metrics-dir {folder}"
    launch.run(launch.pretrain(*steps.split(), "--ckpt-format", "torch_dist"), folder / "log")
    return folder / "checkpoint"


def generate(*flags: str, processes: int = 1) -> launch.Command:
    if processes == 1:
        return launch.python("generate_gpt.py", *flags)
    return launch.torchrun(processes, "generate_gpt.py", *flags)


def printed(command: launch.Command | list[str], log: Path) -> dict[str, Any]:
    """Return the JSON object, which must be all of standard output."""
    return json.loads(launch.output(command, log))


def test_drafting_matches_plain_decoding_and_reports_its_cost(checkpoint: Path, tmp_path: Path) -> None:
    flags = ["--load", str(checkpoint), *PROMPTS, *MTP, "--batch-size", "2", "--compare", "--json"]
    one = printed(generate(*flags, "--record", str(tmp_path / "run")), tmp_path / "log")
    assert [len(ids) for ids in one["token_ids"]] == [24, 24]
    assert one["same_tokens"] is True
    assert one["text"] is None
    said = ("method", "num_speculative_tokens", "verifier", "lossless")
    assert [one[name] for name in said] == ["mtp", 2, "greedy", True]
    assert one["target_forwards"] + one["accepted"] == 48
    assert len(one["accepted_per_position"]) == 2
    assert one["accepted_length"] == pytest.approx(48 / one["target_forwards"], abs=1e-3)
    drafts = json.loads((tmp_path / "run" / "drafts.json").read_text())
    assert (drafts["config"]["method"], drafts["pieces"]) == ("mtp", {})
    assert drafts["figures"]["drafted"] == one["drafted"]
    assert [",".join(map(str, text["prompt"])) for text in drafts["texts"]] == PROMPTS[1:4:2]
    steps = [text["steps"] for text in drafts["texts"]]
    assert [[token for step in text for token in step["emitted"]] for text in steps] == one["token_ids"]
    assert sum(step["accepted"] for text in steps for step in text) == one["accepted"]
    assert sum(token is not None for text in steps for step in text for token in step["drafted"]) == one["drafted"]
    assert one["energy_joules_per_token"] is not None or one["energy_reason"]
    two = printed(generate(*flags, processes=2), tmp_path / "log2")
    assert two["token_ids"] == one["token_ids"]
    assert two["same_tokens"] is True


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(("mla-moe", "M*EG/MG*/MG*"), marks=pytest.mark.matrix),
        ("eagle3-own-head", "dspark"),
        pytest.param(("gqa", "mha-tied-layernorm", "moe", "mla"), marks=pytest.mark.matrix),
        pytest.param(("eagle3", "eagle", "dflash", "dspark-own-head"), marks=pytest.mark.matrix),
    ],
    ids=["latent attention and a hybrid", "drafters", "others", "other drafters"],
)
def test_two_ranks_draft_the_same_tokens_as_one(kinds: tuple[str, ...], tmp_path: Path) -> None:
    """All methods output the plain text of the rank that saved the model, and draft the same tokens on two ranks."""
    log = launch.run(launch.torchrun(2, RANKS_WORKER, str(tmp_path), *kinds), tmp_path / "log")
    same = json.loads(next(line for line in log.splitlines() if line.startswith('{"')))
    assert tuple(same) == kinds
    for kind, outcomes in same.items():
        assert outcomes == [True] * 7, kind


EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 --moe-token-dispatcher-type {dispatcher} "
    "--moe-router-load-balancing-type none --train-iters 2 --eval-interval 2 --eval-iters 1 --save-interval 2"
)


def of_experts(folder: Path, dispatcher: str = "alltoall") -> Path:
    """Train two MTP layers with experts for two steps."""
    flags = EXPERTS.format(dispatcher=dispatcher).split()
    saving = ["--ckpt-format", "torch_dist", "--save", str(folder / "experts")]
    launch.run(launch.pretrain(*flags, *saving), folder / "log")
    return folder / "experts"


SPREAD = ["--expert-model-parallel-size", "2"]


@pytest.mark.parametrize("dispatcher", tiered(["alltoall", "allgather"], ("alltoall",)))
def test_experts_spread_over_two_ranks_emit_what_one_process_does(dispatcher: str, tmp_path: Path) -> None:
    flags = ["--load", str(of_experts(tmp_path, dispatcher)), *PROMPTS, "--max-new-tokens", "8", "--json"]
    flags += ["--batch-size", "2"]
    one = printed(generate(*flags), tmp_path / "log1")
    two = printed(generate(*flags, *MTP, *SPREAD, "--compare", processes=2), tmp_path / "log2")
    assert two["same_tokens"] is True
    assert two["token_ids"] == one["token_ids"]
    assert two["drafted"] > 0


@pytest.mark.matrix
def test_experts_spread_over_two_ranks_sample_what_one_process_does(tmp_path: Path) -> None:
    flags = ["--load", str(of_experts(tmp_path)), *PROMPTS, "--json", "--temperature", "1"]
    one = printed(generate(*flags), tmp_path / "log1")
    assert printed(generate(*flags, *SPREAD, processes=2), tmp_path / "log2")["token_ids"] == one["token_ids"]


def test_experts_that_cannot_be_spread_are_refused_by_name(checkpoint: Path, tmp_path: Path) -> None:
    flags = ["--load", str(checkpoint), *PROMPTS]
    for number, (size, ranks, said) in enumerate(
        (
            ("2", 1, "--expert-model-parallel-size is 2, and there are 1 ranks (torchrun --nproc-per-node); give a"),
            ("2", 2, "has no experts; give a number that divides them."),
            ("0", 1, "--expert-model-parallel-size is 0; give 1 or more."),
        )
    ):
        log = tmp_path / f"log{number}"
        command = generate(*flags, "--expert-model-parallel-size", size, processes=ranks)
        assert launch.start(command, log).wait(launch.TIMEOUT) == 2
        assert said in log.read_text()


@pytest.mark.matrix
def test_a_hybrid_of_two_pipeline_stages_drafts_on_one(tmp_path: Path) -> None:
    """Greedy output is the plain text; also sampled in bfloat16, with prompts of mixed lengths. Rejects trees."""
    pattern = "--hybrid-layer-pattern M-|*-/M-/M- --mamba-head-dim 16 --mamba-state-dim 16 --mamba-num-groups 2"
    steps = f"--train-iters 2 --eval-interval 2 --eval-iters 1 --save-interval 2 --save {tmp_path / 'checkpoint'}"
    stages = "--pipeline-model-parallel-size 2 --ckpt-format torch_dist"
    launch.run(launch.pretrain(*f"{pattern} {steps} {stages}".split(), processes=2), tmp_path / "log")
    flags = ["--load", str(tmp_path / "checkpoint"), *PROMPTS, "--batch-size", "2", "--json"]
    drafted = printed(generate(*flags, *MTP, "--compare"), tmp_path / "log2")
    assert drafted["same_tokens"] is True
    assert drafted["drafted"] > 0
    sampled = printed(generate(*flags, *MTP, "--temperature", "1", "--dtype", "bfloat16"), tmp_path / "log3")
    assert [len(ids) for ids in sampled["token_ids"]] == [24, 24]
    tree = generate(*flags, "--speculative-config", '{"method": "mtp_tree"}')
    assert launch.start(tree, tmp_path / "log4").wait(launch.TIMEOUT) == 2
    assert "'mtp_tree' runs rows that branch off, which" in (tmp_path / "log4").read_text()


@pytest.mark.matrix
def test_a_model_of_uneven_pipeline_stages_drafts_on_one_and_on_two_ranks(tmp_path: Path) -> None:
    steps = f"--train-iters 2 --eval-interval 2 --eval-iters 1 --save-interval 2 --save {tmp_path / 'checkpoint'}"
    stages = "--num-layers 3 --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1"
    launch.run(launch.pretrain(*f"{steps} {stages}".split(), processes=2), tmp_path / "log")
    flags = ["--load", str(tmp_path / "checkpoint"), *PROMPTS, *MTP, "--compare", "--json"]
    one, two = (printed(generate(*flags, processes=ranks), tmp_path / f"log{ranks}") for ranks in (1, 2))
    assert one["same_tokens"] is two["same_tokens"] is True
    assert one["token_ids"] == two["token_ids"]


def test_generate_prints_a_table_of_figures(checkpoint: Path, tmp_path: Path) -> None:
    auto = '{"method": "mtp_eagle", "num_speculative_tokens": "auto"}'
    flags = ["--load", str(checkpoint), "--prompt-ids", "1,2,3", "--speculative-config", auto, "--temperature", "1"]
    log = launch.run(generate(*flags, "--max-new-tokens", "40", "--dtype", "bfloat16"), tmp_path / "log")
    for row in ("acceptance at position 1", "accepted length", "target forwards", "tokens per second"):
        assert row in log


BAD = {
    "method": (["--speculative-config", '{"method": "medusa"}'], "choose one of mtp, mtp_eagle"),
    "key": (["--speculative-config", '{"method": "mtp", "k": 2}'], "there is no key 'k'; known are method, num_spec"),
    "too many": (
        ["--speculative-config", '{"method": "mtp_eagle", "num_speculative_tokens": 16}'],
        "is 16, above the limit of 15; give fewer",
    ),
    "draft model": (
        ["--speculative-config", '{"method": "draft_model", "num_speculative_tokens": 2, "model": "/nowhere"}'],
        "speculative config: model: /nowhere",
    ),
    "depths": (["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}'], "or choose mtp_eagle"),
    "temperature": (["--temperature", "-1"], "--temperature is -1.0; give 0 (greedy) or more."),
    "seed": (["--seed", str(10**20)], "which 64 bits do not hold for every prompt; give a smaller one."),
    "stop": (["--stop", ""], "--stop is empty; give the text to end after."),
    "file": (["--prompt-file", "/nowhere.txt"], "'/nowhere.txt' cannot be read"),
    "positions": (["--prompt-ids", ",".join(["1"] * 64)], "has 64 tokens, and the model has 64 positions"),
    "empty": (["--prompt-ids", ""], "prompt 1 is empty"),
    "text": (["--prompt", "hello"], "names no tokenizer"),
    "checkpoint": (["--load", "/nowhere"], "--load: /nowhere does not exist; give a folder that a run"),
}


def test_bad_input_is_rejected_with_a_clear_error(checkpoint: Path, tmp_path: Path) -> None:
    alone = ("file", "empty", "text")  # here the prompt itself is wrong
    commands = [
        ["--load", str(checkpoint), *([] if name in alone else PROMPTS), *flags] for name, (flags, _) in BAD.items()
    ]
    log = launch.run(launch.python(WORKER, json.dumps(commands)), tmp_path / "log")
    for (_, said), outcome in zip(BAD.values(), json.loads(log.splitlines()[-1]), strict=True):
        assert outcome["status"] == 2
        assert outcome["said"].count("generate_gpt.py: error: ") == 1
        assert said in outcome["said"]


def evaluate(*flags: str) -> list[str]:
    return [sys.executable, "-m", "megatron_mtp", "evaluate", *flags]


def test_evaluate_matches_the_evaluation_during_training(checkpoint: Path, tmp_path: Path) -> None:
    """On the training run's test data; its last row must be repeated."""
    data = "--mock-data --split 969,30,1 --train-iters 6 --eval-interval 6 --eval-iters 1"
    flags = ["--load", str(checkpoint), *data.split(), "--micro-batch-size", "2", "--global-batch-size", "4"]
    answer = printed(evaluate(*flags, "--json"), tmp_path / "log")
    rows = [json.loads(line) for line in (checkpoint.parent / "metrics.jsonl").read_text().splitlines()]
    *_, last = (row for row in rows if row["split"] != "training")
    assert answer == {"load": str(checkpoint), **last}
    shown = launch.output(evaluate(*flags), tmp_path / "log")
    assert f"length: {answer['expected accepted length']:.3f} tokens" in shown.splitlines()[-1]
    assert shown.startswith("on 4 sequences of ")


def test_evaluate_of_a_text_needs_a_tokenizer(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("hello")
    process = launch.start(evaluate("--load", str(checkpoint), "--text", str(tmp_path)), tmp_path / "log")
    assert process.wait(launch.TIMEOUT) == 2
    assert "evaluate: error: --load is " in (tmp_path / "log").read_text()
    assert "names no tokenizer that is there; give --tokenizer-model." in (tmp_path / "log").read_text()


def test_bad_input_ends_the_command_with_status_2(tmp_path: Path) -> None:
    process = launch.start(generate("--load", "/nowhere", *PROMPTS), tmp_path / "log")
    assert process.wait(launch.TIMEOUT) == 2
    assert "Traceback" not in (tmp_path / "log").read_text()

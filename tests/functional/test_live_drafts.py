"""--mtp-draft-prompts: acceptance with the weights of a run, which continues as without the flag."""

import json
from pathlib import Path

import launch
import pytest
from parrot import tokenizer_in
from tiers import tiered

from megatron_mtp.cli.live_drafts import NEW_TOKENS, TAU
from megatron_mtp.cli.preprocess import main as preprocess
from megatron_mtp.decoding.engine import generate
from megatron_mtp.decoding.load import load_runner
from megatron_mtp.megatron.runtime import prepare

prepare()

TEXT = "one two three four five six seven eight nine ten "
HEADS = {
    "layers": "--mtp-num-layers 2",
    "passes": "--mtp-num-layers 1 --mtp-use-repeated-layer --mtp-unroll 3 --untie-embeddings-and-output-weights",
    "hybrid": "--hybrid-layer-pattern M*-/*- --mamba-state-dim 16 --mamba-head-dim 16",
}
METHODS = {
    "layers": {"method": "mtp"},
    "hybrid": {"method": "mtp"},
    "passes": {"method": "mtp_eagle", "num_speculative_tokens": 3},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder with a tokenizer, a repetitive corpus, and prompts from it."""
    folder = tmp_path_factory.mktemp("data")
    tokenizer_in(folder / "tokenizer")
    (folder / "text.jsonl").write_text(f"{json.dumps({'text': TEXT * 20})}\n" * 20)
    (folder / "prompts.jsonl").write_text("".join(f"{json.dumps({'prompt': TEXT[n:20]})}\n" for n in range(0, 12, 2)))
    words = [
        "--input",
        folder / "text.jsonl",
        "--tokenizer",
        folder / "tokenizer",
        "--output-prefix",
        folder / "corpus",
    ]
    assert preprocess([*map(str, words), "--workers", "1"], "preprocess") == 0
    return folder


def train(data: Path, folder: Path, heads: str, *flags: str, ranks: int = 1) -> str:
    given = [word for word in launch.PLAIN_RUN if word not in ("--mock-data", "NullTokenizer", "--vocab-size", "127")]
    given[given.index("--tokenizer-type") + 1 : given.index("--tokenizer-type") + 1] = ["HuggingFaceTokenizer"]
    given[given.index("--max-position-embeddings") + 1] = "256"
    if "--hybrid-layer-pattern" in HEADS[heads]:
        at = given.index("--num-layers")
        del given[at : at + 2]
    words = f"--tokenizer-model {data}/tokenizer --data-path {data}/corpus --split 80,20,0 --train-iters 40".split()
    words += f"--eval-interval 20 --eval-iters 1 --lr 5e-3 --mtp-metrics-dir {folder} --log-interval 10".split()
    words += f"--hidden-dropout 0.1 {HEADS[heads]}".split()
    command = launch.Command("pretrain_gpt.py", (*given, *words, *flags), ranks)
    return launch.run(command, folder.with_suffix(".log"))


def rows(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in launch.MEASURED} for line in lines]


@pytest.mark.parametrize("heads", tiered(["layers", "passes", "hybrid"], ["layers"]))
def test_live_drafting_measures_saved_weights_without_side_effects(heads: str, data: Path, tmp_path: Path) -> None:
    saved = f"--save {tmp_path / 'saved'} --save-interval 20".split()
    log = train(data, tmp_path / "with", heads, "--mtp-draft-prompts", f"{data}/prompts.jsonl", "4", *saved)
    found, lines = rows(tmp_path / "with"), (data / "prompts.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    lengths = []
    for row in found:
        if row["split"] != "validation":
            assert TAU not in row
            continue
        runner = load_runner(tmp_path / "saved" / f"iter_{row['iteration']:07}")
        tokenizer = tokenizer_in(tmp_path / "tokenizer")
        ids = [tokenizer(prompt, add_special_tokens=False).input_ids for prompt in prompts[:4]]
        drafted = generate(runner, ids, NEW_TOKENS, speculative=METHODS[heads])
        assert row.pop(TAU) == drafted.stats.accepted_length
        assert f"{TAU}: {drafted.stats.accepted_length:.3f}" in log
        row.pop("drafting seconds")
        lengths.append(drafted.stats.accepted_length)
    assert len(lengths) == 2
    assert lengths[1] > 1.5
    train(data, tmp_path / "without", heads)
    assert rows(tmp_path / "without") == found


@pytest.mark.matrix
def test_tensor_parallel_ranks_measure_the_same_accepted_length(data: Path, tmp_path: Path) -> None:
    flags = ["--mtp-draft-prompts", f"{data}/prompts.jsonl"]
    train(data, tmp_path / "one", "layers", *flags)
    train(
        data, tmp_path / "two", "layers", *flags, *"--tensor-model-parallel-size 2 --sequence-parallel".split(), ranks=2
    )
    one, two = (rows(tmp_path / name)[-1][TAU] for name in ("one", "two"))
    assert one > 1.5
    assert two == pytest.approx(one, abs=0.3)


def test_drafting_on_ranks_that_share_no_model_is_rejected(data: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as end:
        train(data, tmp_path / "run", "layers", "--mtp-draft-prompts", f"{data}/prompts.jsonl", ranks=2)
    said = "on 2 ranks with --tensor-model-parallel-size 1, and drafts only on ranks that"
    assert said in str(end.value)

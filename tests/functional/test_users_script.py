"""A user's own `pretrain_gpt.py` gets our MTP layers by two changed lines, and trains what ours trains.

Or it keeps Megatron's model, to which the patch of integrations/ attaches a layer.
"""

import difflib
import re
import subprocess
from pathlib import Path

import launch
import pytest
from stack_rows import (
    LENGTH,
    RATE,
    ROWS,
    SEED,
    SPLIT,
    STEPS,
    VOCABULARY,
    accepted,
    accepted_by_transformers,
    write_corpus,
)

from megatron_mtp.checkpoint.convert.export_hf import mcore_to_hf
from megatron_mtp.checkpoint.convert.hf_form import form_of
from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
from megatron_mtp.checkpoint.convert.stream import Options
from megatron_mtp.megatron.checkpoint.reader import DistReader

SCRIPT = (Path(__file__).parents[1] / "support" / "users_pretrain_gpt.py").read_text(encoding="utf-8")
LAST_IMPORT = "from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage\n"
IMPORT = "from megatron_mtp.training.megatron_lm import gpt_config_from_args, parse_and_validate_args, pretrain\n"
STEP = "        forward_step,\n"
RUN = "--train-iters 3 --log-interval 1 --eval-interval 2 --eval-iters 1".split()


def with_our_depths() -> str:
    """Return the user's script with the two lines of docs/guides/from_megatron_lm.md."""
    return SCRIPT.replace(LAST_IMPORT, LAST_IMPORT + IMPORT).replace(STEP, "")


def test_the_two_changed_lines_are_on_the_page() -> None:
    changed = difflib.ndiff(SCRIPT.splitlines(), with_our_depths().splitlines())
    lines = [line for line in changed if line[0] in "+-"]
    assert lines == [f"+ {IMPORT.strip()}", f"- {STEP.rstrip()}"]
    page = (launch.ROOT / "docs/guides/from_megatron_lm.md").read_text(encoding="utf-8")
    assert f"+{IMPORT}" in page
    assert f"-{STEP}" in page


@pytest.mark.parametrize(
    ("processes", "flags"),
    [pytest.param(1, "", marks=pytest.mark.matrix), (2, "--pipeline-model-parallel-size 2")],
)
def test_a_users_script_trains_as_ours_does(processes: int, flags: str, tmp_path: Path) -> None:
    script = tmp_path / "pretrain_gpt.py"
    script.write_text(with_our_depths(), encoding="utf-8")
    given = [*launch.TINY_RUN, *RUN, *flags.split(), "--mtp-metrics-dir"]
    started = {}
    for name, file, more in (("ours", "pretrain_gpt.py", []), ("theirs", script, ["--users-greeting", "us"])):
        arguments = [*given, str(tmp_path / name), *more]
        command = launch.python(file, *arguments) if processes == 1 else launch.torchrun(processes, file, *arguments)
        started[name] = launch.start(command, tmp_path / f"{name}.log")
    printed = {name: launch.finish(process, tmp_path / f"{name}.log") for name, process in started.items()}
    assert "the user's script greets us" in printed["theirs"]
    assert printed["theirs"].count("expected accepted length") == printed["ours"].count("expected accepted length") > 0
    losses = launch.learned(tmp_path / "ours")
    assert list(losses) == [1, 2, 3]
    assert losses[1].keys() == {"lm loss", "mtp_1 loss", "mtp_2 loss", "learning rate", "grad norm"}
    assert launch.learned(tmp_path / "theirs") == losses


ON_CPU = (
    "--transformer-impl local --distributed-backend gloo --no-gradient-accumulation-fusion --no-persist-layer-norm "
    "--no-masked-softmax-fusion --no-rope-fusion --no-bias-dropout-fusion --no-bias-swiglu-fusion"
).split()
PREPARED = "from megatron_mtp.megatron.runtime import prepare\n\nprepare()\n"
"""Code that this machine needs because it has no GPU."""


MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 64 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--hidden-dropout 0 --attention-dropout 0"
).split()
ROWS_OF_CORPUS = (
    f"--seed {SEED} --split {SPLIT} --seq-length {LENGTH} --micro-batch-size {ROWS // 2} --global-batch-size {ROWS} "
    f"--tokenizer-type NullTokenizer --vocab-size {VOCABULARY + 1} --num-workers 0 --lr-decay-style constant "
    "--make-vocab-size-divisible-by 1 --weight-decay 0 --adam-beta2 0.999 --log-interval 1 --eval-iters 1"
).split()
LINE = (5, 7)
"""Factor and constant of the sequences."""


@pytest.mark.matrix
def test_the_patch_attaches_a_layer_that_drafts_as_that_of_our_trainer(tmp_path: Path) -> None:
    """Megatron's model with data parallelism of two, and `megatron-mtp train` from the same initial weights."""
    script, patch = tmp_path / "pretrain_gpt.py", launch.ROOT / "integrations" / "megatron_lm.patch"
    script.write_text(SCRIPT, encoding="utf-8")
    subprocess.run(["git", "apply", patch], cwd=tmp_path, check=True)
    script.write_text(PREPARED + script.read_text(encoding="utf-8"), encoding="utf-8")
    corpus = write_corpus(tmp_path / "rows", LINE)

    def trained(name: str, file: str | Path, steps: int, rate: float, *flags: str) -> tuple[Path, list[float]]:
        """Return the checkpoint, and the trunk's loss of every step."""
        ends = f"--train-iters {steps} --save-interval {steps} --eval-interval {steps} --lr {rate}".split()
        paths = ["--data-path", str(corpus), "--save", str(tmp_path / name)]
        command = launch.torchrun(2, file, *ROWS_OF_CORPUS, *ends, *paths, *flags)
        printed = launch.run(command, tmp_path / f"{name}.log")
        return tmp_path / name, [float(each) for each in re.findall(r"lm loss: (\S+) ", printed)]

    start, _ = trained("start", script, 1, 0.0, *MODEL, *ON_CPU)
    theirs, losses = trained("theirs", script, STEPS, RATE, *MODEL, *ON_CPU)
    metrics = tmp_path / "metrics"
    given = f"--load {start} --finetune --use-checkpoint-args --no-load-optim --no-load-rng --mtp-num-layers 1".split()
    weighted = ["--mtp-loss-scaling-factor", "0.1", "--mtp-metrics-dir", str(metrics)]
    ours, _ = trained("ours", "pretrain_gpt.py", STEPS, RATE, *given, *weighted)
    assert any(key.startswith("mtp.layers.0.transformer_layer.self_attention") for key in DistReader(theirs).keys)
    expected = [step["lm loss"] for step in launch.learned(metrics).values()]
    assert len(losses) == len(expected) == STEPS
    assert [losses[0], losses[-1]] == pytest.approx([expected[0], expected[-1]], rel=1e-4)
    assert losses[-1] < losses[0] / 2
    quiet = Options(quiet=True, workers=1)
    mcore_to_hf(theirs, tmp_path / "hf", quiet, form_of(theirs))
    hf_to_mcore(tmp_path / "hf", tmp_path / "back", quiet)
    drafts = [accepted(checkpoint, LINE) for checkpoint in (tmp_path / "back", ours)]
    print(drafts, accepted_by_transformers(tmp_path / "hf", LINE))
    assert drafts[0] == drafts[1] == accepted_by_transformers(tmp_path / "hf", LINE) > 0

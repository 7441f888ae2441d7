"""Training in bfloat16 with float32 master weights, compared with the same training in float32."""

from pathlib import Path

import launch
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

STEPS = 50
LOSSES = ("lm loss", "mtp_1 loss", "mtp_2 loss")
COMMON = "--lr 5e-3 --log-interval 1 --eval-interval 100 --eval-iters 0".split()


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the weights that both runs start from: drawn in bfloat16 they would differ."""
    folder = tmp_path_factory.mktemp("start")
    command = launch.pretrain(*COMMON, *f"--train-iters 1 --save-interval 1 --save {folder}/saved".split())
    launch.run(command, folder / "log")
    return folder / "saved"


def losses(folder: Path) -> torch.Tensor:
    """Return losses of trunk and MTP layers at every step, [steps, 3]."""
    return torch.tensor([[row[name] for name in LOSSES] for row in launch.learned(folder).values()])


def dtypes(checkpoint: Path) -> dict[str, torch.dtype]:
    entries = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    return {name: entry.properties.dtype for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


@pytest.mark.matrix
def test_bfloat16_follows_float32(start: Path, tmp_path: Path) -> None:
    flags = f"--train-iters {STEPS} --load {start} --finetune --save-interval {STEPS}".split()
    started = {}
    for name, precision in {"float32": [], "bfloat16": ["--bf16"]}.items():
        folder = tmp_path / name
        folder.mkdir()
        own = ["--save", f"{folder}/saved", "--mtp-metrics-dir", str(folder), *precision]
        started[name] = launch.start(launch.pretrain(*COMMON, *flags, *own), folder / "log")
    for name, process in started.items():
        launch.finish(process, tmp_path / name / "log")

    float32, bfloat16 = losses(tmp_path / "float32"), losses(tmp_path / "bfloat16")
    assert float32.shape == (STEPS, len(LOSSES))
    assert (float32[-1] < 0.2 * float32[0]).all(), "nothing was learned that could differ"
    assert (bfloat16 - float32).abs().max() <= 2e-2
    assert (bfloat16 != float32).any()

    stored = dtypes(tmp_path / "bfloat16" / "saved" / f"iter_{STEPS:07d}")
    masters = {name for name in stored if name.startswith("optimizer.state.fp32_param.")}
    assert {stored[name] for name in masters} == {torch.float32}
    assert {name.removeprefix("optimizer.state.fp32_param.") for name in masters} == {
        name for name, dtype in stored.items() if dtype == torch.bfloat16
    }

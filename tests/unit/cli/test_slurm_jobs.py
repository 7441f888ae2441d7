"""The jobs of scripts/slurm without SLURM: rendezvous, copies, sweeps, containers, signals. Nothing loads Megatron."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from cluster import JOBS, RECIPES, ROOT, Cluster
from tiers import tiered

from megatron_mtp.cli.attach_steps import STEPS

NODE = JOBS / "node.sh"
SCRIPTS = sorted([*(ROOT / "scripts").rglob("*.sh"), *JOBS.glob("*.sbatch"), *ROOT.glob(".ci/run")])
SHELLCHECK = Path(sys.executable).with_name("shellcheck")


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_ranks_meet_at_the_first_node(cluster: Cluster) -> None:
    cluster.submit("pretrain", "tiny", "--lr", "5e-4")
    assert cluster.given("scontrol")[:3] == ["show", "hostnames", "node[7-8]"]
    words = cluster.given()
    meeting = {"--nodes": "2", "--nnodes": "2", "--nproc-per-node": "4", "--master-addr": "node7"}
    assert {flag: value(words, flag) for flag in meeting} == meeting
    assert value(words, "--master-port") == "23456", "20000 and the last four digits of the job's id"
    assert words[-2:] == ["--lr", "5e-4"], "flags after the recipe come last, where they win"
    assert "--container-image" not in words


def test_a_node_without_dns_name_uses_the_address_of_slurm(cluster: Cluster) -> None:
    cluster.answer("getent", "false")
    cluster.answer("scontrol", "echo node7; echo '   NodeAddr=10.0.0.7 NodeHostName=here Version=22.05'")
    cluster.submit("pretrain", "tiny")
    cluster.answer("getent", "true")
    cluster.submit("pretrain", "tiny")
    words = cluster.given()
    met_at = [after for flag, after in pairwise(words) if flag == "--master-addr"]
    assert met_at == ["10.0.0.7", "node7"]


def test_every_gpu_gets_a_rank(cluster: Cluster) -> None:
    cluster.submit("pretrain", "tiny", RANKS_PER_NODE="", SLURM_GPUS_ON_NODE="8")
    assert value(cluster.given(), "--nproc-per-node") == "8"


def test_a_run_keeps_its_recipe_code_and_commands(cluster: Cluster) -> None:
    cluster.submit("pretrain", "tiny")
    job = cluster.run / "jobs" / "123456"
    assert (job / "recipe.sh").read_bytes() == (JOBS / "recipes" / "tiny.sh").read_bytes()
    assert (job / "code" / "megatron_mtp" / "attach.py").read_bytes() == (ROOT / "megatron_mtp/attach.py").read_bytes()
    assert (job / "start-0" / "commands").read_text().split() == ["srun", *cluster.given()]
    if (ROOT / ".git").exists():
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert (job / "revision").read_text().startswith(head)
    (job / "code" / "mine").touch()
    (job / "recipe.sh").write_text((job / "recipe.sh").read_text().replace("STEPS:=40", "STEPS:=50"))
    cluster.submit("pretrain", "tiny", SLURM_RESTART_COUNT="1")
    assert (job / "code" / "mine").exists(), "a start after a requeue goes on with the copy"
    assert "--train-iters 50 " in (job / "start-1" / "commands").read_text()


def test_a_job_runs_the_copy_and_not_the_checkout(cluster: Cluster) -> None:
    cluster.answer("srun", 'while [ "$1" != bash ]; do shift; done; SLURM_NODEID=0 "$@"')
    step = 'step once -c "import megatron_mtp; print(megatron_mtp.__file__)"'
    done = cluster.start(f"source scripts/slurm/job.sh; open_run tiny; {step}")
    assert done.stdout.splitlines()[-1] == str(cluster.run / "jobs/123456/code/megatron_mtp/__init__.py"), done.stderr


def test_an_array_takes_a_value_each(cluster: Cluster) -> None:
    for index, rate in enumerate(("1e-3", "2e-3")):
        cluster.submit("pretrain", "tiny", SWEEP="LR=1e-3 2e-3", SLURM_ARRAY_TASK_ID=str(index))
        words = (cluster.run / f"LR-{rate}" / "jobs/123456/start-0/commands").read_text().split()
        assert value(words, "--lr") == rate
        assert value(words, "--save") == str(cluster.run / f"LR-{rate}" / "checkpoint")


@pytest.mark.parametrize(
    ("job", "arguments", "variables", "says"),
    [
        ("pretrain", ["huge"], {}, f"there is no recipe 'huge'; give a file or one of {' '.join(RECIPES)}."),
        ("pretrain", [], {}, "there is no recipe ''; give a file"),
        ("pretrain", ["tiny"], {"SWEEP": "LR=1 2"}, "SWEEP is 'LR=1 2', and the job is not an array; add --array=0-N"),
        ("pretrain", ["tiny"], {"SLURM_ARRAY_TASK_ID": "0"}, "the job is an array without SWEEP; give SWEEP="),
        (
            "pretrain",
            ["tiny"],
            {"SWEEP": "LR=1 2", "SLURM_ARRAY_TASK_ID": "2"},
            "--array has the index 2, and SWEEP has 2 values; they count from 0.",
        ),
        (
            "pretrain",
            ["tiny"],
            {"SWEEP": "RATE=1 2", "SLURM_ARRAY_TASK_ID": "0"},
            "SWEEP names RATE, which",
        ),
        ("pretrain", ["tiny"], {"VENV": "/nowhere"}, "there is no /nowhere/bin/python; run scripts/setup.sh"),
        ("convert", ["tiny", "back"], {}, "the direction is 'back'; give mcore-to-hf or hf-to-mcore"),
        ("attach", ["tiny"], {}, "CORPUS is not set; give the text to train on"),
        (
            "attach",
            ["tiny"],
            {"SWEEP": "LR=1 2", "SLURM_ARRAY_TASK_ID": "0", "CORPUS": "LICENSE"},
            "SWEEP is 'LR=1 2', and an array of attach runs the trials of its probe; unset SWEEP.",
        ),
    ],
)
def test_a_mistake_gives_a_clear_error(
    job: str, arguments: list[str], variables: dict[str, str], says: str, cluster: Cluster
) -> None:
    done = cluster.submit(job, *arguments, **variables)
    assert done.returncode == 2
    assert done.stderr.startswith(f"job: error: {says}")
    assert done.stderr.count("\n") == 1
    assert cluster.given() == []


def test_a_container_sees_the_checkout_and_the_run(cluster: Cluster) -> None:
    cluster.submit("pretrain", "tiny", CONTAINER="/images/mtp.sqsh", CONTAINER_MOUNTS="/data:/data", VENV="/nowhere")
    words = cluster.given()
    assert value(words, "--container-image") == "/images/mtp.sqsh"
    assert value(words, "--container-workdir") == str(ROOT)
    assert value(words, "--container-mounts") == f"{ROOT}:{ROOT},{cluster.run}:{cluster.run},/data:/data"
    assert words[words.index("-m") - 1] == "python"


def test_a_stopped_job_is_requeued(cluster: Cluster) -> None:
    cluster.answer("srun", 'touch "$START/stopped"')
    done = cluster.submit("pretrain", "tiny")
    assert done.returncode == 75
    assert cluster.given("scontrol")[-2:] == ["requeue", "123456"]


def test_a_cancelled_job_is_not_requeued(cluster: Cluster) -> None:
    """Its ranks get SIGTERM too; and even when Bash is ended by that signal, it runs its EXIT trap."""
    cluster.answer("srun", 'touch "$START/stopped"')
    cluster.answer("scontrol", "echo node7; echo node8; echo JobState=CANCELLED")
    cluster.submit("pretrain", "tiny")
    assert "requeue" not in cluster.given("scontrol")


def test_a_failed_job_is_not_requeued(cluster: Cluster) -> None:
    cluster.answer("srun", "exit 3")
    assert cluster.submit("pretrain", "tiny").returncode == 3
    assert "requeue" not in cluster.given("scontrol")


def test_an_exported_checkpoint_is_verified(cluster: Cluster) -> None:
    (cluster.run / "exported").mkdir(parents=True)  # left by the previous start
    assert cluster.submit("convert", "tiny", "mcore-to-hf").returncode == 0
    words = cluster.given()
    pair = [str(cluster.run / "exported"), str(cluster.run / "checkpoint")]
    assert words[-4:] == ["verify", *pair, "--allow-uncompared"]
    assert value(words, "--nodes") == "1"
    assert "mcore-to-hf" not in words
    cluster.submit("convert", "tiny", "hf-to-mcore", "--workers", "2", SOURCE="/models/mine", TARGET="/tmp/none/trunk")
    words = cluster.given()
    first = words.index("hf-to-mcore")
    assert words[first : first + 6] == ["hf-to-mcore", "/models/mine", "/tmp/none/trunk", "--resume", "--workers", "2"]


def test_a_failed_step_of_attach_is_the_last(cluster: Cluster) -> None:
    cluster.answer("srun", "exit 4")
    done = cluster.submit("attach", "smollm2_135m", "--batch", "7", CORPUS="LICENSE", HF_MODEL="docs")
    assert done.returncode == 4, done.stderr
    words = cluster.given()
    first = words.index("megatron_mtp")
    assert words[first + 1 : first + 5] == ["attach", "docs", "LICENSE", str(cluster.run)]
    assert [words[place + 1] for place, word in enumerate(words) if word == "--only"] == ["corpus"]
    assert value(words, "--family") == "glm4_moe"
    assert [words[place + 1] for place, word in enumerate(words) if word == "--batch"] == ["64", "7"], "the last wins"


def test_a_job_runs_all_steps_of_attach_in_their_order(cluster: Cluster) -> None:
    cluster.answer("srun", '[[ $* != *--dry-run* ]] || echo "> x: finished"')
    assert cluster.submit("attach", "smollm2_135m", CORPUS="LICENSE").returncode == 0
    words = cluster.given()
    ran = [words[place + 1] for place, word in enumerate(words) if word == "--only"]
    assert list(dict.fromkeys(ran)) == list(STEPS)


def test_an_array_without_a_sweep_runs_the_trials_of_the_probe(cluster: Cluster) -> None:
    """Each in the same folder, with all ranks."""
    done = cluster.submit("attach", "smollm2_135m", CORPUS="LICENSE", HF_MODEL="docs", SLURM_ARRAY_TASK_ID="4")
    assert done.returncode == 0, done.stderr
    words = cluster.given()
    assert words.count("attach") == 1
    assert (value(words, "--only"), value(words, "--trial")) == ("probe", "4")
    assert value(words, "--nproc-per-node") == "4"
    assert str(cluster.run) in words


def test_the_rest_of_the_probe_runs_until_it_is_finished(cluster: Cluster) -> None:
    cluster.answer(
        "srun",
        f"""[[ $* != *--dry-run* ]] || [ ! -e {cluster.folder}/ran ] || echo "> x: finished"
[[ $* = *--dry-run* ]] || touch {cluster.folder}/ran""",
    )
    done = cluster.submit("attach", "smollm2_135m", CORPUS="LICENSE", ONLY="probe train")
    assert done.returncode == 0, done.stderr
    words = cluster.given()
    places = [place for place, word in enumerate(words) if word == "--only"]
    assert [words[place + 1] for place in places] == ["probe", "probe", "probe", "probe", "train"]
    assert words.count("--dry-run") == 2
    assert words.count("torch.distributed.run") == 2, "a trial, and the training"


class Node:
    """`node.sh` with a command, in a folder; whatever it starts ends with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: psutil.Popen | None = None

    def start(self, *arguments: str) -> psutil.Popen:
        environment = {**os.environ, "START": str(self.folder), "SLURM_NODEID": "0", "SLURM_JOB_ID": "7"}
        self.process = psutil.Popen(["bash", NODE, *arguments], cwd=self.folder, env=environment)
        return self.process

    def await_file(self, name: str) -> None:
        assert self.process is not None
        while not (self.folder / name).exists():
            assert self.process.poll() is None, f"ended before it made {name}"
            time.sleep(0.01)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    if made.process is not None and made.process.is_running():
        for each in (*made.process.children(recursive=True), made.process):
            each.kill()


TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 1 --signals-to-handle SIGINT rank.py".split()
RANK = """
import signal, sys, time
def handler(*_):
    open("saved", "w").close()
    sys.exit(0)
open("started", "w").close()
time.sleep(0.5)  # importing Megatron
signal.signal(signal.SIGTERM, handler)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("sent", "all_processes"), tiered([(signal.SIGUSR1, False), (signal.SIGTERM, True)], [(signal.SIGUSR1, False)])
)
def test_ranks_save_at_a_signal(sent: signal.Signals, all_processes: bool, node: Node, tmp_path: Path) -> None:
    """The signal arrives before the rank has a handler; it reaches only the shell, or torchrun and the rank too."""
    (tmp_path / "rank.py").write_text(RANK)
    process = node.start("ranks", sys.executable, *TORCHRUN)
    node.await_file("started")
    for each in (process, *(process.children(recursive=True) if all_processes else [])):
        each.send_signal(sent)
    assert process.wait() == 0
    assert (tmp_path / "saved").exists()
    assert (tmp_path / "stopped").exists()


def test_a_program_that_cannot_save_ends(node: Node, tmp_path: Path) -> None:
    process = node.start("itself", "bash", "-c", "touch started; exec sleep 600")
    node.await_file("started")
    process.send_signal(signal.SIGUSR1)
    assert process.wait() == 128 + signal.SIGTERM
    assert (tmp_path / "stopped").exists()


def test_a_signal_before_the_program_is_known_ends_it(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bash runs a trap between two commands, even between starting the program and storing its process id."""
    between = tmp_path / "between.sh"
    between.write_text("""trap '[[ $BASH_COMMAND != command=* ]] || kill -USR1 $$' DEBUG\n""")
    monkeypatch.setenv("BASH_ENV", str(between))
    assert node.start("itself", "sleep", "600").wait() == 128 + signal.SIGTERM
    assert (tmp_path / "stopped").exists()


@pytest.mark.parametrize(("given", "seen"), [(None, "1"), ("8", "8")])
def test_cuda_gets_one_connection_unless_the_user_says_otherwise(
    given: str | None, seen: str, node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", given)
    assert node.start("ranks", "bash", "-c", "echo $CUDA_DEVICE_MAX_CONNECTIONS >seen").wait() == 0
    assert (tmp_path / "seen").read_text().strip() == seen


def test_kernels_are_kept_on_the_node(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", "/scratch")
    assert node.start("ranks", "bash", "-c", "echo $TRITON_CACHE_DIR >seen").wait() == 0
    assert (tmp_path / "seen").read_text() == "/scratch/triton-7\n"


def test_the_exit_status_of_a_failed_command_is_passed_on(node: Node, tmp_path: Path) -> None:
    assert node.start("itself", "bash", "-c", "exit 3").wait() == 3
    assert not (tmp_path / "stopped").exists()


@pytest.mark.skipif(not SHELLCHECK.exists(), reason="shellcheck is not installed; scripts/setup.sh gets it")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_shellcheck_has_nothing_to_say(script: Path) -> None:
    done = subprocess.run([SHELLCHECK, "--severity=warning", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout + done.stderr == ""

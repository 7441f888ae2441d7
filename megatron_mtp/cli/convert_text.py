"""Acceptance on the text of `convert --text`: before and after an export, or of a donor and the grafted model."""

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from tempfile import TemporaryDirectory

from megatron_mtp.cli.convert_plans import options

PACKAGE = "megatron_mtp"
LEAST_TOKENS, MEASURED_TOKENS = 32, 512
"""Sequence length for measuring acceptance on --text; a shorter text is one sequence."""
ENOUGH = 100_000
"""Characters of a document that are sure to contain this many tokens."""


def measurable_tokens(args: Namespace, models: list[Path]) -> int:
    """Return the sequence length for --text, at most MEASURED_TOKENS, before anything is written.

    Raises:
        ValueError: `acceptances` could not run a model, there is no tokenizer to read --text with, or too little text.
    """
    from megatron_mtp.checkpoint.convert.graft import open_side
    from megatron_mtp.data.corpus import TEXT_FILES, find_files, list_documents, read_document
    from megatron_mtp.data.tokenizer import read_tokenizer

    counted = MEASURED_TOKENS
    for path in models:
        side = open_side(path)
        try:
            side.check_runs()
            if side.tokenizer is None:
                raise ValueError(f"{path} has no tokenizer; put the files of its tokenizer there.")
            tokenizer = read_tokenizer(side.tokenizer, args.trust_remote_code)
            tokens = 0
            for document in list_documents(find_files([str(args.text)], TEXT_FILES, "--text")):
                beginning = read_document(document, "text")[:ENOUGH]
                tokens += len(tokenizer(beginning, add_special_tokens=False).input_ids)
                if tokens > MEASURED_TOKENS:
                    break
            if tokens <= LEAST_TOKENS:
                raise ValueError(f"it has {tokens} tokens; give more than {LEAST_TOKENS}.")
        except ValueError as error:
            raise ValueError(f"--text cannot be measured, and nothing was written: {error}") from error
        counted = min(counted, tokens - 1)
    return counted


def acceptances(models: dict[str, Path], checkpoint: Path, tokens: int, args: Namespace) -> dict[str, dict[str, float]]:
    """Measure acceptance by depth and expected accepted length on --text, with `evaluate` in separate processes.

    Args:
        models: folders or checkpoints by name.
        checkpoint: model whose positions limit the sequence length.
        tokens: maximum sequence length.
        args: flags of the command.

    Raises:
        ValueError: a model cannot be measured.
    """
    from megatron_mtp.checkpoint.convert.import_hf import hf_to_mcore
    from megatron_mtp.megatron.checkpoint.iterations import is_checkpoint
    from megatron_mtp.megatron.checkpoint.reader import DistReader

    length = min(tokens, DistReader(checkpoint).common()["args"].max_position_embeddings)
    flags = ["--text", str(args.text), "--json", "--seq-length", str(length)]
    flags += ["--trust-remote-code"] * args.trust_remote_code
    found = {}
    with TemporaryDirectory(prefix=f".{args.target.name}-read-", dir=args.target.parent) as folder:
        for number, (name, path) in enumerate(models.items()):
            if not is_checkpoint(path):  # `evaluate` needs a checkpoint
                source, path = path, Path(folder) / str(number)
                hf_to_mcore(source, path, options(args))
            words = [sys.executable, "-m", PACKAGE, "evaluate", "--load", str(path), *flags]
            done = subprocess.run(words, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                raise ValueError(
                    f"{args.target} is written, but evaluate ends with status {done.returncode} for {path}."
                )
            row = json.loads(done.stdout.splitlines()[-1])
            found[name] = {key: row[key] for key in row if key.endswith((" acceptance", "accepted length"))}
    return found

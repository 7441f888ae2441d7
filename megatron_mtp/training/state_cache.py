"""`--mtp-state-cache DIR`: compute the states of a frozen trunk once, and read them in all later trainings.

The trunk's layers are skipped if all rows of a microbatch are stored; otherwise they run, and their output is stored.
MTP layers and drafters read bit-identical states either way. Rows are identified by their content (`row_keys.py`), so
order, seed, loss, drafter, learning rate and number of ranks may change. The trunk's loss, which is only logged, is
stored for each whole microbatch.

Whole rows are stored: a rank of context or sequence parallelism reads a row and takes its part.

Letters in names: S sequence, B batch, H hidden, R context-parallel ranks.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import mpu
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn

from megatron_mtp.common.errors import InputError
from megatron_mtp.data.batch import DepthBatch
from megatron_mtp.data.checks import read_index, vocabulary_digest
from megatron_mtp.losses.head_objective import LossSum
from megatron_mtp.megatron.model_arguments import MODEL_ARGUMENTS
from megatron_mtp.megatron.patterns import trunk_and_depths
from megatron_mtp.model.frozen import trunk_modules
from megatron_mtp.training.documents import named_prefixes
from megatron_mtp.training.row_keys import Rows
from megatron_mtp.training.short_log import say
from megatron_mtp.training.state_store import HIDDEN, LOSS, StateStore, column_of

if TYPE_CHECKING:
    from megatron_mtp.model.trained_stage import TrainedStage

OF_HEADS = ("mtp_", "drafter", "attention_dropout", "hidden_dropout", "seq_length", "padded_vocab", "make_vocab")
"""Prefixes of model arguments that do not affect the trunk's states."""

EDGE = 2**20
"""Bytes at each end of a corpus that its digest reads, in addition to its whole index."""


class StateCache:
    """The decoder of a stage, with a cache in front of it.

    Args:
        stage: pipeline stage that holds the whole trunk.
        args: arguments of the run.

    Raises:
        InputError: the cache belongs to another model or corpus, or the disk has no space for this run.
    """

    def __init__(self, stage: "TrainedStage", args: Namespace) -> None:
        self._stage, self._rows = stage, Rows([], False)
        self._last = self._rows
        decoder = stage.model.decoder
        self._decode = decoder.forward
        self._read_batches = self._run_batches = 0
        self.columns = [HIDDEN, *map(column_of, stage.read.numbers)]
        identity = _identity(stage.model, args)
        refused: list[str | None] = [None]
        if args.rank == 0:
            try:
                self.store = self._opened(args, identity)
            except ValueError as error:
                refused = [str(error)]
        torch.distributed.broadcast_object_list(refused, 0)
        if refused[0] is not None:
            raise InputError(refused[0])
        if args.rank != 0:
            self.store = StateStore(Path(args.mtp_state_cache), identity)
        decoder.forward = self._forward

    def _opened(self, args: Namespace, identity: dict[str, Any]) -> StateStore:
        """Open the store, with room for this run."""
        store = StateStore(Path(args.mtp_state_cache), identity)
        row_bytes = len(self.columns) * args.seq_length * args.hidden_size * args.params_dtype.itemsize
        needed = store.check_room(_rows_of_run(args), row_bytes)
        say(
            f"> --mtp-state-cache {args.mtp_state_cache} has {len(store)} rows; this run adds {needed / 1e9:.1f} GB "
            "at most"
        )
        return store

    def expect(self, rows: Rows) -> None:
        """Set the rows of the model's next forward pass."""
        self._rows = rows

    def close(self) -> None:
        """Write pending rows and report how often the trunk ran."""
        self.store.write()
        if torch.distributed.get_rank() == 0:
            batches = self._read_batches + self._run_batches
            say(f"> --mtp-state-cache: the trunk ran for {self._run_batches} of {batches} microbatches")

    def _forward(self, *given: Any, **named: Any) -> Any:
        """Replace the decoder's forward."""
        rows, self._rows, self._last = self._rows, Rows([], False), self._rows
        if not rows.keys:  # this forward pass is not for a batch
            return self._decode(*given, **named)
        if self._is_there(rows):
            hidden_SBH, *states = (self._own_part(self._read(rows, column), rows) for column in self.columns)
            self._read_batches += 1
            self._stage.read.after.update(zip(self._stage.read.numbers, states, strict=True))
            return hidden_SBH
        self._run_batches += 1
        hidden_SBH = self._decode(*given, **named)
        read = self._stage.read
        self._keep(rows, [hidden_SBH, *(read.after[number] for number in read.numbers)])
        return hidden_SBH

    def _is_there(self, rows: Rows) -> bool:
        """Return whether the trunk need not run; the same on all ranks that compute it together."""
        lacks = self.store.missing(rows.keys, self.columns)
        if lacks:
            self.store.refresh()  # other ranks also write
            lacks = self.store.missing(rows.keys, self.columns)
        return not _on_some_rank(lacks)

    def main_loss(self, batch: DepthBatch, compute: Callable[[], LossSum]) -> LossSum:
        """Return the trunk's loss of the microbatch that just ran, from the cache or by `compute`."""
        made = blake2b(b"".join(self._last.keys) + bytes([mpu.get_context_parallel_rank()]), digest_size=16)
        for value in (batch.labels_BS, batch.loss_mask_BS):
            made.update(value.cpu().contiguous().numpy().tobytes())
        key = made.digest()
        if not _on_some_rank(self.store.missing([key], [LOSS])):
            total = self.store.read(key, LOSS)[0].to(batch.labels_BS.device)
            return LossSum(total, batch.loss_mask_BS.float().sum(), batch.whole_tokens[0])
        loss = compute()
        if not mpu.get_tensor_model_parallel_rank():
            self.store.add(key, {LOSS: loss.total.detach().cpu().view(1)})
        return loss

    def _read(self, rows: Rows, column: str) -> Tensor:
        return torch.stack([self.store.read(key, column) for key in rows.keys])

    def _own_part(self, states_BSH: Tensor, rows: Rows) -> Tensor:
        """Return this rank's part of whole rows, as the decoder returns it."""
        device = torch.device(torch.cuda.current_device())
        whole = states_BSH.flatten(0, 1).unsqueeze(1) if rows.is_joined else states_BSH.transpose(0, 1)
        if rows.positions_RS is not None:
            whole = whole[rows.positions_RS[mpu.get_context_parallel_rank()].cpu()]
        if self._stage.config.sequence_parallel:
            whole = whole.chunk(mpu.get_tensor_model_parallel_world_size())[mpu.get_tensor_model_parallel_rank()]
        return whole.to(device).contiguous()

    @torch.no_grad()
    def _keep(self, rows: Rows, parts: Sequence[Tensor]) -> None:
        """Store the trunk's output; the first of the ranks that compute it together writes."""
        whole = [self._whole(part_SBH.detach(), rows) for part_SBH in parts]
        if mpu.get_tensor_model_parallel_rank() or mpu.get_context_parallel_rank():
            return
        length = whole[0].size(0) * whole[0].size(1) // len(rows.keys)
        as_rows = [
            (states.flatten(0, 1).view(len(rows.keys), length, -1) if rows.is_joined else states.transpose(0, 1)).cpu()
            for states in whole
        ]
        for number, key in enumerate(rows.keys):
            of_row = {name: of[number].contiguous() for name, of in zip(self.columns, as_rows, strict=True)}
            self.store.add(key, of_row)

    def _whole(self, part_SBH: Tensor, rows: Rows) -> Tensor:
        """Return all positions of a rank's part."""
        if self._stage.config.sequence_parallel:
            part_SBH = gather_from_sequence_parallel_region(part_SBH, tensor_parallel_output_grad=False)
        if rows.positions_RS is None:
            return part_SBH
        group = mpu.get_context_parallel_group()
        parts = [torch.empty_like(part_SBH) for _ in range(group.size())]
        torch.distributed.all_gather(parts, part_SBH.contiguous(), group=group)
        joined, order = torch.cat(parts), rows.positions_RS.flatten().to(part_SBH.device)
        return joined[order.argsort()]


def _on_some_rank(is_missing: bool) -> bool:
    """Return whether a row is missing on any of the ranks that compute a forward together."""
    groups = [mpu.get_tensor_model_parallel_group(), mpu.get_context_parallel_group()]
    if mpu.get_expert_model_parallel_world_size() > 1:
        groups = [torch.distributed.group.WORLD]
    for group in groups:
        if torch.distributed.get_world_size(group) > 1:
            lacks = torch.tensor([is_missing], dtype=torch.int32).cuda()
            torch.distributed.all_reduce(lacks, torch.distributed.ReduceOp.MAX, group=group)
            is_missing = bool(lacks.item())
    return is_missing


# --- identity of the states -------------------------------------------------------------------------------------------


def _identity(model: nn.Module, args: Namespace) -> dict[str, Any]:
    """Return the entries of the manifest."""
    return {
        "trunk": _digest_of_trunk(model, args),
        "tokenizer": _digest_of_tokenizer(args),
        "corpus": _digest_of_corpus(args),
        "sequence": args.seq_length,
        "dtype": str(args.params_dtype).removeprefix("torch."),
    }


def _digest_of_trunk(model: nn.Module, args: Namespace) -> str:
    """Return a digest of all weights and buffers of the trunk, and of the arguments that affect its computation."""
    made = blake2b(digest_size=16)
    for name in sorted({*MODEL_ARGUMENTS}):
        if not name.startswith(OF_HEADS) and (value := getattr(args, name, None)) is not None:
            value = trunk_and_depths(value)[0] if name == "hybrid_layer_pattern" else value
            made.update(f"{name}={value};".encode())
    for module in trunk_modules(model):
        for name, value in module.state_dict().items():
            if isinstance(value, Tensor):
                made.update(f"{name}{tuple(value.shape)}".encode())
                made.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    digests: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(digests, made.hexdigest())
    return blake2b("".join(sorted({*digests})).encode(), digest_size=16).hexdigest()  # count replicas once


def _digest_of_tokenizer(args: Namespace) -> str:
    known = vocabulary_digest(args.tokenizer_model) if args.tokenizer_type == "HuggingFaceTokenizer" else None
    return known or f"{args.tokenizer_type}, {args.vocab_size} tokens"


def _digest_of_corpus(args: Namespace) -> str:
    """Return a digest of all datasets that the flags name."""
    made = blake2b(digest_size=16)
    for prefix in named_prefixes(args):
        made.update(Path(f"{prefix}.idx").read_bytes())
        tokens = Path(f"{prefix}.bin")
        size = tokens.stat().st_size
        with open(tokens, "rb") as file:
            made.update(file.read(EDGE))
            file.seek(max(size - EDGE, 0))
            made.update(file.read(EDGE))
    return made.hexdigest()


def _rows_of_run(args: Namespace) -> int:
    """Return the largest number of rows that a run reads."""
    evaluations = 1 if args.mtp_patience is not None else 1 + (args.train_iters or 0) // (args.eval_interval or 1)
    read = args.train_iters * args.global_batch_size if args.train_iters and not args.skip_train else 0
    read += (args.eval_iters or 0) * args.eval_global_batch_size * evaluations
    if args.mock_data:
        return read
    indices = [read_index(prefix) for prefix in named_prefixes(args)]
    there = sum(each.documents if args.reads_chats else each.tokens // args.seq_length + 2 for each in indices)
    return min(read, there)

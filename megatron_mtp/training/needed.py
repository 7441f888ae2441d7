"""Required flags. All missing flags are reported at once, where Megatron reports one at a time."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import NamedTuple

DATA = "chat mock_data data_path data_args_path train_data_path valid_data_path test_data_path per_split_data_args_path"


def _lacks(*names: str) -> Callable[[Namespace], bool]:
    """Return whether none of the arguments was given, for a model that no other file describes."""

    def holds(args: Namespace) -> bool:
        files = args.use_checkpoint_args, args.heterogeneous_layers_config_path, args.yaml_cfg
        return not (any(files) or any(_is_given(args, name) for name in names))

    return holds


def _trains_without(*names: str) -> Callable[[Namespace], bool]:
    """Return whether none of the arguments was given, for a run that trains."""
    return lambda args: not (args.skip_train or any(_is_given(args, name) for name in names))


def _is_given(args: Namespace, name: str) -> bool:
    value = getattr(args, name, None)
    return value is not None and value is not False


class Needed(NamedTuple):
    """A required flag, what to give, and when it is missing.

    Attributes:
        has_default: whether Megatron has a default that it rejects later.
    """

    flag: str
    give: str
    is_missing: Callable[[Namespace], bool]
    has_default: bool = False


OF_A_MODEL = (
    Needed(
        "--num-layers", "the layers of the trunk", _lacks("num_layers", "encoder_num_layers", "hybrid_layer_pattern")
    ),
    Needed("--hidden-size", "it", _lacks("hidden_size")),
    Needed("--num-attention-heads", "it", _lacks("num_attention_heads")),
    Needed("--seq-length", "the tokens of a sequence", _lacks("seq_length", "encoder_seq_length")),
    Needed("--max-position-embeddings", "--seq-length or more", _lacks("max_position_embeddings")),
    Needed(
        "--position-embedding-type rope",
        "it",
        lambda args: (
            _lacks()(args) and bool(args.mtp_num_layers) and args.position_embedding_type == "learned_absolute"
        ),
        has_default=True,
    ),
    Needed(
        "--tokenizer-type",
        "it, such as HuggingFaceTokenizer with --tokenizer-model FOLDER",
        lambda args: _lacks("tokenizer_type")(args) and not args.chat,
    ),
    Needed(
        "--vocab-size",
        "the tokens of --tokenizer-type NullTokenizer",
        lambda args: _lacks("vocab_size")(args) and args.tokenizer_type == "NullTokenizer",
    ),
    Needed("--micro-batch-size", "the sequences of a microbatch", lambda args: args.micro_batch_size is None),
)
"""Arguments that a plan needs too."""

OF_A_RUN = (
    Needed(
        "--train-iters", "the steps of the run, or --train-samples", _trains_without("train_iters", "train_samples")
    ),
    Needed("--lr", "the peak learning rate", _trains_without("lr")),
    Needed("--eval-interval", "the steps between evaluations", _trains_without("eval_interval")),
)
OF_DATA = (
    Needed(
        "--data-path",
        "the prefix of a .bin/.idx pair (megatron-mtp preprocess makes one), chats with --chat, or --mock-data",
        _trains_without(*DATA.split()),
    ),
)


def check_needed(args: Namespace, needed: Sequence[Needed]) -> None:
    """Raise ValueError that names all missing flags."""
    missing = [row for row in needed if row.is_missing(args)]
    if all(row.has_default for row in missing):
        return
    if len(missing) == 1:
        raise ValueError(f"{missing[0].flag} is missing; give {missing[0].give}.")
    named = ", ".join(row.flag for row in missing)
    raise ValueError(f"{named} are missing; give them, as the first example of --help does.")


# --- flags -----------------------------------------------------------------------------------------------------------

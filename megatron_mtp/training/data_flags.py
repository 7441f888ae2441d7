"""The data and the vocabulary that a run's flags name: whether they are there and fit each other.

Every check raises ValueError with one sentence that names the flag, the value and the remedy.
"""

from argparse import Namespace

from megatron.training import get_tokenizer
from megatron.training.utils import get_blend_and_blend_per_split

from megatron_mtp.data.answers import read_answers
from megatron_mtp.data.checks import check_data_prefixes, check_split, check_tokenizer, check_weights, split_weights
from megatron_mtp.training.chat import check_chat_files
from megatron_mtp.training.short_log import say


def check_data(args: Namespace) -> None:
    """Whether the corpus is there, whole, and made with a vocabulary that fits."""
    if args.mock_data or (args.skip_train and args.data_path is None):
        return
    for given in (args.data_path, args.train_data_path, args.valid_data_path, args.test_data_path):
        check_weights(given or [])
    prefixes = _prefixes(args)
    if args.sft:
        check_chat_files(prefixes)
        return _check_conversations(args)
    if not prefixes:
        raise ValueError(
            "--data-path is missing; give the prefix of a .bin/.idx pair (megatron-mtp preprocess makes one), or "
            "--mock-data."
        )
    if args.skip_train and args.data_path is not None and not any(split_weights(args.split)[1:]):
        raise ValueError(f"--split is {args.split}, which leaves nothing to evaluate on; give 0,1,0.")
    check_data_prefixes(prefixes, true_vocab_size(args))
    if args.data_path is not None and args.split is not None:
        check_split(prefixes, args.split)
    if args.fim_data:
        _check_fim_tokens(args)
    if args.mtp_mask_prompts:
        for prefix in prefixes:
            read_answers(prefix)
    if args.tokenizer_model is not None:
        check_tokenizer(prefixes, args.tokenizer_model)


def leave_out_evaluations(args: Namespace) -> None:
    """Evaluate nothing (--eval-iters 0) where the flags name data for training alone: Megatron would read from none.

    Raises:
        ValueError: an evaluation of other data was asked for, and the flags name none for validation.
    """
    if args.mock_data or not (args.eval_iters or args.full_validation):
        return
    training, validation, test = _parts(args)
    if validation:
        return
    said = f"--split is {args.split}" if args.data_path is not None else "--valid-data-path is missing"
    if test or not training or args.full_validation:
        raise ValueError(f"{said}, which leaves nothing to validate on; give validation data, or --eval-iters 0.")
    args.eval_iters = 0
    if args.rank == 0:
        say(f"> {said}, which leaves nothing to evaluate on: training without evaluations, as with --eval-iters 0")


def _parts(args: Namespace) -> list[bool]:
    """Whether the flags name data for training, for validation and for test."""
    blend, per_split = get_blend_and_blend_per_split(args)
    if per_split is not None:
        return [part is not None for part in per_split]
    weights = split_weights(args.split) if args.split is not None and blend is not None else [1, 1, 1]
    return [weight > 0 for weight in (*weights, 0, 0)][:3]


def _check_conversations(args: Namespace) -> None:
    """Whether the tokenizer has what --sft-tokenizer-prompt-format needs: a token to fill rows up with, a template."""
    settings = get_tokenizer()._tokenizer._prompt_config
    lacking = "the padding token" if settings.pad_token_id is None else "a chat template"
    if settings.pad_token_id is None or settings.custom_chat_template is None:
        raise ValueError(
            f"--tokenizer-model {args.tokenizer_model} lacks {lacking} that --sft-tokenizer-prompt-format "
            f"{args.sft_tokenizer_prompt_format} needs; give another format, or a tokenizer that has it."
        )


def _check_fim_tokens(args: Namespace) -> None:
    """Whether the tokenizer has the tokens that --fim-data marks its parts with."""
    tokens = [getattr(args, f"fim_{part}_token") for part in ("prefix", "middle", "suffix", "pad", "eod")]
    ids = get_tokenizer()._tokenizer.tokens_to_ids(tokens)
    if absent := [token for token, number in zip(tokens, ids, strict=True) if number is None]:
        raise ValueError(
            f"--fim-data marks text with {' '.join(absent)}, which the tokenizer lacks; name tokens that it has with "
            "--fim-prefix-token, --fim-middle-token, --fim-suffix-token, --fim-pad-token and --fim-eod-token."
        )


def _prefixes(args: Namespace) -> list[str]:
    blend, per_split = get_blend_and_blend_per_split(args)
    blends = [blend] if blend is not None else list(per_split or [])
    return [prefix for one in blends if one is not None for prefix in one[0]]


def true_vocab_size(args: Namespace) -> int:
    """Rows of the vocabulary that stand for tokens: the tokenizer's ids or, if these are fewer, `--vocab-size`.

    A converted model may have more rows than its tokenizer has tokens; they are part of its softmax.
    """
    tokenizer = get_tokenizer()
    known = [tokenizer.vocab_size, args.vocab_size or 0]
    if args.tokenizer_type == "HuggingFaceTokenizer":
        known.append(1 + max(tokenizer.inv_vocab))  # ids may have gaps
    return min(max(known), args.padded_vocab_size)

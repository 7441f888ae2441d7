"""A Megatron-LM user's script with Megatron's model and its own forward step; it imports only Megatron.

test_users_script.py changes two lines of it.
"""

from functools import partial

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import get_args, get_tokenizer, pretrain, print_rank_0
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


def add_users_arguments(parser):
    parser.add_argument("--users-greeting", default="nothing")
    return parser


def has_depths(vp_stage):
    config = core_transformer_config_from_args(get_args())
    return mtp_on_this_rank(
        layout=config.pipeline_model_parallel_layout,
        mtp_num_layers=config.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=vp_stage,
    )


def get_batch(data_iterator, vp_stage):
    args = get_args()
    if not (is_first_or_last_pipeline_stage(vp_stage) or has_depths(vp_stage)):
        return [None] * len(KEYS)
    tp_rank = mpu.get_tensor_model_parallel_rank()
    batch = {key: tensor.cuda() for key, tensor in next(data_iterator).items()} if tp_rank == 0 else {}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=has_depths(vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())
    return [batch[key] for key in KEYS]


def loss_func(loss_mask, losses):
    loss = torch.sum(losses.view(-1).float() * loss_mask.view(-1))
    tokens = loss_mask.sum().int()
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.float()])}


def forward_step(data_iterator, model):
    tokens, labels, loss_mask, attention_mask, position_ids = get_batch(
        data_iterator, get_attr_wrapped_model(model, "vp_stage")
    )
    losses = model(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask)
    return losses, partial(loss_func, loss_mask)


def train_valid_test_datasets_provider(samples, vp_stage=None):
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )

    def is_built_here():
        needs_data = is_first_or_last_pipeline_stage(vp_stage) or has_depths(vp_stage)
        return needs_data and mpu.get_tensor_model_parallel_rank() == 0

    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, samples, is_built_here, config).build()


def get_embedding_ranks(pp_ranks):
    args = get_args()
    ranks = {pp_ranks[0], *get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args))}
    return sorted(ranks if args.untie_embeddings_and_output_weights else ranks | {pp_ranks[-1]})


if __name__ == "__main__":
    train_valid_test_datasets_provider.is_distributed = True
    args = parse_and_validate_args(
        extra_args_provider=add_users_arguments, args_defaults={"tokenizer_type": "GPT2BPETokenizer"}
    )
    print_rank_0(f"the user's script greets {args.users_greeting}")
    model_cfg = gpt_config_from_args(args)
    full_config = pretrain_cfg_container_from_args(args, model_cfg)
    pretrain(
        full_config,
        train_valid_test_datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        get_embedding_ranks=get_embedding_ranks,
    )

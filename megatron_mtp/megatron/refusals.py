"""Megatron's messages for runs that cannot start, and what we print instead (`training/startup.py`)."""

PHASES = {
    "parse_hybrid_pattern": "--hybrid-layer-pattern cannot be read",
    "parse_args": "Megatron refuses these flags",
    "validate_args": "Megatron refuses these flags",
    "parse_and_validate_args": "Megatron refuses these flags",
    "core_transformer_config_from_args": "Megatron refuses these flags",
    "initialize_megatron": "Megatron refuses these flags",
    "build_tokenizer": "the tokenizer cannot be loaded",
    "setup_model_and_optimizer": "the model and its optimizer cannot be made of these flags",
    "build_train_valid_test_data_iterators": "the data sets cannot be built",
    "load_checkpoint": "the checkpoint cannot be loaded into this model",
    "train_step": "the first step fails",
    "save_checkpoint": "no checkpoint can be saved to --save {save}",
}
"""Functions of Megatron, each with the start of the sentence if it is running; the innermost counts. {} is a flag's
value.
"""

OPTIMIZER = "give the flags that it was trained with, or --no-load-optim if only its optimizer differs"
OTHER_SCHEDULE = (
    "give the schedule of the run that saved it, or --override-opt-param-scheduler to take that of the flags"
)
ADVICE = {
    **dict.fromkeys(("OptimizerParamScheduler", "Could not find parameter group"), OTHER_SCHEDULE),
    **dict.fromkeys(("not in state dict", "flattened_range", "'optimizer'"), OPTIMIZER),
}
"""Advice by a substring of Megatron's message."""

SENTENCES: tuple[tuple[str, str], ...] = (
    (
        "eval_global_batch_size ({global_batch_size}) must be divisible by eval_micro_batch_size ({micro_batch_size})",
        "--global-batch-size is {global_batch_size}, but --micro-batch-size {micro_batch_size} on {data_parallel_size} "
        "data-parallel ranks needs a multiple of {sequences_at_once}; give one, or fewer ranks.",
    ),
    (
        "is not divisible by micro batch size",
        "--global-batch-size is {global_batch_size}, but --micro-batch-size {micro_batch_size} on {data_parallel_size} "
        "data-parallel ranks needs a multiple of {sequences_at_once}; give one, or fewer ranks.",
    ),
    (
        "is not divisible by total_model_size",
        "there are {world_size} ranks, not a multiple of --tensor-model-parallel-size {tensor_model_parallel_size} x "
        "--pipeline-model-parallel-size {pipeline_model_parallel_size} x --context-parallel-size "
        "{context_parallel_size}; start more ranks, or give smaller sizes.",
    ),
    (
        "Number of layers should be divisible by the pipeline",
        "--num-layers is {num_layers}, not a multiple of --pipeline-model-parallel-size "
        "{pipeline_model_parallel_size}; give one, or --decoder-last-pipeline-num-layers or "
        "--pipeline-model-parallel-layout for unequal stages.",
    ),
    (
        "args.hidden_size % args.num_attention_heads == 0",
        "--hidden-size is {hidden_size}, not a multiple of --num-attention-heads {num_attention_heads}; give one, or "
        "--kv-channels for heads of any size.",
    ),
    (
        "must be greater than or equal to seq_length",
        "--seq-length is {seq_length}, but --max-position-embeddings is {max_position_embeddings}; give as many "
        "positions or more.",
    ),
    (
        "should be a multiple of 2 * context-parallel-size",
        "--seq-length is {seq_length}, not a multiple of twice --context-parallel-size {context_parallel_size}; give "
        "one.",
    ),
    (
        "should be a multiple of expert model parallel_size",
        "--num-experts is {num_experts}, not a multiple of --expert-model-parallel-size {expert_model_parallel_size}; "
        "give one.",
    ),
    (
        "dispatcher does not support moe_router_padding",
        "--moe-router-padding-for-fp8 was given with --moe-token-dispatcher-type {moe_token_dispatcher_type}, which "
        "does not pad; give --moe-token-dispatcher-type alltoall or flex.",
    ),
    (
        "is not supported with learned_absolute",
        "--position-embedding-type is {position_embedding_type}, and MTP layers have no learned positions; give rope "
        "or none.",
    ),
    (
        "Number of mtp layers in layout must match",
        "--pipeline-model-parallel-layout has another number of m than {mtp_num_layers}; give an m for each of "
        "--mtp-num-layers, and one for a drafter, whatever its --drafter-steps.",
    ),
    ("tokenizer_type None is not supported", "--tokenizer-type is missing; give it, such as HuggingFaceTokenizer."),
    ("args.min_lr <= args.lr", "--min-lr is {min_lr}, above --lr {lr}; give at most that."),
    ("not args.bf16 does not hold", "--fp16 and --bf16 were given; give one of the two."),
    (
        "KeyError 'optimizer'",
        "--load {load} has no optimizer state, or that of another optimizer; give --no-load-optim to go on with its "
        "weights and step, or --finetune to start anew with its weights.",
    ),
    (
        "mismatch after resume",
        "--load {load} has the optimizer's state in buffers of another layout; give the --tensor-model-parallel-size "
        "and --pipeline-model-parallel-size that it was saved with, or --no-load-optim; a run that saves with "
        "--dist-ckpt-optim-fully-reshardable goes on in any layout.",
    ),
)
"""Substrings of `reason`'s result for Megatron's most common refusals, with their sentences; {} is an argument."""

DIVERGED = "the loss or a gradient is NaN or infinite; give a smaller --lr, or look for what the text has at this step."

NAMES_ELSEWHERE = {
    "num_moe_experts": "num_experts",
    "max_lr": "lr",
    "init_lr": "lr_warmup_init",
    "lr_decay_steps": "lr_decay_iters",
    "lr_warmup_steps": "lr_warmup_iters",
    "start_wd": "start_weight_decay",
    "end_wd": "end_weight_decay",
    "model_parallel_size": "tensor_model_parallel_size",
}
"""Arguments whose values have other names in Megatron's configurations and schedules."""

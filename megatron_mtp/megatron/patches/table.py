"""THE TABLE: every function of Megatron, and of torch's checkpoints, that this package replaces in every process.

`install()` applies `PATCHES` for the life of the process. Functions that a training run wraps are in a table of their
own, `loop.py`, and so are CPU substitutes for CUDA, `../cpu.py`.

The sources of megatron-core 0.19.0, 0.19.1 and 0.19.2 are identical in everything that is listed here. Probes find
torch's bugs in 2.11 and in 2.15.
"""

from megatron_mtp.megatron.checkpoint.catalogue import checked_once
from megatron_mtp.megatron.patches import layers, reading, saving
from megatron_mtp.megatron.patches.patch import CORE, ISSUES, NONE, PULLS, Patch, State, apply, state_of

TORCH = ">=2.11.0a0,<2.16"

PATCHES = (
    Patch(
        "megatron.core.datasets.utils:compile_helpers",
        "The wheel has no Makefile, so the call would end the process, though the helpers are compiled already.",
        NONE,
        CORE,
        layers.compiles_without_makefile,
        lambda _: layers.import_helpers,
    ),
    Patch(
        "megatron.core.transformer.moe.router:TopKRouter._apply_expert_bias",
        "The router applies a mask over tokens to the experts' axis when it counts tokens for the expert bias.",
        f"{ISSUES}/6111, fixed by {PULLS}/6114",
        CORE,
        layers.mask_hits_experts,
        lambda _: layers.count_for_expert_bias,
    ),
    Patch(
        "megatron.core.transformer.moe.router:get_tokens_per_expert_and_token_count",
        "With masked tokens, the sum over ranks overwrites this rank's count, and the balancing loss is too large.",
        f"{PULLS}/7481",
        CORE,
        layers.sum_overwrites_count,
        layers.with_mean_count,
    ),
    Patch(
        "megatron.core.transformer.moe.moe_logging:MoEMetricsTracker.report",
        "The logged losses of routers are averaged over another number of routers than there are, and pipeline stages "
        "without experts wait forever for tensors of another size.",
        f"fixed by {PULLS}/6748",
        CORE,
        layers.counts_other_routers,
        layers.over_all_routers,
    ),
    Patch(
        "megatron.training.arguments:validate_args",
        "YaRN outside of latent attention is refused with MTP layers, whose angles are those of the trunk.",
        NONE,
        CORE,
        layers.refuses_yarn,
        layers.with_yarn,
    ),
    Patch(
        "megatron.core.tensor_parallel.layers:ColumnParallelLinear.__init__",
        "Without Apex the output layer refuses fused weight gradients, for which Transformer Engine needs no Apex.",
        NONE,
        CORE,
        layers.refuses_without_apex,
        layers.fused_where_possible,
    ),
    Patch(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.sharded_param_state_fully_reshardable",
        "The fully reshardable format saves wrong slices of the optimizer's state behind a padded bucket.",
        f"fixed by {PULLS}/5077",
        CORE,
        saving.counts_padding,
        saving.without_gaps,
    ),
    Patch(
        "megatron.core.optimizer:DistributedOptimizer",
        "Without Apex and Transformer Engine, a distributed optimizer cannot resume.",
        NONE,
        CORE,
        saving.needs_first_step,
        saving.resumable,
    ),
    Patch(
        "megatron.core.optimizer.optimizer:MegatronOptimizer.__init__",
        "A run with --optimizer sgd cannot resume: nothing makes the state that its checkpoint is read into.",
        NONE,
        CORE,
        saving.leaves_sgd_stateless,
        saving.with_momentum,
    ),
    Patch(
        "megatron.training.training:get_megatron_optimizer",
        "A pipeline stage without anything to train has an optimizer whose checkpoint cannot be loaded.",
        NONE,
        CORE,
        saving.makes_no_stubs,
        saving.with_stubs,
    ),
    Patch(
        "megatron.core.dist_checkpointing.strategies.filesystem_async:_write_item",
        "Megatron's copy of torch's function writes entries without checksums.",
        NONE,
        CORE,
        reading.writes_no_checksum,
        reading.with_checksum,
    ),
    Patch(
        "megatron.core.dist_checkpointing.strategies.filesystem_async:get_write_results_queue",
        "The helper process of saves stays when its rank is killed.",
        NONE,
        CORE,
        saving.leaves_helper,
        saving.queue_that_ends,
    ),
    Patch(
        "megatron.core.dist_checkpointing:save",
        "Nothing compares a checkpoint's catalogue with what was saved.",
        NONE,
        CORE,
        saving.seals_nothing,
        saving.sealed,
    ),
    Patch(
        "megatron.core.dist_checkpointing:save",
        "Rank 0 alone writes the optimizer's common state, which it does not have if its stage trains nothing.",
        NONE,
        CORE,
        saving.lends_nothing,
        saving.with_lent_optimizer,
    ),
    Patch(
        "megatron.core.dist_checkpointing:save",
        "An iteration that is saved again over itself looks whole all the time.",
        NONE,
        CORE,
        saving.keeps_mark,
        saving.unmarked_meanwhile,
    ),
    Patch(
        "megatron.core.dist_checkpointing:load",
        "An optimizer's state cannot be loaded by a model with layers that the checkpoint lacks.",
        NONE,
        CORE,
        saving.reads_every_entry,
        saving.without_absent,
    ),
    Patch(
        "torch.distributed.checkpoint.filesystem:_write_item",
        "Entries of a checkpoint are written without checksums.",
        NONE,
        TORCH,
        reading.writes_no_checksum,
        reading.with_checksum,
        package="torch",
    ),
    Patch(
        "torch.distributed.checkpoint.filesystem:FileSystemReader._slice_file",
        "Damaged entries of a checkpoint are loaded.",
        NONE,
        TORCH,
        reading.reads_damaged_bytes,
        checked_once,
        package="torch",
    ),
    Patch(
        "torch.distributed.checkpoint.filesystem:FileSystemReader.read_metadata",
        "The catalogue of a checkpoint is unpickled, which runs whatever code it names.",
        "https://github.com/pytorch/pytorch/issues/189308",
        TORCH,
        reading.unpickles_catalogues,
        lambda _: reading.read_metadata,
        package="torch",
    ),
    Patch(
        "torch.distributed.checkpoint.default_planner:DefaultLoadPlanner.load_bytes",
        "Objects in a checkpoint are unpickled, which runs whatever code they name.",
        "https://github.com/pytorch/pytorch/issues/189308",
        TORCH,
        reading.unpickles_objects,
        lambda _: reading.load_bytes,
        package="torch",
    ),
)
"""Patches in the order in which they are applied; rows of one target are adjacent."""


def install() -> None:
    """Replace the functions with bugs in the installed versions. A second call changes nothing.

    Raises:
        RuntimeError: an installed version does not have one of the functions.
    """
    apply(PATCHES)


def install_for_experts() -> None:
    """Replace only router functions, for a model built by a framework. A release may lack a function."""
    routers = [patch for patch in PATCHES if patch.target.startswith("megatron.core.transformer.moe.router:")]
    apply([patch for patch in routers if state_of(patch) is not State.MISSING])

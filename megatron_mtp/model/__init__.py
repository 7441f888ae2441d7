"""The model: from arguments to a trunk with MTP layers and drafters. Hidden states in, one hidden state per depth out.

arguments.py         Megatron's arguments of a model, and its configuration; patterns of hybrid models
stored_arguments.py  arguments of a checkpoint, completed or changed for a model in one process
trunk_facts.py       what a drafter depends on of a built model's trunk
build.py             configuration to model, and the process group: the only place that builds models
attachment.py        draft heads on a model of Megatron's own class, by hooks on its forward
trained_stage.py     the same on a pipeline stage of this package's runs: objectives, absent heads, frozen trunks
heads.py             the list of MTP layers and drafters: how to build them, what they draft, what a checkpoint lacks
stages.py            what hooks cannot do: states that drafters read, on several pipeline stages
passed_states.py     states of several layers as one tensor between pipeline stages
schedule_plan.py     the schedule plan of a forward pass, for --overlap-moe-expert-parallel-comm
frozen.py            frozen trunks
hybrid.py            layers of hybrid models, by pattern; MTP layers that are stacks of layers by pattern
trunk_output.py      outputs of the trunk's forward pass that MTP layers and drafters read
mtp.py               MultiTokenPredictionLayer: one MTP layer
around_layers.py     recomputation and quantization of MTP layers, as Megatron does for the trunk's
mixing.py            hidden-state mixing: which state an MTP layer continues from (--mtp-hidden-state-mixing)
chain.py             inputs of the MTP layers, and running layers one after another
mtp_block.py         MultiTokenPredictionBlock: all MTP layers, sequential or parallel
stock.py             models of Megatron's own class: which cannot have heads, and what all new heads need
stock_mtp.py         MTP layers for such a model: a new block, and running its layers
stock_drafter.py     drafters for such a model
drafter.py           base classes of drafters (--drafter): features, output layer, keys in checkpoints
one_layer.py         drafters with one layer in K passes, such as EAGLE
block_drafter.py     drafters of a block of K tokens in one pass, as DFlash
biased_blocks.py     block drafters with a bias by the previous token, such as DSpark
shared_embedding.py  the input embedding, copied to the last pipeline stage
draft_vocabulary.py  a smaller vocabulary to draft from: its rows of the output layer, and its file
vocabulary.py        softmax, argmax and sums over slices of the vocabulary; vocabulary padding
head.py              the output layer, shared by the trunk and all MTP layers
stage_output.py      what the last pipeline stage passes to the losses
initialize.py        MTP layers that a checkpoint lacks: random, or a copy of the trunk's last layer (--mtp-init);
                     random weights are the same under every layout and in every tool
rope.py              rotary modules at any positions
masks.py             which keys a query may attend to, for queries at any positions
attention.py         attention for machines without TE: SP, CP, packed sequences, windows, sinks
ring.py              attention to keys that go around the context-parallel ranks, for drafters of long sequences
latent_attention.py  MLA without a norm of uncompressed queries, and without TE
shared_keys.py       passes of a repeated layer that attend to pass 1's keys, with or without a chain of their own
norms.py             RMSNorm and LayerNorm for machines without TE
linear.py            projections to and from the latent of experts, for machines without TE
packed_rows.py       where the documents of a packed row start and end
specs.py             replaces Megatron's modules by these
swapped.py           classes of a spec, and names of modules, swapped for others
recurrent.py         Mamba-2 without mamba_ssm and Gated DeltaNet without fla
"""

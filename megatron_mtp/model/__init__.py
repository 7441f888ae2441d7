"""From arguments to a model: the trunk with its MTP block; hidden states in, one hidden state per depth out.

arguments.py         Megatron's arguments of a model, and its configuration; patterns of hybrids
build.py             configuration to model, and the process group: the only place that builds one
attachment.py        draft heads on a model of Megatron's own class, by hooks on its forward
trained_stage.py     the same on a pipeline stage of this package's runs: objectives, absent heads, frozen trunks
heads.py             the list of draft heads: how they are made, what they draft, what a checkpoint lacks of them
stages.py            what hooks cannot do: states that travel between pipeline stages
schedule_plan.py     the plan of a forward for --overlap-moe-expert-parallel-comm
frozen.py            a trunk that stays as it was loaded
hybrid.py            layers of a hybrid, which a pattern names; MTP layers that are stacks by a pattern
trunk_output.py      what a draft head reads of the trunk's forward pass
mtp.py               MultiTokenPredictionLayer: one depth
around_layers.py     what Megatron does around the trunk's layers, for MTP layers: recomputation, quantization
mixing.py            which state a depth continues from in training (--mtp-hidden-state-mixing)
chain.py             what depths read, and layers one after another
mtp_block.py         MultiTokenPredictionBlock: all depths, sequential or parallel
stock.py             MTP layers for a model of Megatron's own class: a new block, and what cannot have one
stock_drafter.py     drafters for a model of Megatron's own class
drafter.py           what drafters in the place of MTP layers share (--drafter): features, head, keys in checkpoints
one_layer.py         drafters of one layer in K passes, as EAGLE
block_drafter.py     drafters of a block of K tokens in one pass, as DFlash
biased_blocks.py     the same with a bias by the token before, as DSpark
shared_embedding.py  the input embedding, which the last pipeline stage has a copy of
draft_vocabulary.py  a smaller vocabulary that the MTP layers draft from: the head's rows of it, and its file
vocabulary.py        softmax, argmax and sums over slices of the vocabulary, and the rows that pad it
head.py              the output head, which the trunk and every depth share
stage_output.py      what the last pipeline stage gives the losses
initialize.py        MTP layers that a checkpoint lacks: random, or a copy of the trunk's last layer (--mtp-init);
                     random weights are drawn alike in every layout and tool
rope.py              rotary modules at any positions
attention.py         attention for machines without TE: causal mask, SP, CP, packed sequences, windows, sinks
latent_attention.py  MLA without a norm of queries that are not compressed, and without TE
shared_keys.py       passes of a repeated layer that attend to pass 1's keys, with a chain of their own or without
norms.py             RMSNorm and LayerNorm for machines without TE
linear.py            projections to the latent of experts and back, for machines without TE
packed_rows.py       where the documents of a packed row start and end
specs.py             these modules in the places of Megatron's
recurrent.py         Mamba-2 without mamba_ssm and Gated DeltaNet without fla
"""

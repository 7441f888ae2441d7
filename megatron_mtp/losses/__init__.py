"""Losses of MTP layers and drafters, and the training objective.

table.py                 LOSSES: the table by `--mtp-loss` name, a class and a row each, without importing torch
token_loss.py            TokenLoss: the interface of a loss, with its declared needs; ce
paced.py                 dpace, cross-entropy weighted by the expected number of accepted drafts
distillation.py          losses against the trunk's distribution: kd; tv, nla and lk, based on the acceptance rate of
                         sampled drafts; e2e_tv, based on the accepted length of all depths together
mix.py                   mix, a weighted sum of other losses
weight_gradient.py       gradient of the output layer: what is kept for the backward pass, and where it is added
triton_kernels.py        losses and gradients of a position in one or two kernels: all losses but mix and dpace
triton_chunk.py          launches these kernels and decides when they apply
linear_cross_entropy.py  output layer and loss together, in chunks of tokens: memory does not grow with MTP layers
selector.py              a drafter's choice among the likeliest tokens: candidate logits and their loss
reference.py             reference implementation of all losses, written as their definitions
head_objective.py        from hidden states of a head to one scalar: masks, lambda / D, weights, normalizer
acceptance.py            acceptance counts, which match what a verifier accepts
objective.py             one scalar of the trunk and all heads; the schedule of lambda
stage_loss.py            the loss of a head for a batch of whole sequences, on the last stage
mtp_loss.py              the MTP loss for training loops other than Megatron's
"""

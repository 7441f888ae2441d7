"""What MTP layers learn: losses by the names that `--mtp-loss` takes, and one scalar of them.

table.py                 LOSSES: the table of losses, a class and a row each, without an import of torch
token_loss.py            TokenLoss: what every loss says of itself, and what it computes; ce, dpace
distillation.py          losses by the trunk's distribution: kd; tv, nla and lk, of the rate at which sampled drafts are
                         accepted; e2e_tv, of the accepted length of all depths together
mix.py                   mix, a weighted sum of other losses
weight_gradient.py       the head's gradient: what is kept of it for the backward pass, and where it is added
triton_kernels.py        a position's losses and gradients in one kernel or two: all losses but mix and dpace
triton_chunk.py          where these kernels are used, and what they are called with
linear_cross_entropy.py  head and loss together, in chunks of tokens: memory that does not grow with depths
selector.py              a drafter's choice among the likeliest tokens: logits of candidates, and the loss of the choice
reference.py             all losses as their definitions read
objective.py             from hidden states to one scalar of all losses: masks, lambda / D, schedule, weights,
                         normalizer; acceptance, which is what a verifier would accept
mtp_loss.py              the depths' loss for training loops that are not Megatron's
"""

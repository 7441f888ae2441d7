"""Multi-token joint decoding, exactly: the K tokens whose joint probability is highest (arXiv:2407.09722, section 3).

An oracle for tests: its cost is V^K.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def mtjd(log_probs: Callable[[Tensor], Tensor], tokens: int, vocabulary: int) -> tuple[Tensor, float]:
    """The best continuation [K] and its log-probability.

    Args:
        log_probs: from prefixes [M, j] to the log-probabilities of the token after each, [M, V]; j runs from 0 to K-1.
        tokens: K.
        vocabulary: V; V^K must fit the memory.
    """
    prefixes_MJ = torch.zeros(1, 0, dtype=torch.long)
    joint_M = torch.zeros(1, dtype=torch.double)
    for _ in range(tokens):
        step_MV = log_probs(prefixes_MJ).double()
        joint_M = (joint_M.unsqueeze(1) + step_MV).flatten()
        longer = prefixes_MJ.repeat_interleave(vocabulary, dim=0)
        token = torch.arange(vocabulary).repeat(prefixes_MJ.size(0)).unsqueeze(1)
        prefixes_MJ = torch.cat([longer, token], dim=1)
    best = int(joint_M.argmax())
    return prefixes_MJ[best], float(joint_M[best])

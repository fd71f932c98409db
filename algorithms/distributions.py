"""How likely an action is under a policy, as functions of what the policy's network gives."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def gaussian_log_probability(mean: Tensor, log_std: Tensor, actions: Tensor) -> Tensor:
    """Log density of independent Gaussians, summed over action dimensions.

    mean, actions: [P, B, A]. log_std: [P, 1, A] natural logarithm. Returns [P, B].
    """
    deviation = (actions - mean) * torch.exp(-log_std)
    constant = log_std.sum(-1) + mean.shape[-1] * 0.5 * math.log(2 * math.pi)
    return -0.5 * deviation.square().sum(-1) - constant


def categorical_log_probability(logits: Tensor, actions: Tensor, n_actions: Sequence[int]) -> Tensor:
    """Log probability of independent choices, summed over action dimensions.

    logits, actions: [P, B, A], for each dimension `n_actions` numbers; actions one-hot in each. Returns [P, B].
    """
    parts = [part.log_softmax(-1) for part in logits.split(list(n_actions), dim=-1)]
    return (torch.cat(parts, dim=-1) * actions).sum(-1)

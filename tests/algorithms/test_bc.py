import math

import pytest
import torch

from algorithms.bc import cloning_loss


def test_squared_error_by_hand_at_both_signs() -> None:
    # tanh(atanh(0.5)) = 0.5, tanh(0) = 0; errors 0.5 - 1 and 0 - (-1): mean (0.25 + 1) / 2 = 0.625.
    outputs = torch.tensor([[[math.atanh(0.5), 0.0]]], requires_grad=True)
    actions = torch.tensor([[[1.0, -1.0]]])
    loss = cloning_loss(outputs, actions, None)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([0.625])
    # d/dx (tanh x - a)^2 / 2 = (tanh x - a)(1 - tanh^2 x): -0.5 * 0.75 and 1 * 1.
    assert outputs.grad is not None
    assert outputs.grad.flatten().tolist() == pytest.approx([-0.375, 1.0])


def test_cross_entropy_by_hand() -> None:
    # Two dimensions of two and three choices: -log(1/4) for logits (0, log 3) and choice 0, -log(1/3) for equal logits.
    outputs = torch.tensor([[[0.0, math.log(3), 1.0, 1.0, 1.0]]], requires_grad=True)
    actions = torch.tensor([[[1.0, 0.0, 0.0, 1.0, 0.0]]])
    loss = cloning_loss(outputs, actions, (2, 3))
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([math.log(4) + math.log(3)])
    # probability minus choice
    assert outputs.grad is not None
    assert outputs.grad.flatten().tolist() == pytest.approx([-0.75, 0.75, 1 / 3, -2 / 3, 1 / 3], rel=1e-5)


def test_losses_are_not_reduced_over_members() -> None:
    outputs, actions = torch.zeros(2, 4, 1), torch.tensor([0.5, 1.0]).view(2, 1, 1).expand(2, 4, 1)
    assert cloning_loss(outputs, actions, None).tolist() == [0.25, 1.0]

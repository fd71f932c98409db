import math

import pytest
import torch
from torch import Tensor

from labelers.networks import Adam, Best, Networks, generator

SIZES = (3, 8, 8, 2)


def networks(*seeds: int) -> Networks:
    return Networks(SIZES, [generator(seed, "initialisation") for seed in seeds])


def test_a_network_depends_on_its_seed_alone() -> None:
    alone, among = networks(7), networks(1, 7, 3)
    for one, many in zip(alone.parameters(), among.parameters(), strict=True):
        assert torch.equal(one[0], many[1])


def test_a_generator_given_twice_makes_two_networks() -> None:
    source = generator(0, "initialisation")
    twins = Networks(SIZES, [source, source])
    assert not torch.equal(twins.weights[0][0], twins.weights[0][1])


def test_purposes_of_a_seed_share_no_numbers() -> None:
    a, b = (torch.rand(100, generator=generator(0, purpose)) for purpose in ("initialisation", "batches 0"))
    assert not torch.isin(a, b).any()


def test_weights_fill_the_range_of_a_linear_layer() -> None:
    first = Networks((100, 200), [generator(0, "initialisation")])
    for parameter in first.parameters():
        assert 0.09 < parameter.abs().max() <= 0.1  # 1 / sqrt(100)


def test_outputs_and_gradients_are_those_of_each_network_alone() -> None:
    stacked, inputs = networks(0, 1, 2), torch.randn(3, 6, 3, generator=torch.Generator().manual_seed(0))
    outputs = stacked(inputs)
    outputs.square().mean((1, 2)).sum().backward()
    for p in range(3):
        hidden = inputs[p]
        parameters = [t.detach()[p].clone().requires_grad_() for t in stacked.parameters()]
        weights, biases = parameters[:3], parameters[3:]
        for layer in range(3):
            hidden = hidden @ weights[layer] + biases[layer]
            hidden = hidden.relu() if layer < 2 else hidden
        torch.testing.assert_close(outputs[p], hidden)
        hidden.square().mean().backward()
        for own, parameter in zip(stacked.parameters(), parameters, strict=True):
            assert own.grad is not None
            torch.testing.assert_close(own.grad[p], parameter.grad)


def test_a_frozen_copy_follows_and_asks_for_no_gradients() -> None:
    source = networks(0)
    target = source.frozen()
    with torch.no_grad():
        source.weights[0] += 1.0
    before = target.weights[0].clone()
    target.follow(source, 0.25)
    torch.testing.assert_close(target.weights[0], before + 0.25)
    assert torch.equal(target.weights[1], source.weights[1])
    assert not any(p.requires_grad for p in target.parameters())


def test_state_goes_out_and_in() -> None:
    one, other = networks(0, 1), networks(2, 3)
    other.load_state_dict(one.state_dict())
    inputs = torch.ones(2, 4, 3)
    assert torch.equal(one(inputs), other(inputs))
    assert torch.equal(Networks.of(one.state_dict())(inputs), one(inputs))
    assert Networks.of(one.state_dict()).sizes == SIZES


def test_a_state_that_does_not_fit_is_refused() -> None:
    tensors = networks(0).state_dict()
    with pytest.raises(ValueError, match=r"weight\.0"):
        networks(0, 1).load_state_dict(tensors)
    with pytest.raises(KeyError, match="expected"):
        networks(0).load_state_dict({})


def losses(parameters: list[Tensor]) -> Tensor:
    return sum(((p - 0.3).square() * torch.arange(1.0, p.numel() + 1).view_as(p)).sum() for p in parameters)


def test_adam_is_that_of_pytorch_and_resumes_exactly() -> None:
    ours, theirs = [[torch.linspace(-1, 1, 6).view(2, 3).requires_grad_() for _ in range(2)] for _ in range(2)]
    adam, reference = Adam(ours, 0.1), torch.optim.Adam(theirs, lr=0.1)
    for step in range(5):
        if step == 3:
            saved = {name: tensor.clone() for name, tensor in adam.state_dict().items()}
            adam = Adam(ours, 0.1)
            adam.load_state_dict(saved)
        adam.step(torch.autograd.grad(losses(ours), ours))
        reference.zero_grad()
        losses(theirs).backward()
        reference.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_the_rate_falls_along_a_cosine() -> None:
    parameter = torch.zeros(1, requires_grad=True)
    adam = Adam([parameter], rate=0.2, decay_steps=4)
    rates = []
    for _ in range(6):
        rates.append(adam.rate)
        adam.step([torch.ones(1)])
    # 0.2 (1 + cos(pi t / 4)) / 2 at t = 0, 1, 2, 3; 0 from t = 4 on.
    half = math.sqrt(0.5)
    assert rates == pytest.approx([0.2, 0.1 * (1 + half), 0.1, 0.1 * (1 - half), 0.0, 0.0], abs=1e-12)


def test_best_keeps_each_members_weights_at_its_lowest_error_and_says_when_to_stop() -> None:
    def networks(value: float) -> Networks:
        return Networks.of({"weight.0": torch.full((2, 1, 1), value), "bias.0": torch.zeros(2, 1, 1)})

    best = Best(networks(0), n_members=2, patience=20, device=torch.device("cpu"))
    errors = {10: [3.0, 5.0], 20: [2.0, 6.0], 30: [4.0, 4.0], 40: [2.0, 7.0]}
    over = [best.look(step, networks(step), torch.tensor(error)) for step, error in errors.items()]
    assert over == [False, False, False, False]  # the second member got better after 30
    assert best.look(50, networks(50), torch.tensor([9.0, 9.0]))
    assert best.steps.tolist() == [20, 30]
    assert best.networks.weights[0].flatten().tolist() == [20, 30]

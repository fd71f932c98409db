"""Action models: worked values with gradients, torch's distributions, scaling, and how predictions are judged."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.distributions import Categorical, Normal, TanhTransform, TransformedDistribution

from labelers.action_models import (
    MARGIN,
    ActionModel,
    Choices,
    SquashedGaussian,
    explained_variance,
    mixture_moments,
    restored,
    squashed_log_probability,
)


def outputs_for(means: list[float], stds: list[float]) -> torch.Tensor:
    """[2 M, 1, 1] outputs of networks whose members say these scaled actions and standard deviations."""
    raw = [math.atanh((math.log(std) + 5) / 3.5 - 1) for std in stds]
    return torch.tensor([*(math.atanh(mean) for mean in means), *raw])[:, None, None]


def test_members_together_say_the_worked_mean_and_variance() -> None:
    # (.01 + .04 + .01) / 3 + (.04 + .25 + .01) / 3 - .2^2 = .02 + .1 - .04
    mean, variance = mixture_moments(np.array([0.2, 0.5, -0.1]), np.array([0.1, 0.2, 0.1]))
    assert (mean, variance) == (pytest.approx(0.2), pytest.approx(0.08))


def test_proxies_are_the_mean_scaled_to_the_range_of_actions() -> None:
    # of -1 .. 5: centre 2, half range 3; the variance stays in half ranges
    model = SquashedGaussian(np.array([-1.0]), np.array([5.0]))
    proxies, variance = model.predict(outputs_for([0.2, 0.5, -0.1], [0.1, 0.2, 0.1]))
    assert proxies == pytest.approx(np.array([[2.6]]), rel=1e-6)
    assert variance == pytest.approx(np.array([[0.08]]), rel=1e-5)


def test_standard_deviations_stay_between_the_official_bounds() -> None:
    model = SquashedGaussian(np.array([-1.0]), np.array([1.0]))
    for raw, log_std in ((-100.0, -5.0), (0.0, -1.5), (100.0, 2.0)):
        _, variance = model.predict(torch.tensor([0.0, raw])[:, None, None])
        assert variance[0, 0] == pytest.approx(math.exp(2 * log_std))


@pytest.mark.parametrize(
    ("action", "value", "by_mean", "by_log_std"),
    [
        # u = atanh .6 = .693147, z = .393147 / .5: -z^2 / 2 - log .5 - log sqrt(2 pi) - log(1 - .36)
        (0.6, -0.08863366, 1.572589, -0.381744),
        # u = -.693147, z = -.993147 / .5; by mu: z / sigma; by log sigma: z^2 - 1
        (-0.6, -1.75218675, -3.972589, 2.945364),
    ],
)
def test_log_likelihood_and_its_gradient_are_the_worked_values(
    action: float, value: float, by_mean: float, by_log_std: float
) -> None:
    mean, log_std = torch.tensor(0.3, requires_grad=True), torch.tensor(math.log(0.5), requires_grad=True)
    found = squashed_log_probability(mean, log_std, torch.tensor(action))
    assert found.item() == pytest.approx(value, abs=2e-6)
    gradient = torch.autograd.grad(found, (mean, log_std))
    assert [g.item() for g in gradient] == pytest.approx([by_mean, by_log_std], abs=2e-5)


def test_log_likelihood_is_that_of_torch() -> None:
    rng = torch.Generator().manual_seed(0)
    mean, log_std = torch.randn(100, generator=rng).double(), torch.randn(100, generator=rng).double()
    actions = (torch.rand(100, generator=rng).double() * 2 - 1) * (1 - MARGIN)
    theirs = TransformedDistribution(Normal(mean, log_std.exp()), TanhTransform()).log_prob(actions)
    torch.testing.assert_close(squashed_log_probability(mean, log_std, actions), theirs)


@pytest.mark.parametrize("action", [1.0, -1.0, 1.5])
def test_actions_at_the_bounds_and_beyond_are_likely_to_a_finite_extent(action: float) -> None:
    mean, log_std = torch.zeros(()), torch.zeros(())
    at_margin = squashed_log_probability(mean, log_std, torch.tensor(math.copysign(1 - MARGIN, action)))
    assert squashed_log_probability(mean, log_std, torch.tensor(action)) == at_margin


def test_choices_are_as_likely_as_torch_says() -> None:
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    actions = np.array([[0, 3], [1, 2], [2, 1], [0, 0], [1, 3]])
    model = Choices((3, 4))
    found = model.log_probability(logits, torch.from_numpy(model.encode(actions))[None])
    parts = (Categorical(logits=logits[..., :3]), Categorical(logits=logits[..., 3:]))
    theirs = sum(part.log_prob(torch.from_numpy(actions[:, d])) for d, part in enumerate(parts))
    torch.testing.assert_close(found, theirs)


def test_the_choice_is_the_likeliest_on_average_and_its_doubt_what_is_left() -> None:
    # members say .9 .1 and .3 .7: on average .6 and .4, though the second member alone would choose 1
    logits = torch.tensor([[0.9, 0.1], [0.3, 0.7]]).log()[:, None]
    chosen, doubt = Choices((2,)).predict(logits)
    assert chosen.tolist() == [[0]]
    assert doubt == pytest.approx(np.array([[0.4]]))


def test_actions_are_scaled_from_their_range_and_a_range_of_nothing_stays() -> None:
    model = SquashedGaussian(np.array([-1.0, 3.0]), np.array([5.0, 3.0]))
    assert model.encode(np.array([[-1, 3], [5, 3], [3.5, 3]])).tolist() == [[-1, 0], [1, 0], [0.5, 0]]
    proxies, _ = model.predict(torch.full((2, 1, 2), 5.0))
    assert proxies[0] == pytest.approx([5, 3], abs=1e-3)
    assert proxies[0, 1] == 3


def test_explained_variance_is_the_worked_value() -> None:
    # actions 0 and 2 around 1: 2; residuals 1 and 0: 1; in the second dimension 8 and 1 + 1
    actions, residuals = np.array([[0.0, 0], [2, 4]]), np.array([[1.0, 1], [0, 1]])
    assert explained_variance(residuals[:, [0]], actions[:, [0]]) == pytest.approx(0.5)
    assert explained_variance(residuals, actions) == pytest.approx(1 - 3 / 10)
    assert explained_variance(residuals, np.ones((2, 2))) is None


def test_continuous_predictions_are_judged_by_the_worked_values() -> None:
    model = SquashedGaussian(np.array([-2.0]), np.array([2.0]))
    outputs = outputs_for([0.5], [0.25]).expand(2, 2, 1)  # an action of 1, standard deviation .5
    found = model.judge(outputs, np.array([[1.25], [-0.5]], np.float32), n_episodes=1)
    # residuals .25 and -1.5; in standard deviations .5 and -3; around the mean of .375 twice .875^2
    assert found.r2 == pytest.approx(1 - (0.0625 + 2.25) / (2 * 0.875**2))
    assert found.r2_per_dimension == (pytest.approx(found.r2),)
    assert found.z_rms == pytest.approx(math.sqrt((0.25 + 9) / 2))
    assert found.within_2_std == 0.5
    mean, log_std = torch.tensor(math.atanh(0.5)), torch.tensor(math.log(0.25))
    each = squashed_log_probability(mean, log_std, torch.tensor([0.625, -0.25]))
    assert found.log_likelihood == pytest.approx(each.mean().item(), rel=1e-5)


def test_discrete_predictions_are_judged_by_the_worked_values() -> None:
    # two members in equal parts: .6 for choice 0, always
    logits = torch.tensor([[0.9, 0.1], [0.3, 0.7]]).log()[:, None].expand(2, 4, 2)
    found = Choices((2,)).judge(logits, np.array([0, 1, 1, 1]), n_episodes=1)
    assert (found.accuracy, found.most_frequent) == (0.25, 0.75)
    assert found.confidence == pytest.approx(0.6)
    assert found.log_likelihood == pytest.approx((math.log(0.6) + 3 * math.log(0.4)) / 4)
    assert found.explained == pytest.approx(1 - 0.75 / 0.25)
    assert Choices((2,)).judge(logits, np.zeros(4, np.int64), n_episodes=1).explained is None


@pytest.mark.parametrize("model", [SquashedGaussian(np.array([-1.0]), np.array([5.0])), Choices((3, 4))])
def test_a_model_is_what_its_state_makes(model: ActionModel) -> None:
    again = restored(model.state())
    assert type(again) is type(model)
    assert {k: v.tolist() for k, v in again.state().items()} == {k: v.tolist() for k, v in model.state().items()}

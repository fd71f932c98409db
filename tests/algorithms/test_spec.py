from collections.abc import Callable

import numpy as np
import torch

from algorithms.spec import Spec
from data.trajectories import Trajectories

Make = Callable[..., Trajectories]


def bounded(make: Make, bounds: tuple[float, float] | None) -> Trajectories:
    data = make()
    return Trajectories(
        observations=data.observations,
        actions=np.linspace(-3, 1, 50, dtype=np.float32).reshape(25, 2),
        offsets=data.offsets,
        terminated=data.terminated,
        truncated=data.truncated,
        final_observed=data.final_observed,
        action_bounds=bounds,
    )


def test_observations_are_standardised_over_steps_without_final_observations(make: Make) -> None:
    data = make()
    seen = np.asarray(data.step_observations, np.float64)
    expected = (data.observations - seen.mean(0)) / (seen.std(0) + 1e-3)
    found = Spec.of(data).standardise(torch.from_numpy(data.observations))
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_constant_columns_say_nothing_even_where_they_change(make: Make) -> None:
    data = make()
    data.observations[:, 1] = 0.3
    spec = Spec.of(data)
    assert spec.standardise(torch.tensor([[0.0, 0.3, 0.0], [0.0, 5.0, 0.0]]))[:, 1].tolist() == [0.0, 0.0]


def test_observations_of_more_axes_are_flattened(make: Make) -> None:
    data = make()
    images = Trajectories(
        observations=np.arange(len(data.observations) * 6, dtype=np.uint8).reshape(-1, 2, 3),
        actions=data.actions,
        offsets=data.offsets,
        terminated=data.terminated,
        truncated=data.truncated,
        final_observed=data.final_observed,
    )
    spec = Spec.of(images)
    assert (spec.n_inputs, spec.observation_shape) == (6, (2, 3))
    assert spec.standardise(torch.from_numpy(images.observations)[None]).shape == (1, len(images.observations), 6)


def test_actions_are_scaled_from_declared_bounds_else_from_the_range_of_the_data(make: Make) -> None:
    declared = Spec.of(bounded(make, (-4.0, 2.0)))
    # -4 .. 2 has centre -1 and half range 3
    np.testing.assert_allclose(declared.encode(np.array([[-4.0, 2.0], [-1.0, 0.5]])), [[-1, 1], [0, 0.5]], atol=1e-6)
    taken = Spec.of(bounded(make, None))
    assert taken.action_low.tolist() == [-3, np.float32(-3 + 4 / 49)]
    assert taken.encode(np.array([taken.action_low, taken.action_high])).tolist() == [[-1, -1], [1, 1]]


def test_a_mean_becomes_an_action_within_bounds(make: Make) -> None:
    spec = Spec.of(bounded(make, (-4.0, 2.0)))
    outputs = torch.tensor([[0.0, 100.0], [-100.0, float(np.arctanh(0.5))]])
    torch.testing.assert_close(spec.decode(outputs), torch.tensor([[-1.0, 2.0], [-4.0, 0.5]]))


def test_discrete_actions_go_to_one_hot_and_come_back(make: Make) -> None:
    for n_actions in ((4,), (2, 3)):
        data = make(n_actions=n_actions)
        spec = Spec.of(data)
        encoded = spec.encode(data.actions)
        assert encoded.shape == (data.n_steps, sum(n_actions))
        assert (encoded.sum(1) == len(n_actions)).all()
        np.testing.assert_array_equal(spec.decode(torch.from_numpy(encoded)).numpy(), data.actions)

"""What a learner must know of the data before it sees any, and the numbers that networks read and write.

Networks see standardised observations and encoded actions, whatever the dataset holds: continuous actions scaled to
[-1, 1], discrete ones as one-hot vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from data.statistics import MomentsOf
from data.trajectories import Trajectories

STD_FLOOR = 1e-3
"""Added to standard deviations, as CORL does: a column that hardly moves in the data must not explode outside it."""

PIECE = 1 << 16
"""Rows turned to float64 at a time."""


@dataclass(frozen=True, eq=False)
class Spec:
    """Shapes, and how to standardise and encode.

    observation_shape, action_shape: of one step. n_actions: as in `Trajectories`, None for continuous actions.
    observation_mean, observation_scale: [D] float64 over flattened observations; what is subtracted, then multiplied
        with: 1 / (std + 0.001), and 0 for columns that are constant in the data, of which nothing can be learned.
    action_low, action_high: [A] float32, for continuous actions: declared bounds, else the data's range; else empty.
    """

    observation_shape: tuple[int, ...]
    action_shape: tuple[int, ...]
    n_actions: tuple[int, ...] | None
    observation_mean: np.ndarray
    observation_scale: np.ndarray
    action_low: np.ndarray
    action_high: np.ndarray

    @classmethod
    def of(cls, trajectories: Trajectories) -> Spec:
        """Measured on the observations at all steps (final observations left out) and on all actions."""
        accumulated = MomentsOf()
        for start in range(0, trajectories.n_steps, PIECE):
            steps = np.arange(start, min(start + PIECE, trajectories.n_steps))
            rows = trajectories.observations[trajectories.observation_rows(steps)]
            accumulated.update(rows.reshape(len(rows), -1))
        moments = accumulated.moments()
        low = high = np.zeros(0, np.float32)
        if trajectories.n_actions is None:
            n_dimensions = int(np.prod(trajectories.actions.shape[1:]))
            if trajectories.action_bounds is None:
                starts = range(0, trajectories.n_steps, PIECE)
                pieces = (trajectories.actions[s : s + PIECE].reshape(-1, n_dimensions) for s in starts)
                ends = np.array([(piece.min(0), piece.max(0)) for piece in pieces], np.float32)
                low, high = ends[:, 0].min(0), ends[:, 1].max(0)
            else:
                low, high = (np.full(n_dimensions, bound, np.float32) for bound in trajectories.action_bounds)
        return cls(
            observation_shape=tuple(trajectories.observations.shape[1:]),
            action_shape=tuple(trajectories.actions.shape[1:]),
            n_actions=trajectories.n_actions,
            observation_mean=moments.mean,
            observation_scale=np.where(moments.constant, 0.0, 1 / (moments.std + STD_FLOOR)),
            action_low=low,
            action_high=high,
        )

    @property
    def n_inputs(self) -> int:
        """D, numbers in one standardised observation."""
        return len(self.observation_mean)

    @property
    def n_outputs(self) -> int:
        """A, numbers in one encoded action: a mean for each dimension, or a logit for each choice."""
        return len(self.action_low) if self.n_actions is None else sum(self.n_actions)

    @cached_property
    def _centre(self) -> np.ndarray:
        centre: np.ndarray = (self.action_low.astype(np.float64) + self.action_high) / 2
        return centre

    @cached_property
    def _half_range(self) -> np.ndarray:
        half = (self.action_high.astype(np.float64) - self.action_low) / 2
        positive: np.ndarray = np.where(half > 0, half, 1.0)
        return positive

    def standardise(self, observations: Tensor) -> Tensor:
        """[..., *observation], any dtype -> [..., D] float32."""
        flat = observations.reshape(*observations.shape[: observations.ndim - len(self.observation_shape)], -1)
        mean, scale = (torch.from_numpy(x).to(flat.device) for x in (self.observation_mean, self.observation_scale))
        return ((flat.double() - mean) * scale).float()

    def encode(self, actions: np.ndarray) -> np.ndarray:
        """[n, *action] as in the dataset -> [n, A] float32: scaled to [-1, 1], or one-hot for each dimension."""
        flat = actions.reshape(len(actions), -1)
        if self.n_actions is None:
            encoded: np.ndarray = ((flat - self._centre) / self._half_range).astype(np.float32)
        else:
            chosen = [np.eye(n, dtype=np.float32)[flat[:, d]] for d, n in enumerate(self.n_actions)]
            encoded = np.concatenate(chosen, axis=1)
        return encoded

    def decode(self, outputs: Tensor) -> Tensor:
        """[..., A] what a policy network gives -> [..., *action] the best action: scaled tanh, or the largest logit.

        Continuous actions lie within action_low .. action_high.
        """
        if self.n_actions is not None:
            parts = outputs.split(self.n_actions, dim=-1)
            chosen = torch.stack([part.argmax(-1) for part in parts], dim=-1)
            return chosen.reshape(*outputs.shape[:-1], *self.action_shape)
        centre, half, low, high = (
            torch.from_numpy(x).to(outputs.device)
            for x in (self._centre, self._half_range, self.action_low, self.action_high)
        )
        actions = (centre + half * outputs.tanh().double()).float().clamp(low, high)
        return actions.reshape(*outputs.shape[:-1], *self.action_shape)

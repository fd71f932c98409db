"""From flat rows with ends to blocks of whole episodes, for sources that stream rows."""

from __future__ import annotations

import numpy as np

from data.readers.actions import ActionKind
from data.readers.reader import Block
from data.trajectories import Trajectories


class EpisodeAssembler:
    """Collects rows until their episodes end, and weaves in the final observations.

    Rows of an episode that has not ended yet are kept for the next call, so memory holds one episode and one piece.
    """

    def __init__(self, kind: ActionKind) -> None:
        self._kind = kind
        self._open: list[tuple[np.ndarray, np.ndarray, np.ndarray | None]] = []
        self.n_open = 0
        """Steps of the episode that has not ended yet."""
        self.n_closed = 0
        """Episodes delivered so far."""

    def add(
        self,
        observations: np.ndarray,
        actions: np.ndarray,
        rewards: np.ndarray | None,
        ends: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        finals: np.ndarray,
        final_observed: np.ndarray,
    ) -> Block | None:
        """Add rows; returns the episodes that end in them, if any.

        observations: [n, ...]. actions: [n, ...] as delivered. rewards: [n] float32 or None. ends: [E] rising rows at
        which episodes end; the next four have one entry for each. finals: [E, ...] the observation after the end;
        where final_observed is False its value is not used.
        """
        if len(ends) == 0:
            self._keep(observations, actions, rewards)
            return None
        stop = int(ends[-1]) + 1
        self._keep(observations[:stop], actions[:stop], rewards if rewards is None else rewards[:stop])
        offsets = np.concatenate([[0], ends + 1 + (self.n_open - stop)]).astype(np.int64)
        pieces, self._open, self.n_open = self._open, [], 0
        self._keep(observations[stop:], actions[stop:], rewards if rewards is None else rewards[stop:])
        rows, actions = _joined([p[0] for p in pieces]), _joined([p[1] for p in pieces])
        woven = np.empty((len(rows) + len(ends), *rows.shape[1:]), rows.dtype)
        last = offsets[1:] + np.arange(len(ends))
        is_final = np.zeros(len(woven), bool)
        is_final[last] = True
        woven[~is_final] = rows
        woven[last] = finals
        woven[last[~final_observed]] = woven[last[~final_observed] - 1]
        self.n_closed += len(ends)
        rewarded = [p[2] for p in pieces if p[2] is not None]
        return Block(
            trajectories=Trajectories(
                observations=woven,
                actions=actions,
                offsets=offsets,
                terminated=terminated,
                truncated=truncated,
                final_observed=final_observed,
                n_actions=self._kind.n_actions,
                action_bounds=self._kind.bounds,
            ),
            rewards=_joined(rewarded) if rewarded else None,
        )

    def close(self, final: np.ndarray) -> Block | None:
        """End the open episode, if there is one, as truncated with the given last observation."""
        if self.n_open == 0:
            return None
        observations, actions, rewards = self._open.pop()
        self.n_open -= len(observations)
        one = np.ones(1, bool)
        return self.add(observations, actions, rewards, np.array([len(observations) - 1]), ~one, one, final[None], one)

    def _keep(self, observations: np.ndarray, actions: np.ndarray, rewards: np.ndarray | None) -> None:
        if len(observations):
            self._open.append((observations, actions, rewards))
            self.n_open += len(observations)


def _joined(pieces: list[np.ndarray]) -> np.ndarray:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

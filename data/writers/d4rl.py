"""D4RL: one HDF5 file of flat arrays, one row a step, as CORL and d3rlpy's and d4rl's loaders read it.

observations, actions, next_observations   [N, ...]
rewards                                    [N] float32, left out without labels
terminals, timeouts                        [N] bool, on the last row of each episode; both where both are true
infos/next_observed                        [N] bool, False where next_observations repeats the step's own
                                           observation because what followed was not recorded
attributes                                 action_count, or action_low and action_high, if known; the dataset's name
                                           and digest, the labels' id and labeler
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import h5py
import numpy as np

from data.findings import Finding, Severity
from data.readers.reader import Block
from data.writers.writer import Contents, Writer


class D4RLWriter(Writer):
    """Writes D4RL-style HDF5."""

    kind: Literal["d4rl"] = "d4rl"

    def write(self, path: Path, contents: Contents, blocks: Iterable[Block]) -> list[Finding]:
        dataset = contents.dataset
        n = dataset.n_steps
        findings = []
        with h5py.File(path, "w") as file:
            columns = {
                "observations": (dataset.observation.shape, dataset.observation.dtype),
                "next_observations": (dataset.observation.shape, dataset.observation.dtype),
                "actions": (dataset.action.shape, dataset.action.dtype),
                "terminals": ((), "bool"),
                "timeouts": ((), "bool"),
                "infos/next_observed": ((), "bool"),
            }
            if contents.labels is not None:
                columns["rewards"] = ((), "float32")
            else:
                message = "written without 'rewards': no labels were asked for."
                findings.append(Finding(code="no-rewards", severity=Severity.NOTE, message=message))
            for key, (shape, dtype) in columns.items():
                file.create_dataset(key, (n, *shape), dtype)
            start = 0
            for block in blocks:
                stop = start + block.trajectories.n_steps
                for key, rows in _rows(block).items():
                    file[key][start:stop] = rows
                start = stop
            if dataset.n_actions is not None:
                file.attrs["action_count"] = dataset.n_actions
            if dataset.action_bounds is not None:
                file.attrs["action_low"], file.attrs["action_high"] = dataset.action_bounds
            file.attrs.update(contents.provenance)
        return findings


def _rows(block: Block) -> dict[str, np.ndarray]:
    """Columns of one block, one row a step."""
    episodes = block.trajectories
    at = episodes.observation_rows(np.arange(episodes.n_steps))
    last = episodes.offsets[1:] - 1
    flags = {key: np.zeros(episodes.n_steps, bool) for key in ("terminals", "timeouts")}
    flags["terminals"][last], flags["timeouts"][last] = episodes.terminated, episodes.truncated
    observed = np.ones(episodes.n_steps, bool)
    observed[last] = episodes.final_observed
    rows = {
        "observations": episodes.observations[at],
        "next_observations": episodes.observations[at + 1],
        "actions": np.asarray(episodes.actions),
        "infos/next_observed": observed,
        **flags,
    }
    return rows if block.rewards is None else rows | {"rewards": block.rewards}

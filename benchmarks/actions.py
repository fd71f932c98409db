"""How well `inverse_dynamics` recovers actions that it is not shown: `python -m benchmarks.actions FILE...`.

A tenth of each file's episodes keeps its actions, and the proxies for the others are compared with what was done there.
With `--lowest` the tenth is drawn from the half of the episodes with the lowest returns, as in the SS-ORL paper. With
`--no-final` no observation after an episode's last step is known, and R2 is also given for those last steps alone.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.recovery import read
from data.labels import episode_returns
from data.trajectories import Trajectories
from labelers.action_models import HeldOutActions, explained_variance
from labelers.evidence import Evidence
from labelers.inverse_dynamics import InverseDynamics


def labelled(trajectories: Trajectories, candidates: np.ndarray, count: int, seed: int) -> Evidence:
    """The actions of `count` episodes drawn from the candidates; those of the others are not known."""
    chosen = np.random.default_rng(seed).permutation(candidates)[:count]
    actions = np.array(trajectories.actions)
    actions[~np.isin(trajectories.episode_index, chosen)] = np.nan
    return Evidence("benchmark", actions=actions)


def without_final_observations(trajectories: Trajectories) -> Trajectories:
    observations = np.array(trajectories.observations)
    last = trajectories.offsets[1:] + np.arange(trajectories.n_episodes)
    observations[last] = observations[last - 1]
    return replace(trajectories, observations=observations, final_observed=np.zeros(trajectories.n_episodes, bool))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--fraction", type=float, default=0.1)
    parser.add_argument("--lowest", action="store_true")
    parser.add_argument("--no-final", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--members", type=int, default=InverseDynamics().members)
    parser.add_argument("--width", type=int, default=InverseDynamics().hidden[0])
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{'file':20} seed  known  R2 (each dimension)  held-out  z rms  in 2 std  linear  up  fit s  label s")
    for path in options.files:
        trajectories, rewards = read(path)
        order = np.argsort(episode_returns(rewards, trajectories.offsets), kind="stable")
        count = round(options.fraction * trajectories.n_episodes)
        if options.no_final:
            trajectories = without_final_observations(trajectories)
        for seed in range(options.seeds):
            candidates = order[: trajectories.n_episodes // 2] if options.lowest else order
            evidence = labelled(trajectories, candidates, count, seed)
            assert evidence.actions is not None
            model = InverseDynamics(seed=seed, members=options.members, hidden=(options.width, options.width))
            started = time.perf_counter()
            fitted = model.fit(trajectories, evidence, device=device)
            fitted_at = time.perf_counter()
            labels = fitted.label(trajectories, evidence.actions).actions.astype(np.float64)
            ended = time.perf_counter()
            rest = np.isnan(evidence.actions).any(1)
            truth = np.asarray(trajectories.actions, np.float64)
            error = labels - truth
            each = [explained_variance(error[rest, d, None], truth[rest, d, None]) for d in range(truth.shape[1])]
            found = HeldOutActions.model_validate(fitted.report["held_out"])
            columns = [
                f"{path.stem:20} {seed:4} {int((~rest).sum()):6} {explained_variance(error[rest], truth[rest]):.4f}",
                f"({' '.join(f'{r2:.2f}' for r2 in each)}) {found.r2:8.4f} {found.z_rms:6.2f}",
                f"{found.within_2_std:9.3f} {fitted.report['linear_r2']:7.3f}",
                f"{fitted.report['linear_r2_one_row_up']:.3f} {fitted_at - started:6.1f} {ended - fitted_at:6.1f}",
            ]
            if options.no_final:
                last = np.zeros(trajectories.n_steps, bool)
                last[trajectories.offsets[1:] - 1] = True
                columns.append(f"  last steps {explained_variance(error[rest & last], truth[rest & last]):.3f}")
                before = np.flatnonzero(rest & last & (trajectories.lengths > 1)[trajectories.episode_index])
                columns.append(f"{explained_variance(labels[before - 1] - truth[before], truth[before]):.3f}")
            print(" ".join(columns), flush=True)


if __name__ == "__main__":
    main()

"""How well rewards are learned from returns alone: `python -m benchmarks.bags [FILE...] [--model MODEL...]`.

Each file is read, `multiple_instance` is shown the returns of its episodes, and its labels are compared with the file's
rewards. Without files: a task whose rewards hang on what was seen before, judged on episodes that are new.
"""

from __future__ import annotations

import argparse
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from benchmarks.recovery import OneFile, read
from data.labels import episode_returns
from data.trajectories import Trajectories
from labelers.evidence import TrajectoryReturns
from labelers.multiple_instance import ModelName, MultipleInstance
from labelers.quality import correlation
from labelers.reward_model import HeldOut


def remembered(n_episodes: int, seed: int, lengths: tuple[int, int] = (5, 20)) -> tuple[Trajectories, np.ndarray]:
    """Episodes in which a number comes at each step, now and then with a sign, and their rewards [N] float32.

    A step earns its number times the last sign seen, and nothing before the first. No step shows what it is worth, but
    for those that show a sign. lengths: shortest and longest episode.
    """
    rng = np.random.default_rng(seed)
    n_steps = rng.integers(lengths[0], lengths[1] + 1, n_episodes)
    n = int(n_steps.sum())
    numbers, signs = rng.normal(size=n), np.where(rng.random(n) < 0.15, rng.choice([-1, 1], n), 0)
    offsets = np.concatenate([[0], np.cumsum(n_steps)]).astype(np.int64)
    rewards = np.zeros(n, np.float32)
    for start, stop in pairwise(offsets):
        last = 0.0
        for t in range(start, stop):
            last = float(signs[t] or last)
            rewards[t] = last * numbers[t]
    observations = np.zeros((n + n_episodes, 3), np.float32)
    observations[np.arange(n) + np.repeat(np.arange(n_episodes), n_steps)] = np.stack(
        [numbers, signs == 1, signs == -1], 1
    )
    data = Trajectories(
        observations=observations,
        actions=np.zeros((n, 1), np.float32),
        offsets=offsets,
        terminated=np.zeros(n_episodes, bool),
        truncated=np.ones(n_episodes, bool),
        final_observed=np.zeros(n_episodes, bool),
    )
    return data, rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--model", nargs="+", choices=get_args(ModelName), default=get_args(ModelName))
    parser.add_argument("--fraction", type=float, default=1.0, help="of the returns to be shown")
    parser.add_argument("--episodes", type=int, default=1000, help="of the task without a file")
    parser.add_argument("--longest", type=int, default=20, help="of these episodes; the shortest is a quarter of it")
    parser.add_argument("--members", type=int, default=MultipleInstance().members)
    parser.add_argument("--hidden", type=int, default=MultipleInstance().hidden)
    parser.add_argument("--steps", type=int, default=MultipleInstance().steps)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{'data':19} {'model':23} seed   steps  returns  held-out  best step           fit s  label s")
    for path in options.files or [None]:
        for model in options.model:
            for seed in range(options.seeds):
                if path is None:
                    lengths = (max(1, options.longest // 4), options.longest)
                    trajectories, rewards = remembered(options.episodes, seed, lengths)
                    judged, judged_rewards = remembered(200, options.seeds + seed, lengths)
                else:
                    trajectories, rewards = judged, judged_rewards = read(path)
                shown = TrajectoryReturns(fraction=options.fraction, seed=seed)
                labeler = MultipleInstance(
                    returns=shown,
                    model=model,
                    # Nothing is to be seen in advance of the next number.
                    next_observations=path is not None,
                    members=options.members,
                    hidden=options.hidden,
                    steps=options.steps,
                    seed=seed,
                )
                evidence = shown.resolve(OneFile(trajectories, rewards))
                started = time.perf_counter()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    fitted = labeler.fit(trajectories, evidence, device=device)
                fitted_at = time.perf_counter()
                labels = fitted.label(judged).rewards
                ended = time.perf_counter()
                steps = correlation(labels, judged_rewards).pearson
                offsets = judged.offsets
                returns = correlation(episode_returns(labels, offsets), episode_returns(judged_rewards, offsets))
                held_out = HeldOut.model_validate(fitted.report["held_out"])
                columns = [
                    f"{'remembered' if path is None else path.stem:19} {model:23} {seed:4}",
                    f"{steps:7.3f} {returns.spearman:8.3f} {held_out.rmse / held_out.rmse_of_mean:9.3f}",
                    f" {fitted.report['best_step']!s:18} {fitted_at - started:6.1f} {ended - fitted_at:8.1f}",
                ]
                print(" ".join(columns), flush=True)


if __name__ == "__main__":
    main()

"""How well closeness to demonstrations agrees with true rewards: `python -m benchmarks.imitation FILE DEMONSTRATIONS`.

`nearest_demonstration` and `optimal_transport` label the same episodes from the best of the demonstrations. An episode
whose transport does not converge is labelled by the exact solver, with a warning.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.recovery import read
from data.labels import episode_returns
from labelers.evidence import Demonstrations, Evidence
from labelers.nearest_demonstration import NearestDemonstration
from labelers.optimal_transport import OptimalTransport
from labelers.quality import correlation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("demonstrations", type=Path)
    parser.add_argument("--top", type=int, default=1, help="demonstrations, the best by return")
    options = parser.parse_args()
    trajectories, rewards = read(options.file)
    experts, expert_rewards = read(options.demonstrations)
    best = np.argsort(-episode_returns(expert_rewards, experts.offsets), kind="stable")[: options.top]
    chosen = experts.select(best)
    evidence = Evidence("demonstrations", demonstrations=chosen)
    named = Demonstrations(top=options.top, by="source")
    returns = episode_returns(rewards, trajectories.offsets)
    labelers: dict[str, NearestDemonstration | OptimalTransport] = {
        "nearest, (s, a, s')": NearestDemonstration(demonstrations=named),
        "nearest, (s, s')": NearestDemonstration(demonstrations=named, match="ss"),
        "optimal_transport": OptimalTransport(demonstrations=named, not_converged="warning"),
    }
    print(f"{options.file.stem}: {trajectories.n_steps:,} steps, {chosen.n_steps:,} to compare with")
    print(f"{'':20} Pearson steps  Spearman steps  Spearman returns  seconds")
    for name, labeler in labelers.items():
        started = time.perf_counter()
        labels = labeler.fit(trajectories, evidence, device=torch.device("cpu")).label(trajectories).rewards
        seconds = time.perf_counter() - started
        steps = correlation(labels, rewards)
        of_returns = correlation(episode_returns(labels, trajectories.offsets), returns).spearman
        print(f"{name:20} {steps.pearson:13.3f} {steps.spearman:15.3f} {of_returns:17.3f} {seconds:8.1f}", flush=True)


if __name__ == "__main__":
    main()

"""How well learned labelers recover rewards that are known: `python benchmarks/recovery.py FILE... [--fraction 0.01]`.

Each file is read, a part of its rewards is shown to `reward_model`, and its labels are compared with the rewards of the
transitions that it was not shown.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch

from data.errors import ConfigurationError
from data.readers import recognise
from data.trajectories import Trajectories, concatenate
from labelers.evidence import LabelledTransitions
from labelers.quality import correlation
from labelers.reward_model import HeldOut, RewardModel


def read(path: Path) -> tuple[Trajectories, np.ndarray]:
    """All episodes of a file in memory, and the file's own rewards [N]."""
    with recognise(path).open(path) as source:
        blocks = list(source.blocks())
    rewards = [block.rewards for block in blocks if block.rewards is not None]
    return concatenate([block.trajectories for block in blocks]), np.concatenate(rewards)


class OneFile:
    """A dataset and its rewards, as evidence is looked up in."""

    def __init__(self, trajectories: Trajectories, rewards: np.ndarray) -> None:
        self._trajectories, self._rewards = trajectories, rewards

    def trajectories(self, name: str) -> Trajectories:
        return self._trajectories

    def rewards(self, name: str, labels: str) -> np.ndarray:
        return self._rewards

    def demonstrations_of_dataset(self) -> str | None:
        raise ConfigurationError("there are no demonstrations here")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--fraction", type=float, default=0.01)
    parser.add_argument("--per", choices=["step", "episode"], default="step")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=RewardModel().steps)
    parser.add_argument("--no-next", action="store_true", help="learn from (s, a) alone")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{'file':22} seed  known  Pearson  Spearman  RMSE/std  held-out  z rms  in 2 std  fit s  label s")
    for path in options.files:
        trajectories, rewards = read(path)
        for seed in range(options.seeds):
            known = LabelledTransitions(fraction=options.fraction, per=options.per, seed=seed)
            model = RewardModel(rewards=known, seed=seed, steps=options.steps, next_observations=not options.no_next)
            evidence = known.resolve(OneFile(trajectories, rewards))
            assert evidence.rewards is not None
            started = time.perf_counter()
            fitted = model.fit(trajectories, evidence, device=device)
            fitted_at = time.perf_counter()
            labels = fitted.label(trajectories, evidence.rewards).rewards
            ended = time.perf_counter()
            rest = np.isnan(evidence.rewards)
            found = correlation(labels[rest], rewards[rest])
            rmse = np.sqrt(np.mean((labels[rest].astype(np.float64) - rewards[rest]) ** 2)) / rewards[rest].std()
            held_out = HeldOut.model_validate(fitted.report["held_out"])
            columns = [
                f"{path.stem:22} {seed:4} {int((~rest).sum()):6} {found.pearson:8.4f} {found.spearman:9.4f}",
                f"{rmse:9.4f} {held_out.rmse / held_out.rmse_of_mean:9.4f} {held_out.z_rms:6.2f}",
                f"{held_out.within_2_std:9.3f} {fitted_at - started:6.1f} {ended - fitted_at:8.1f}",
            ]
            print(" ".join(columns), flush=True)


if __name__ == "__main__":
    main()

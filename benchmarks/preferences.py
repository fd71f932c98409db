"""How well rewards are learned from preferences: `python -m benchmarks.preferences FILE... [--pairs 500]`.

Each file is read, an annotator states preferences by the file's own rewards, `preference` learns from them alone, and
its labels are compared with the file's rewards.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path

import numpy as np
import torch

from benchmarks.recovery import OneFile, read
from data.labels import episode_returns
from labelers.preference import HeldOut, Preference
from labelers.preferences import Annotator
from labelers.quality import correlation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--pairs", type=int, default=Annotator().pairs)
    parser.add_argument("--length", type=int, default=Annotator().length)
    parser.add_argument("--errors", type=float, default=0.0, help="how often the annotator states the opposite")
    parser.add_argument("--tie", type=float, default=0.0, help="sums that differ by no more are a tie")
    parser.add_argument("--discount", type=float, default=1.0, help="the annotator's myopia")
    parser.add_argument("--model", choices=["mlp", "transformer"], default="mlp")
    parser.add_argument("--zero", choices=["lowest", "mean"], default="lowest")
    parser.add_argument("--plain", action="store_true", help="average members as they are")
    parser.add_argument("--steps", type=int, default=Preference().steps)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{'file':19} seed  steps  returns  1 a step  accuracy  sure  loss  fit s  label s")
    for path in options.files:
        trajectories, rewards = read(path)
        returns = episode_returns(rewards, trajectories.offsets)
        # What is said of the returns by rewards that are all 1.
        of_length = correlation(trajectories.lengths.astype(np.float64), returns).spearman
        for seed in range(options.seeds):
            annotator = Annotator(
                pairs=options.pairs,
                length=options.length,
                error_rate=options.errors,
                tie=options.tie,
                discount=options.discount,
                seed=seed,
            )
            labeler = Preference(
                preferences=annotator,
                model=options.model,
                zero=options.zero,
                normalise=not options.plain,
                steps=options.steps,
                seed=seed,
            )
            evidence = annotator.resolve(OneFile(trajectories, rewards))
            started = time.perf_counter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                fitted = labeler.fit(trajectories, evidence, device=device)
            fitted_at = time.perf_counter()
            labels = fitted.label(trajectories).rewards
            ended = time.perf_counter()
            found = HeldOut.model_validate(fitted.report["held_out"])
            print(
                f"{path.stem:19} {seed:4} {correlation(labels, rewards).pearson:6.3f}",
                f"{correlation(episode_returns(labels, trajectories.offsets), returns).spearman:8.4f}",
                f"{'     same' if of_length is None else f'{of_length:9.4f}'} {found.accuracy:9.3f}",
                f"{found.confidence:5.3f} {found.loss:5.3f} {fitted_at - started:6.1f} {ended - fitted_at:8.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()

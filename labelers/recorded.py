"""`recorded`: rewards that someone else computed, joined to the steps they were computed for.

Labels are made for one version of the data: rows in another order, other episodes or one edited action, and a join by
row number is wrong without a sign of it. So the file's rows name episode and step, and the file names the dataset that
they were made for, by its digest (`assay show` prints it).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from data.digests import ColumnHasher, digest_of
from data.errors import DatasetError
from data.progress import Progress, silent
from data.readers.files import check_readable
from data.trajectories import Trajectories
from labelers.evidence import Evidence, EvidenceFile, EvidenceSource
from labelers.labeler import Labeler
from labelers.source import FittedSource

MADE_FOR = "assay.dataset"
"""Key of the file's metadata that holds the digest of the dataset its rewards are for."""

COLUMNS = ("episode", "step", "reward")


class RewardFile(EvidenceFile):
    """A table with the columns episode, step (both from 0) and reward, a row a step in any order: Parquet or CSV.

    made_for: digest of the dataset that the rewards were computed for, if the file
        does not state it (in Parquet under the metadata key `assay.dataset`).
    """

    made_for: str | None = None

    def resolve(self, source: EvidenceSource) -> Evidence:
        """Raises DatasetError if the file is not whole, is for other data, or has not one reward for each step."""
        trajectories = source.trajectories("self")
        table, stated = self._read()
        if stated is not None and self.made_for is not None and stated != self.made_for:
            raise DatasetError(
                f"{self.path.name}: made for {stated} by its own word, and for {self.made_for} by yours."
            )
        made_for, ours = stated or self.made_for, trajectories.digest()
        if made_for is None:
            raise DatasetError(
                f"{self.path.name}: it does not say for which dataset its rewards were made. If it was this one, say "
                f"`made_for: {ours}` beside its path."
            )
        if made_for != ours:
            raise DatasetError(
                f"{self.path.name}: its rewards were made for dataset {made_for}, and this is dataset {ours}. Rewards "
                "are not carried over by position: make them for this dataset."
            )
        rewards = _joined(table, trajectories, self.path.name)
        hasher = ColumnHasher()
        hasher.update(rewards)
        return Evidence(digest=digest_of({"rewards": hasher.digest()}), rewards=rewards)

    def _read(self) -> tuple[pl.DataFrame, str | None]:
        """The table, and the dataset that it says it was made for."""
        check_readable(self.path)
        stated = None
        try:
            with self.path.open("rb") as file:
                is_parquet = file.read(4) == b"PAR1"
            if is_parquet:
                stated = (pq.read_schema(self.path).metadata or {}).get(MADE_FOR.encode(), b"").decode() or None
                table = pl.read_parquet(self.path)
            else:
                table = pl.read_csv(self.path)
        except (pl.exceptions.PolarsError, pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DatasetError(
                f"{self.path.name}: not a whole table in Parquet or CSV ({str(error).splitlines()[0]})."
            ) from error
        missing = [name for name in COLUMNS if name not in table.columns]
        if missing:
            raise DatasetError(
                f"{self.path.name}: no column '{missing[0]}'; it has {', '.join(table.columns[:12])}. "
                f"Needed: {', '.join(COLUMNS)}."
            )
        wrong = [n for n in ("episode", "step") if not table[n].dtype.is_integer() or table[n].null_count()]
        if not table["reward"].dtype.is_numeric():
            wrong.append("reward")
        if wrong:
            raise DatasetError(
                f"{self.path.name}: '{wrong[0]}' is {table[wrong[0]].dtype} or has gaps: episode and step are whole "
                "numbers, reward is a number."
            )
        return table, stated


def _joined(table: pl.DataFrame, trajectories: Trajectories, name: str) -> np.ndarray:
    """[N] float32, by episode and step. Raises DatasetError naming the first that does not fit."""
    episode, step = (table[key].to_numpy().astype(np.int64) for key in ("episode", "step"))
    rewards = table["reward"].cast(pl.Float32).fill_null(float("nan")).to_numpy()
    lengths = trajectories.lengths
    known = (episode >= 0) & (episode < len(lengths))
    known[known] = (step[known] >= 0) & (step[known] < lengths[episode[known]])
    if not known.all():
        row = int(np.flatnonzero(~known)[0])
        raise DatasetError(
            f"{name}: row {row} is for episode {episode[row]}, step {step[row]}: the dataset has no such step."
        )
    rows = trajectories.offsets[episode] + step
    counts = np.bincount(rows, minlength=trajectories.n_steps)
    finite = np.isfinite(rewards)
    for wrong, said in ((counts > 1, "has several rewards"), (counts == 0, "has no reward")):
        if wrong.any():
            place = int(np.flatnonzero(wrong)[0])
            e = int(trajectories.episode_index[place])
            raise DatasetError(f"{name}: episode {e}, step {place - trajectories.offsets[e]} {said}: it needs one.")
    if not finite.all():
        row = int(np.flatnonzero(~finite)[0])
        raise DatasetError(
            f"{name}: the reward of episode {episode[row]}, step {step[row]} is {rewards[row]}: it must be a number."
        )
    joined = np.empty(trajectories.n_steps, np.float32)
    joined[rows] = rewards
    return joined


def write_reward_file(path: Path, rewards: np.ndarray, trajectories: Trajectories) -> None:
    """Write [N] rewards as such a Parquet table, for `trajectories`; `path` must not exist (FileExistsError)."""
    table = pa.table(
        {
            "episode": trajectories.episode_index,
            "step": np.arange(trajectories.n_steps) - trajectories.offsets[trajectories.episode_index],
            "reward": np.asarray(rewards, np.float32),
        }
    )
    with path.open("xb") as file:
        pq.write_table(table.replace_schema_metadata({MADE_FOR: trajectories.digest()}), file)


class Recorded(Labeler):
    """The rewards of a file, unchanged; its evidence is those rewards."""

    kind: Literal["recorded"] = "recorded"
    rewards: RewardFile

    def fit(
        self, trajectories: Trajectories, evidence: Evidence, *, device: torch.device, progress: Progress = silent
    ) -> FittedSource:
        return FittedSource()

"""Preferences between segments as evidence: from a file of human labels, or drawn from a label set for a study.

A file is JSON, an object with these names, or Parquet, with these columns and the rest in the metadata of its schema
(or in the specification):

    encoding  what a label is, of `Encoding`. A file that does not say is refused: read the wrong way round, every
              preference is flipped and nothing looks wrong
    length    steps of every segment
    starts    [Q, 2] first step of either segment, counted over the whole dataset; or [Q, 2, 2] episode and step in it.
              In Parquet the columns `first` and `second`; or `first_episode`, `first_step`, `second_episode` and
              `second_step`
    labels    [Q], or [Q, 2] if one-hot; in Parquet the column `label`
    dataset   digest of the dataset that was shown, if it is known; any other dataset is then refused

Episodes, steps and pairs count from 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, JsonValue

from data.digests import ColumnHasher, digest_of
from data.errors import ConfigurationError, DatasetError
from data.findings import Finding, Severity
from data.readers.files import check_readable, read_json
from data.trajectories import Trajectories
from labelers.evidence import Evidence, EvidenceFile, EvidenceSource, EvidenceSpec, Preferences, Reference


class Encoding(StrEnum):
    """What the label of a pair is."""

    PROBABILITY_FIRST = "probability_first"  # that the first is better: 1, 0, or between; 0.5 is a tie
    ONE_HOT = "one_hot"  # [1, 0] if the first is better, [0, 1] if the second, [0.5, 0.5] a tie
    SIGN = "sign"  # 1 if the first is better, -1 if the second, 0 a tie
    WINNER = "winner"  # index of the better one: 0 the first, 1 the second; -1 a tie


class PreferenceFile(EvidenceFile):
    """Preferences from a file, as the head of this module describes it; pairs that cannot be used are reported.

    encoding, length: where the file does not state them.
    """

    kind: Literal["file"] = "file"
    encoding: Encoding | None = None
    length: int | None = Field(default=None, ge=1)

    def resolve(self, source: EvidenceSource) -> Evidence:
        """Raises DatasetError, besides what `read` raises, if the file is of other data or no pair can be used."""
        stated, trajectories = self.read(), source.trajectories("self")
        if stated.dataset is not None and stated.dataset != (ours := trajectories.digest()):
            raise DatasetError(
                f"{self.path.name}: its preferences are between segments of dataset {stated.dataset}, and this is "
                f"dataset {ours}. Rows of one mean nothing in another: label the dataset that was shown."
            )
        rows, invalid = _checked(stated, trajectories)
        usable = np.flatnonzero(~np.isin(np.arange(len(rows)), [pair for pair, _ in invalid]))
        findings = [*stated.findings, *(finding for _, finding in invalid)]
        if len(usable) == 0:
            first = invalid[0][1].message if invalid else "it holds no pairs."
            raise DatasetError(f"{self.path.name}: none of {len(rows):,} pairs can be used: {first}")
        starts, first_better = rows[usable], stated.first_better[usable]
        findings += _repeated(usable, starts, first_better)
        return _evidence(Preferences(starts, stated.length, first_better, tuple(findings)))

    def read(self) -> Stated:
        """What the file says, before it is held against a dataset.

        Raises DatasetError naming file, key and pair if it cannot be understood, and if it does not state its encoding.
        """
        name = self.path.name
        check_readable(self.path)
        with self.path.open("rb") as stream:
            parquet = stream.read(4) == b"PAR1"
        values = _parquet_values(self.path) if parquet else read_json(self.path)
        encoding = _agreed(name, "encoding", values.get("encoding"), self.encoding)
        if encoding is None:
            raise DatasetError(
                f"{name}: it does not state its encoding, and 1 may mean the first segment or the second. Say "
                f"`encoding: {' | '.join(Encoding)}` in the file or beside its path."
            )
        if encoding not in tuple(Encoding):
            raise DatasetError(f"{name}: 'encoding' is {encoding!r}; expected one of {', '.join(Encoding)}.")
        length = _agreed(name, "length", values.get("length"), self.length)
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise DatasetError(f"{name}: 'length' is {length!r}; expected the number of steps of every segment.")
        dataset = values.get("dataset")
        if dataset is not None and not isinstance(dataset, str):
            raise DatasetError(f"{name}: 'dataset' is {dataset!r}; expected the digest of a dataset, or nothing.")
        starts = _array(name, "starts", values)
        if starts.size == 0:
            raise DatasetError(f"{name}: it holds no pairs.")
        if starts.dtype.kind not in "iu" or starts.shape[1:] not in ((2,), (2, 2)):
            raise DatasetError(
                f"{name}: 'starts' is {starts.dtype} {starts.shape}; expected whole numbers, for each pair two steps "
                "[Q, 2] or twice episode and step [Q, 2, 2]."
            )
        labels = _array(name, "labels", values)
        if len(labels) != len(starts):
            raise DatasetError(f"{name}: {len(labels):,} 'labels' for {len(starts):,} pairs of 'starts'.")
        unknown = sorted(values.keys() - {"encoding", "length", "dataset", "starts", "labels"})
        findings = [
            Finding(code="key-unknown", severity=Severity.NOTE, message=f"{name}: '{key}' is not used.")
            for key in unknown
        ]
        first_better = _probabilities(name, Encoding(encoding), labels)
        return Stated(starts.astype(np.int64), length, first_better, dataset, tuple(findings))


@dataclass(frozen=True, eq=False)
class Stated:
    """What a file says. starts: [Q, 2] steps, or [Q, 2, 2] episodes and steps. first_better: [Q] float32."""

    starts: np.ndarray
    length: int
    first_better: np.ndarray
    dataset: str | None
    findings: tuple[Finding, ...]


class Annotator(EvidenceSpec):
    """Preferences that a simulated annotator states about random segments (B-Pref: Lee et al. 2021, section 4).

    labels: the label set that the annotator goes by. pairs: how many are shown; starts of segments are uniform over all
        that fit into an episode, and the two of a pair differ. length: steps of every segment.
    discount: in (0, 1], the myopia: t steps before a segment's end a reward counts discount ** t.
    tie: sums of rewards (not discounted) that differ by no more are a tie. skip: a pair of which neither sum is above
        it is not answered; it is not replaced. Both in the units of the label set. error_rate: in [0, 1], how often a
        preference is stated the wrong way round; ties are not.
    One seed shows the same pairs and errs on the same ones whatever the other settings.
    Unlike the official code, equal sums are a tie, and not a win for the first.
    """

    kind: Literal["annotator"] = "annotator"
    labels: str = "source"
    pairs: int = Field(default=500, ge=1)
    length: int = Field(default=50, ge=1)
    discount: float = Field(default=1.0, gt=0, le=1)
    tie: float = Field(default=0.0, ge=0)
    skip: float | None = None
    error_rate: float = Field(default=0.0, ge=0, le=1)
    seed: int = Field(default=0, ge=0)

    def references(self, field: str) -> list[Reference]:
        return [Reference("self", self.labels, (field, "labels"))]

    def resolve(self, source: EvidenceSource) -> Evidence:
        """Raises ConfigurationError if there are no two segments to compare, or the annotator skips every pair."""
        rewards, trajectories = source.rewards("self", self.labels), source.trajectories("self")
        starts, findings = self._shown(trajectories)
        segments = rewards[starts[:, :, None] + np.arange(self.length)].astype(np.float64)
        sums = segments.sum(2)
        answered = np.full(self.pairs, True) if self.skip is None else sums.max(1) > self.skip
        if not answered.any():
            raise ConfigurationError(
                f"skip: {self.skip}: the annotator skips all {self.pairs:,} pairs; the highest sum of rewards of a "
                f"segment is {sums.max():.6g}."
            )
        if skipped := int((~answered).sum()):
            findings.append(
                Finding(
                    code="pairs-skipped",
                    severity=Severity.NOTE,
                    message=f"the annotator skips {skipped:,} of {self.pairs:,} pairs.",
                    count=skipped,
                )
            )
        seen = (segments * self.discount ** np.arange(self.length)[::-1]).sum(2)
        stated = (1 + np.sign(seen[:, 0] - seen[:, 1])) / 2
        wrong = np.random.default_rng([self.seed, 1]).random(self.pairs) < self.error_rate
        stated = np.where(wrong, 1 - stated, stated)
        stated = np.where(np.abs(sums[:, 0] - sums[:, 1]) <= self.tie, 0.5, stated).astype(np.float32)
        return _evidence(Preferences(starts[answered], self.length, stated[answered], tuple(findings)))

    def _shown(self, trajectories: Trajectories) -> tuple[np.ndarray, list[Finding]]:
        """starts [pairs, 2] of the segments shown, and which episodes are too short to be shown."""
        fitting = np.maximum(trajectories.lengths - self.length + 1, 0)
        n = int(fitting.sum())
        if n < 2:
            raise ConfigurationError(
                f"length: {self.length}: there are no two segments to compare; the longest episode has "
                f"{trajectories.lengths.max():,} steps."
            )
        place = np.random.default_rng(self.seed).integers([n, n - 1], size=(self.pairs, 2))
        place[:, 1] += place[:, 1] >= place[:, 0]
        episode = np.searchsorted(np.cumsum(fitting), place, side="right")
        starts = trajectories.offsets[episode] + place - (np.cumsum(fitting) - fitting)[episode]
        findings = []
        if short := int((fitting == 0).sum()):
            hidden = int(trajectories.lengths[fitting == 0].sum())
            findings.append(
                Finding(
                    code="episodes-never-shown",
                    severity=Severity.WARNING,
                    message=f"{short:,} of {len(fitting):,} episodes ({hidden:,} steps) are shorter than segments of "
                    f"{self.length} steps, and no pair shows them: make segments shorter to see them.",
                    count=short,
                )
            )
        return starts, findings


AnyPreferences: TypeAlias = Annotated[PreferenceFile | Annotator, Field(discriminator="kind")]


def _evidence(preferences: Preferences) -> Evidence:
    """Identified by the pairs that are used."""
    hashers = [ColumnHasher(), ColumnHasher()]
    for hasher, column in zip(hashers, (preferences.starts, preferences.first_better), strict=True):
        hasher.update(column)
    columns: list[JsonValue] = [hasher.digest() for hasher in hashers]
    said: JsonValue = {"length": preferences.length, "columns": columns}
    return Evidence(digest=digest_of({"preferences": said}), preferences=preferences)


def _parquet_values(path: Path) -> dict[str, JsonValue]:
    """The values of a JSON file, from columns and metadata of a Parquet file."""
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise DatasetError(f"{path.name}: not a whole Parquet file: {error}.") from error
    columns: dict[str, list[JsonValue]] = {name: table[name].to_pylist() for name in table.column_names}
    values: dict[str, JsonValue] = {}
    for key, value in (table.schema.metadata or {}).items():
        if key in (b"encoding", b"length", b"dataset"):
            text = value.decode()
            values[key.decode()] = int(text) if key == b"length" and text.isdecimal() else text
    episodes = ["first_episode", "first_step", "second_episode", "second_step"]
    if "first" in columns and "second" in columns:
        values["starts"] = [list(pair) for pair in zip(columns.pop("first"), columns.pop("second"), strict=True)]
    elif all(name in columns for name in episodes):
        rows = zip(*(columns.pop(name) for name in episodes), strict=True)
        values["starts"] = [[[a, b], [c, d]] for a, b, c, d in rows]
    if "label" in columns:
        values["labels"] = columns.pop("label")
    return {**dict.fromkeys(columns), **values}


def _agreed(name: str, key: str, inside: JsonValue, said: JsonValue) -> JsonValue:
    """What the file or the specification states; both may if they agree."""
    if inside is not None and said is not None and inside != said:
        raise DatasetError(f"{name}: '{key}' is {inside} in the file and {said} beside its path: which is right?")
    return inside if said is None else said


def _array(name: str, key: str, values: Mapping[str, JsonValue]) -> np.ndarray:
    if values.get(key) is None:
        columns = {"starts": "`first` and `second`", "labels": "`label`"}[key]
        raise DatasetError(
            f"{name}: there is no '{key}' (in Parquet: {columns}). There is: {', '.join(sorted(values)) or 'nothing'}."
        )
    try:
        array = np.asarray(values[key])
    except ValueError as error:
        raise DatasetError(f"{name}: '{key}' has rows of different shapes.") from error
    if array.dtype.kind not in "iuf":
        raise DatasetError(f"{name}: '{key}' holds something that is no number (numpy makes it {array.dtype}).")
    return array


def _probabilities(name: str, encoding: Encoding, labels: np.ndarray) -> np.ndarray:
    """[Q] float32, probability that the first is better. Raises DatasetError for the first label that cannot be."""
    expected = (2,) if encoding == Encoding.ONE_HOT else ()
    if labels.shape[1:] != expected:
        raise DatasetError(
            f"{name}: labels are {encoding}, so {'two numbers' if expected else 'one number'} a pair; found "
            f"'labels' of shape {labels.shape}."
        )
    match encoding:
        case Encoding.PROBABILITY_FIRST:
            right, first, meant = (labels >= 0) & (labels <= 1), labels, "from 0 to 1"
        case Encoding.ONE_HOT:
            # Written in few digits, .333 and .667 are meant to add up to 1.
            right = (labels >= 0).all(1) & (np.abs(labels.sum(1) - 1) <= 1e-3)
            first, meant = labels[:, 0], "two numbers that are not negative and add up to 1"
        case Encoding.SIGN:
            right, first, meant = np.isin(labels, [1, -1, 0]), (1 + labels) / 2, "1 (first), -1 (second) or 0 (tie)"
        case Encoding.WINNER:
            right, first = np.isin(labels, [0, 1, -1]), np.where(labels < 0, 0.5, 1 - labels)
            meant = "0 (first), 1 (second) or -1 (tie)"
    if not right.all():
        pair = int(np.flatnonzero(~right)[0])
        raise DatasetError(
            f"{name}: the label of pair {pair} is {labels[pair].tolist()}; as {encoding} it is {meant}. Perhaps the "
            "encoding is another."
        )
    return first.astype(np.float32)


def _checked(stated: Stated, trajectories: Trajectories) -> tuple[np.ndarray, list[tuple[int, Finding]]]:
    """starts [Q, 2] as steps of the whole dataset, and what is wrong with which pair."""
    offsets, n_steps, last = trajectories.offsets, trajectories.n_steps, trajectories.n_episodes - 1
    if stated.starts.ndim == 3:
        episode, step = stated.starts[..., 0], stated.starts[..., 1]
        exists = (episode >= 0) & (episode <= last)
        episode = np.clip(episode, 0, last)
        rows = offsets[episode] + step
        outside = ~exists | (step < 0) | (step >= trajectories.lengths[episode])
    else:
        rows = stated.starts
        outside = (rows < 0) | (rows + stated.length > n_steps)
        episode = np.clip(np.searchsorted(offsets, rows, side="right") - 1, 0, last)
    crosses = ~outside & (rows + stated.length > offsets[episode + 1])
    itself = (rows[:, 0] == rows[:, 1]) & (stated.first_better != 0.5)

    def wrong() -> Iterator[tuple[int, str, str, int | None]]:
        for pair, side in np.argwhere(outside | crosses).tolist():
            which, row, e = ("first", "second")[side], int(rows[pair, side]), int(episode[pair, side])
            if crosses[pair, side]:
                said = f"rows {row} to {row + stated.length - 1}, runs over the end of episode {e} (row "
                yield pair, "segment-crosses-episode-end", f"its {which} segment, {said}{offsets[e + 1] - 1})", e
            elif stated.starts.ndim == 3:
                place = "episode {}, step {}".format(*stated.starts[pair, side])
                yield pair, "segment-outside-dataset", f"its {which} segment, from {place}, is not in the dataset", None
            else:
                said = f"rows {row} to {row + stated.length - 1}, leaves the dataset (rows 0 to {n_steps - 1})"
                yield pair, "segment-outside-dataset", f"its {which} segment, {said}", None
        for pair in np.flatnonzero(itself & ~(outside | crosses).any(1)).tolist():
            said = f"it compares the segment at row {rows[pair, 0]} with itself and is no tie"
            yield pair, "segment-compared-with-itself", said, int(episode[pair, 0])

    found = []
    for pair, code, said, where in sorted(wrong(), key=lambda problem: problem[0]):
        message = f"pair {pair} is not used: {said}."
        found.append((pair, Finding(code=code, severity=Severity.WARNING, message=message, episode=where)))
    return rows, found


def _repeated(pairs: np.ndarray, starts: np.ndarray, first_better: np.ndarray) -> Iterator[Finding]:
    """Pairs of segments that were shown before, and whether the answer was another; all of them count.

    pairs: [Q] numbers in the file. starts, first_better: of these.
    """
    earlier: dict[tuple[int, int], int] = {}
    for index, (a, b) in enumerate(starts.tolist()):
        before = earlier.setdefault((min(a, b), max(a, b)), index)
        if before == index:
            continue
        swapped = a != b and a == starts[before, 1]
        answer = 1 - first_better[index] if swapped else first_better[index]
        order = " in the other order" if swapped else ""
        if np.sign(answer - 0.5) == np.sign(first_better[before] - 0.5):
            code, severity, said = "pair-repeated", Severity.NOTE, "and agrees"
        else:
            code, severity, said = "pair-contradicted", Severity.WARNING, "and answers otherwise"
        yield Finding(
            code=code,
            severity=severity,
            message=f"pair {pairs[index]} shows the segments of pair {pairs[before]}{order} {said}; both count.",
        )

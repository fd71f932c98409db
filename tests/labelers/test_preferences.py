"""Preferences as evidence: what labels in a file mean, which pairs can be used, and what an annotator states."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from data.errors import ConfigurationError, DatasetError
from data.trajectories import Trajectories
from labelers.evidence import Preferences
from labelers.preferences import Annotator, PreferenceFile


class OneDataset:
    """A dataset of given lengths, and its rewards."""

    def __init__(self, lengths: tuple[int, ...], rewards: np.ndarray | None = None) -> None:
        n, e = sum(lengths), len(lengths)
        self.data = Trajectories(
            observations=np.arange(n + e, dtype=np.float32)[:, None],
            actions=np.zeros((n, 1), np.float32),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            terminated=np.ones(e, bool),
            truncated=np.zeros(e, bool),
            final_observed=np.ones(e, bool),
        )
        self._rewards = rewards

    def trajectories(self, name: str) -> Trajectories:
        assert name == "self"
        return self.data

    def rewards(self, name: str, labels: str) -> np.ndarray:
        assert (name, labels) == ("self", "source")
        assert self._rewards is not None, "rewards are looked up that no file names"
        return self._rewards

    def demonstrations_of_dataset(self) -> str | None:
        return None


THREE = OneDataset((20, 15, 25))
STARTS = [[0, 22], [16, 40], [5, 55], [-3, 10], [12, 12], [2, 36], [2, 36], [36, 2], [27, 52], [0, 22]]
LABELS = [1, 1, 0, 1, 1, 0, 1, 1, 0.5, 1]
"""Ten pairs of segments of 8 steps in episodes of 20, 15 and 25: rows 0-19, 20-34, 35-59.

Pair 1 runs over an end (rows 16-23), pairs 2 and 3 leave the dataset (55-62; -3), pair 4 compares a segment with
itself. Pairs 5 and 6 contradict each other, pair 7 is pair 5 in the other order, pair 9 is pair 0 again. Of pair 8 one
segment ends exactly where an episode does (27-34), the other where the dataset does (52-59).
"""


def written(folder: Path, **values: object) -> Path:
    path = folder / "pairs.json"
    whole = {"encoding": "probability_first", "length": 8, "starts": STARTS, "labels": LABELS, **values}
    path.write_text(json.dumps({key: value for key, value in whole.items() if value is not None}))
    return path


def read(path: Path, source: OneDataset = THREE, **settings: object) -> Preferences:
    found = PreferenceFile.model_validate({"path": path, **settings}).resolve(source).preferences
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("encoding", "labels"),
    [
        ("probability_first", [1.0, 0.0, 0.5]),
        ("one_hot", [[1, 0], [0, 1], [0.5, 0.5]]),
        ("sign", [1, -1, 0]),
        ("winner", [0, 1, -1]),
    ],
)
def test_every_encoding_comes_to_the_same_probabilities(encoding: str, labels: object, tmp_path: Path) -> None:
    found = read(written(tmp_path, encoding=encoding, labels=labels, starts=[[0, 22], [2, 36], [27, 52]]))
    assert found.first_better.dtype == np.float32
    assert found.first_better.tolist() == [1, 0, 0.5]
    assert found.starts.tolist() == [[0, 22], [2, 36], [27, 52]]


@pytest.mark.parametrize("encoding", ["probability_first", "winner"])
def test_a_file_that_does_not_state_its_encoding_asks_and_is_read_as_answered(encoding: str, tmp_path: Path) -> None:
    path = written(tmp_path, encoding=None, labels=[1, 0], starts=[[0, 22], [2, 36]])
    with pytest.raises(
        DatasetError,
        match=r"pairs\.json: it does not state its encoding.*: probability_first \| one_hot \| sign \| winner`",
    ):
        read(path)
    assert read(path, encoding=encoding).first_better.tolist() == ([0, 1] if encoding == "winner" else [1, 0])


def test_pairs_that_cannot_be_used_are_reported_by_pair_and_row(tmp_path: Path) -> None:
    found = read(written(tmp_path))
    assert found.starts.tolist() == [STARTS[pair] for pair in (0, 5, 6, 7, 8, 9)]
    assert found.first_better.tolist() == [LABELS[pair] for pair in (0, 5, 6, 7, 8, 9)]
    said = [(finding.code, finding.message) for finding in found.findings if "not used" in finding.message]
    assert said == [
        (
            "segment-crosses-episode-end",
            "pair 1 is not used: its first segment, rows 16 to 23, runs over the end of episode 0 (row 19).",
        ),
        (
            "segment-outside-dataset",
            "pair 2 is not used: its second segment, rows 55 to 62, leaves the dataset (rows 0 to 59).",
        ),
        (
            "segment-outside-dataset",
            "pair 3 is not used: its first segment, rows -3 to 4, leaves the dataset (rows 0 to 59).",
        ),
        (
            "segment-compared-with-itself",
            "pair 4 is not used: it compares the segment at row 12 with itself and is no tie.",
        ),
    ]


def test_repeats_and_contradictions_are_counted_and_named(tmp_path: Path) -> None:
    findings = read(written(tmp_path)).findings
    counts = Counter(finding.code for finding in findings)
    assert (counts["pair-contradicted"], counts["pair-repeated"]) == (1, 2)
    assert [f.message for f in findings if f.code.startswith("pair-")] == [
        "pair 6 shows the segments of pair 5 and answers otherwise; both count.",
        "pair 7 shows the segments of pair 5 in the other order and agrees; both count.",
        "pair 9 shows the segments of pair 0 and agrees; both count.",
    ]


def test_a_tie_of_a_segment_with_itself_is_no_fault(tmp_path: Path) -> None:
    found = read(written(tmp_path, starts=[[0, 22], [12, 12]], labels=[1, 0.5]))
    assert len(found.starts) == 2 and not found.findings


def test_segments_named_by_episode_and_step_are_the_same(tmp_path: Path) -> None:
    # pairs 0, 5, 8 as episode and step; then one step too far, an episode and a step that are not there
    starts = [[[0, 0], [1, 2]], [[0, 2], [2, 1]], [[1, 7], [2, 17]], [[0, 13], [2, 0]], [[3, 0], [0, 0]]]
    starts += [[[0, 0], [1, 15]]]
    found = read(written(tmp_path, starts=starts, labels=[1, 0, 0.5, 1, 1, 1]))
    assert found.starts.tolist() == [[0, 22], [2, 36], [27, 52]]
    assert [finding.message for finding in found.findings] == [
        "pair 3 is not used: its first segment, rows 13 to 20, runs over the end of episode 0 (row 19).",
        "pair 4 is not used: its first segment, from episode 3, step 0, is not in the dataset.",
        "pair 5 is not used: its second segment, from episode 1, step 15, is not in the dataset.",
    ]


@pytest.mark.parametrize("layout", ["rows", "episodes"])
def test_parquet_says_the_same_as_json(layout: str, tmp_path: Path) -> None:
    columns: dict[str, list[object]] = {"label": [1, -1, 0]}
    if layout == "rows":
        columns |= {"first": [0, 2, 27], "second": [22, 36, 52]}
    else:
        columns |= {"first_episode": [0, 0, 1], "first_step": [0, 2, 7]}
        columns |= {"second_episode": [1, 2, 2], "second_step": [2, 1, 17], "who": ["a", "b", "c"]}
    path = tmp_path / "pairs.parquet"
    pq.write_table(pa.table(columns).replace_schema_metadata({"encoding": "sign", "length": "8"}), path)
    found = read(path)
    json_path = written(tmp_path, starts=[[0, 22], [2, 36], [27, 52]], labels=[1, 0, 0.5])
    as_json = PreferenceFile(path=json_path).resolve(THREE)
    assert PreferenceFile(path=path).resolve(THREE).digest == as_json.digest
    assert [f.message for f in found.findings] == (
        ["pairs.parquet: 'who' is not used."] if layout == "episodes" else []
    )
    plain = tmp_path / "plain.parquet"
    pq.write_table(pa.table(columns), plain)
    with pytest.raises(DatasetError, match=r"plain\.parquet: it does not state its encoding"):
        read(plain)
    assert read(plain, encoding="sign", length=8).first_better.tolist() == [1, 0, 0.5]


def test_another_dataset_than_the_one_that_was_shown_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, dataset=THREE.data.digest())
    assert len(read(path).starts) == 6
    other = OneDataset((20, 15, 26))
    with pytest.raises(
        DatasetError, match=f"of dataset {THREE.data.digest()}, and this is dataset {other.data.digest()}"
    ):
        read(path, other)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"encoding": "probability"}, "'encoding' is 'probability'; expected one of probability_first, one_hot"),
        ({"encoding": "sign", "labels": [1, 2]}, "the label of pair 1 is 2; as sign it is 1 .first., -1 .second. or 0"),
        ({"labels": [1, -1]}, "the label of pair 1 is -1; as probability_first it is from 0 to 1"),
        ({"encoding": "winner", "labels": [2, 1]}, "the label of pair 0 is 2; as winner it is 0 .first., 1 .second."),
        ({"encoding": "one_hot", "labels": [[1, 1], [0, 1]]}, "the label of pair 0 is .1, 1.; as one_hot"),
        ({"encoding": "one_hot"}, "labels are one_hot, so two numbers a pair; found 'labels' of shape .2,."),
        ({"labels": [[1, 0], [0, 1]]}, "labels are probability_first, so one number a pair"),
        ({"labels": [1]}, "1 'labels' for 2 pairs of 'starts'"),
        ({"labels": [1, "first"]}, "'labels' holds something that is no number"),
        ({"labels": [True, False]}, "'labels' holds something that is no number"),
        ({"labels": [1, float("nan")]}, "'labels' holds something that is no number"),
        ({"labels": None}, "there is no 'labels' .in Parquet: `label`.. There is: encoding, length, starts"),
        ({"starts": [[0, 22], [2]]}, "'starts' has rows of different shapes"),
        ({"starts": [[0.0, 22.0], [2, 36]]}, "'starts' is float64 .2, 2.; expected whole numbers"),
        ({"starts": [0, 22]}, "'starts' is int64 .2,.; expected whole numbers, for each pair two steps"),
        ({"starts": [], "labels": []}, "it holds no pairs"),
        ({"length": None}, "'length' is None; expected the number of steps"),
        ({"length": "8"}, "'length' is '8'; expected the number of steps"),
        ({"length": 26}, "none of 2 pairs can be used: pair 0 is not used: its first segment, rows 0 to 25, runs over"),
        ({"dataset": 3}, "'dataset' is 3; expected the digest of a dataset"),
    ],
)
def test_what_cannot_be_understood_is_refused_with_the_file_and_the_reason(
    changed: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = written(tmp_path, **{"starts": [[0, 22], [2, 36]], "labels": [1, 0], **changed})
    with pytest.raises(DatasetError, match=rf"pairs\.json: .*{message}"):
        read(path)


def test_what_the_file_states_is_not_overruled(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="'encoding' is probability_first in the file and winner beside its path"):
        read(written(tmp_path), encoding="winner")


def test_broken_files_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "pairs.json"
    with pytest.raises(DatasetError, match=r"pairs\.json: there is no such file"):
        read(path)
    for content, message in [(b"", "is empty"), (b"{", "not JSON"), (b"PAR1PAR1PAR1", "not a whole Parquet file")]:
        path.write_bytes(content)
        with pytest.raises(DatasetError, match=rf"pairs\.json: .*{message}"):
            read(path)


def test_a_file_is_known_by_its_content_and_not_by_its_path(tmp_path: Path) -> None:
    path = written(tmp_path)
    spec = PreferenceFile(path=Path("pairs.json")).beside(tmp_path)
    assert spec.path == path
    before = spec.identity()
    assert str(tmp_path) not in json.dumps(before)
    (tmp_path / "copy.json").write_bytes(path.read_bytes())
    assert PreferenceFile(path=tmp_path / "copy.json").identity() == before
    written(tmp_path, labels=[1 - label for label in LABELS])
    assert spec.identity() != before


def test_evidence_is_identified_by_the_pairs_that_count(tmp_path: Path) -> None:
    def digest(**values: object) -> str:
        return PreferenceFile(path=written(tmp_path, **values)).resolve(THREE).digest

    good = digest()
    assert digest(labels=[*LABELS[:4], 0, *LABELS[5:]]) == good  # of a pair that is not used
    assert digest(labels=[0, *LABELS[1:]]) != good
    assert digest(length=7) != good


# ------------------------------------------------------------ annotators

RAMP = OneDataset((20, 15, 25, 4), np.arange(64, dtype=np.float32))


def stated(source: OneDataset = RAMP, **settings: object) -> Preferences:
    found = Annotator.model_validate({"pairs": 200, "length": 8, **settings}).resolve(source).preferences
    assert found is not None
    return found


def test_segments_stay_inside_episodes_and_every_place_is_shown() -> None:
    found = stated(pairs=2000)
    episode = RAMP.data.episode_index[found.steps]
    assert (episode == episode[..., :1]).all()
    # starts that fit: 0-12, 20-27, 35-52; the last episode is shorter than a segment
    assert sorted({*found.starts.ravel().tolist()}) == [*range(13), *range(20, 28), *range(35, 53)]
    assert (found.starts[:, 0] != found.starts[:, 1]).all()
    (finding,) = found.findings
    assert finding.code == "episodes-never-shown"
    assert finding.message.startswith("1 of 4 episodes (4 steps) are shorter than segments of 8 steps")


def test_the_higher_sum_is_preferred() -> None:
    found = stated()
    assert found.first_better.tolist() == (found.starts[:, 0] > found.starts[:, 1]).tolist()


def test_equal_sums_are_a_tie_and_so_are_sums_within_the_threshold() -> None:
    flat = OneDataset((20, 20), np.ones(40, np.float32))
    assert set(stated(flat).first_better.tolist()) == {0.5}
    # on the ramp, sums differ by 8 for each step that the starts are apart
    near = np.abs(np.diff(stated().starts, axis=1)[:, 0]) <= 2
    assert near.any()
    assert (stated(tie=16).first_better == 0.5).tolist() == near.tolist()
    assert not (stated(tie=7.9).first_better == 0.5).any()


def test_a_pair_is_skipped_if_neither_segment_is_good_enough() -> None:
    everything = stated()
    # the sum of 8 steps from start s is 8 s + 28
    good = everything.starts.max(1) * 8 + 28 > 300
    found = stated(skip=300)
    assert found.starts.tolist() == everything.starts[good].tolist()
    assert found.first_better.tolist() == everything.first_better[good].tolist()
    skipped = int((~good).sum())
    assert [f.message for f in found.findings if f.code == "pairs-skipped"] == [
        f"the annotator skips {skipped} of 200 pairs."
    ]
    with pytest.raises(ConfigurationError, match="the annotator skips all 200 pairs; the highest sum of rewards"):
        stated(skip=1e9)


def test_a_myopic_annotator_looks_at_the_ends_of_segments() -> None:
    # one reward of 3 at the beginning of the first episode, one of 2 at the end of the second
    rewards = np.zeros(16, np.float32)
    rewards[0], rewards[15] = 3, 2
    source = OneDataset((8, 8), rewards)
    far, near = stated(source, pairs=20), stated(source, pairs=20, discount=0.9)
    first_is_early = far.starts[:, 0] == 0
    assert far.first_better.tolist() == first_is_early.tolist()  # 3 > 2
    assert near.first_better.tolist() == (~first_is_early).tolist()  # 3 * .9 ** 7 = 1.43 < 2


def test_errors_are_as_frequent_as_stated_and_leave_ties_alone() -> None:
    right, wrong = stated(pairs=5000, tie=16), stated(pairs=5000, tie=16, error_rate=0.2)
    tie = right.first_better == 0.5
    assert (wrong.first_better[tie] == 0.5).all()
    # 4 standard deviations of a share of about 4,700 with probability .2 are .023
    assert np.mean((wrong.first_better != right.first_better)[~tie]) == pytest.approx(0.2, abs=0.023)
    assert (stated(tie=16, error_rate=1).first_better == 1 - stated(tie=16).first_better).all()


def test_one_seed_shows_the_same_pairs_whatever_the_other_settings() -> None:
    shown = stated().starts.tolist()
    assert stated(error_rate=0.3, tie=50, discount=0.5).starts.tolist() == shown
    assert stated(pairs=50).starts.tolist() == shown[:50]
    assert stated(seed=1).starts.tolist() != shown


def test_evidence_of_an_annotator_is_what_was_stated() -> None:
    def digest(**settings: object) -> str:
        return Annotator.model_validate({"pairs": 50, "length": 8, **settings}).resolve(RAMP).digest

    assert digest() == digest(tie=1)
    assert len({digest(), digest(seed=1), digest(error_rate=0.5), digest(length=7)}) == 4
    (reference,) = Annotator(labels="transport").references("preferences")
    assert (reference.dataset, reference.labels, reference.place) == ("self", "transport", ("preferences", "labels"))


def test_segments_that_fit_nowhere_are_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"length: 30: there are no two segments.*longest episode has 25 steps"
    ):
        stated(length=30)
    with pytest.raises(ConfigurationError, match="no two segments"):
        stated(length=25)


@pytest.mark.parametrize("setting", [{"error_rate": 1.1}, {"discount": 0}, {"tie": -1}, {"length": 0}, {"pairs": 0}])
def test_settings_out_of_range_are_refused(setting: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Annotator.model_validate(setting)

"""What every registered reader must do, whatever it reads."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from data.errors import DatasetError
from data.ingest import ingest
from data.readers import READERS, recognise
from data.readers.reader import RefusedError
from data.store import Store
from tests.data.readers.reading import read_path
from tests.data.readers.samples import LENGTHS, SAMPLES, Recording, Sample, recording


@pytest.fixture(params=SAMPLES, ids=lambda sample: sample.name)
def sample(request: pytest.FixtureRequest) -> Sample:
    return request.param


@pytest.fixture
def recorded() -> Recording:
    return recording()


@pytest.fixture
def path(sample: Sample, recorded: Recording, tmp_path: Path) -> Path:
    return sample.write(tmp_path, recorded)


def files(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


def test_every_registered_reader_has_a_sample():
    assert {type(sample.reader) for sample in SAMPLES} == set(READERS)


def test_the_content_says_the_format(sample, path):
    if not sample.recognised:
        pytest.skip("needs settings")
    assert recognise(path) == sample.reader


def test_it_says_what_there_is_before_reading_it(sample, path):
    with sample.reader.open(path) as source:
        assert source.format == sample.reader.kind
        assert source.n_steps in (sum(LENGTHS), None)
        spaces = source.observation.values() if isinstance(source.observation, dict) else [source.observation]
        assert [(space.shape, space.dtype) for space in spaces] == [((3,), sample.dtype)]
        assert (source.action.shape, source.action.dtype) == ((2,), sample.dtype)


def test_every_step_of_every_episode_is_read_in_order(sample, path, recorded):
    got = read_path(sample.reader, path)
    data = got.trajectories
    assert data.lengths.tolist() == list(LENGTHS)
    assert data.observations.dtype == data.actions.dtype == got.rewards.dtype == np.float32
    np.testing.assert_array_equal(data.step_observations, np.concatenate([o[:-1] for o in recorded.observations]))
    np.testing.assert_array_equal(data.actions, np.concatenate(recorded.actions))
    np.testing.assert_array_equal(got.rewards, np.concatenate(recorded.rewards))


def test_ends_are_what_the_format_can_say(sample, path, recorded):
    data = read_path(sample.reader, path).trajectories
    terminated = recorded.terminated if sample.says_kind else [False] * len(LENGTHS)
    assert data.terminated.tolist() == terminated
    assert data.truncated.tolist() == [not t for t in terminated]
    finals = data.observations[data.offsets[1:] + np.arange(data.n_episodes)]
    if sample.says_final:
        assert data.final_observed.all()
        np.testing.assert_array_equal(finals, [o[-1] for o in recorded.observations])
    else:
        assert not data.final_observed.any()
        np.testing.assert_array_equal(finals, [o[-2] for o in recorded.observations])


@pytest.mark.parametrize("n_bytes", [1, 100])
def test_how_much_is_read_at_a_time_changes_nothing(sample, path, monkeypatch, n_bytes):
    whole = read_path(sample.reader, path)
    monkeypatch.setattr(sample.piece, n_bytes)
    with sample.reader.open(path) as source:
        assert len(list(source.blocks())) > 1
    pieces = read_path(sample.reader, path)
    assert pieces.trajectories.digest() == whole.trajectories.digest()
    np.testing.assert_array_equal(pieces.rewards, whole.rewards)
    assert pieces.findings == whole.findings


def test_decisions_are_in_the_manifest(sample, path, recorded, tmp_path):
    store = Store(tmp_path / "store")
    result = ingest(path, "toy", store, sample.reader)
    manifest = store.dataset("toy").manifest
    assert sample.decisions <= {finding.code for finding in manifest.findings}
    assert manifest.provenance["reader"]["kind"] == sample.reader.kind
    rewards = store.labels(result.dataset, result.source_labels).rewards
    np.testing.assert_array_equal(rewards, np.concatenate(recorded.rewards))


def test_what_is_not_finite_is_refused_by_key_episode_and_step(sample, recorded, tmp_path):
    recorded.observations[9][2, 1] = np.nan
    recorded.actions[10][0, 0] = np.inf
    path = sample.write(tmp_path, recorded)
    with pytest.raises(RefusedError, match=rf"^{re.escape(path.name)}: ") as caught:
        read_path(sample.reader, path)
    assert "'observations' is not finite at episode 9, step 2 (nan)" in str(caught.value)
    assert "'actions' is not finite at episode 10, step 0 (inf)" in str(caught.value)


@pytest.mark.parametrize("damage", ["cut", "empty", "garbage"])
def test_a_damaged_file_is_refused_by_its_name(sample, path, damage):
    for file in files(path):
        content = file.read_bytes()
        damaged = {"cut": content[: len(content) * 6 // 10], "empty": b"", "garbage": b"\x00\xffgarbage" * 40}
        file.write_bytes(damaged[damage])
        with pytest.raises(DatasetError, match=re.escape(file.name)):
            read_path(sample.reader, path)
        if sample.recognised:
            with pytest.raises(DatasetError, match=re.escape(file.name)):
                read_path(recognise(path), path)
        file.write_bytes(content)


def test_a_missing_file_is_said_to_be(sample, tmp_path):
    with pytest.raises(DatasetError, match=r"nowhere: there is no such file"):
        sample.reader.open(tmp_path / "nowhere")

"""Demonstrations as evidence: by index or the best by a label set, and known by content."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from pydantic import ValidationError

from data.errors import ConfigurationError, DatasetError
from data.trajectories import Trajectories
from labelers.evidence import Demonstrations, KnownRewards, Reference


class Lookup:
    def __init__(self, data: Trajectories, rewards: list[float], brought_along: str | None = "expert") -> None:
        self._data, self._rewards, self._brought_along = data, np.array(rewards, np.float32), brought_along
        self.asked: list[str] = []

    def trajectories(self, name: str) -> Trajectories:
        self.asked.append(name)
        return self._data

    def rewards(self, name: str, labels: str) -> np.ndarray:
        self.asked.append(f"{name}/{labels}")
        return self._rewards

    def demonstrations_of_dataset(self) -> str | None:
        return self._brought_along


@pytest.fixture
def data(random_trajectories: Callable[..., Trajectories]) -> Trajectories:
    return random_trajectories((2, 1, 3, 1))


def chosen(spec: Demonstrations, lookup: Lookup) -> Trajectories:
    found = spec.resolve(lookup).demonstrations
    assert found is not None
    return found


def test_by_index_in_the_order_given(data: Trajectories) -> None:
    found = chosen(Demonstrations(episodes=(2, 0)), Lookup(data, []))
    assert found.lengths.tolist() == [3, 2]
    assert found.digest() == data.select([2, 0]).digest()


def test_the_best_by_a_label_set_the_first_of_equals_first(data: Trajectories) -> None:
    # returns 3, 5, 5, -1
    lookup = Lookup(data, [1, 2, 5, 4, 0, 1, -1])
    assert chosen(Demonstrations(top=2, by="source"), lookup).digest() == data.select([1, 2]).digest()
    assert chosen(Demonstrations(top=3, by="source"), lookup).digest() == data.select([1, 2, 0]).digest()
    assert "expert/source" in lookup.asked


def test_a_named_dataset_comes_before_the_one_brought_along(data: Trajectories) -> None:
    lookup = Lookup(data, [])
    chosen(Demonstrations(dataset="other", episodes=(0,)), lookup)
    assert lookup.asked == ["other"]


def test_identity_is_of_the_content_not_of_the_name(data: Trajectories) -> None:
    by_index = Demonstrations(episodes=(1,)).resolve(Lookup(data, []))
    by_rank = Demonstrations(dataset="other", top=1, by="source").resolve(Lookup(data, [0, 0, 9, 0, 0, 0, 0]))
    assert by_index.digest == by_rank.digest
    assert Demonstrations(episodes=(0,)).resolve(Lookup(data, [])).digest != by_index.digest


@pytest.mark.parametrize(
    "named", [{}, {"episodes": [0], "top": 1, "by": "source"}, {"top": 1}, {"by": "source"}], ids=str
)
def test_half_named_demonstrations_are_refused(named: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="either by `episodes"):
        Demonstrations.model_validate(named)


def test_more_than_there_are_is_refused(data: Trajectories) -> None:
    with pytest.raises(ConfigurationError, match="top: 5 of the 4 episodes of 'expert'"):
        Demonstrations(top=5, by="source").resolve(Lookup(data, [0] * 7))
    with pytest.raises(DatasetError, match="episode 4 does not exist"):
        Demonstrations(episodes=(4,)).resolve(Lookup(data, []))


def test_no_demonstrations_anywhere_says_where_to_name_them(data: Trajectories) -> None:
    with pytest.raises(ConfigurationError, match="give the dataset `demonstrations: <dataset>`"):
        Demonstrations(episodes=(0,)).resolve(Lookup(data, [], brought_along=None))


def test_references_say_what_will_be_looked_up() -> None:
    spec = Demonstrations(dataset="expert", top=2, by="source")
    assert spec.references("demonstrations") == [
        Reference("expert", None, ("demonstrations", "dataset")),
        Reference("expert", "source", ("demonstrations", "by")),
    ]
    assert KnownRewards().references("rewards") == [Reference("self", "source", ("rewards", "labels"))]

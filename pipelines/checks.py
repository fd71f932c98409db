"""Everything about a study that can be checked before any work: what fails here leaves store and tracking untouched."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from algorithms.evaluation import reference_score, spaces_of
from data.errors import ConfigurationError, DatasetError
from data.readers.soundness import sound_blocks
from data.trajectories import Trajectories
from labelers.evidence import Demonstrations
from labelers.preferences import PreferenceFile
from pipelines.progress import bar
from pipelines.study import SELF, SOURCE
from pipelines.work import Work


@dataclass(frozen=True)
class Facts:
    """What must be known of a file to tell whether a study fits it.

    observation, action: shape of one row. n_actions: as in `Trajectories`. has_rewards: it has, and all are finite.
    """

    file: str
    n_episodes: int
    observation: tuple[int, ...]
    action: tuple[int, ...]
    n_actions: tuple[int, ...] | None
    has_rewards: bool


def check(work: Work) -> None:
    """Raise ConfigurationError or DatasetError for the first thing that stops the study.

    Files that are not in the store yet are read once from end to end.
    """
    for name, dataset in work.study.datasets.items():
        if dataset.reference is not None:
            if dataset.environment is None:
                raise ConfigurationError(
                    f"dataset '{name}' names a reference score and no environment to roll out in: name one, or leave "
                    "the reference out."
                )
            reference_score(dataset.reference)
    assert work.device
    facts = {name: _facts(work, name) for name in work.study.files()}
    for name in work.study.datasets:
        _check_environment(work, name, facts[name])
        for labeler in work.study.labelers:
            _check_evidence(work, name, labeler, facts)


def _facts(work: Work, name: str) -> Facts:
    path = work.study.files()[name].path
    if work.ingested(name) is not None:
        stored = work.dataset(name).manifest
        return Facts(
            path.name,
            stored.n_episodes,
            stored.observation.shape,
            stored.action.shape,
            stored.n_actions,
            work.source_labels(name) is not None,
        )
    reader = work.reader(name)
    n_episodes, has_rewards = 0, True
    first: Trajectories | None = None
    with reader.open(path) as source, bar(f"check {name}", source.n_steps, "steps") as progress:
        for block in sound_blocks(source, reader, path):
            first = first or block.trajectories
            n_episodes += block.trajectories.n_episodes
            has_rewards &= block.rewards is not None and bool(np.isfinite(block.rewards).all())
            progress(block.trajectories.n_steps)
    if first is None:
        raise DatasetError(f"{path.name}: no steps: there is not one episode to store.")
    return Facts(
        path.name, n_episodes, first.observations.shape[1:], first.actions.shape[1:], first.n_actions, has_rewards
    )


def _check_environment(work: Work, name: str, facts: Facts) -> None:
    environment = work.study.datasets[name].environment
    if environment is None:
        return
    observation, action, n_actions = spaces_of(environment)
    found = (facts.observation, facts.action, facts.n_actions)
    if (observation, action, n_actions) != found:
        raise ConfigurationError(
            f"{facts.file}: dataset '{name}' has observations {facts.observation} and "
            f"{_kind(facts.action, facts.n_actions)}; environment {environment} has {observation} and "
            f"{_kind(action, n_actions)}: policies cannot be rolled "
            "out there."
        )


def _kind(action: tuple[int, ...], n_actions: tuple[int, ...] | None) -> str:
    return f"continuous actions {action}" if n_actions is None else f"discrete actions {n_actions}"


def _check_evidence(work: Work, dataset: str, labeler: str, facts: dict[str, Facts]) -> None:
    configuration = work.study.labelers[labeler]
    for reference in configuration.references:
        owner = reference.dataset or work.study.demonstrations_of(dataset)
        owner = dataset if owner == SELF else owner
        assert owner is not None, "Study.problems finds labelers without demonstrations"
        ours, theirs = facts[dataset], facts[owner]
        for key in ("observation", "action"):
            if getattr(ours, key) != getattr(theirs, key):
                raise DatasetError(
                    f"{theirs.file}: '{key}s' of {getattr(theirs, key)} a step, and those of dataset '{dataset}' "
                    f"({ours.file}) are {getattr(ours, key)}: labeler '{labeler}' cannot compare them."
                )
        if reference.labels == SOURCE and not theirs.has_rewards:
            raise DatasetError(
                f"{theirs.file}: labeler '{labeler}' asks for the rewards of '{owner}', and the file has none that "
                "are all finite."
            )
    spec = configuration.evidence_spec
    if isinstance(spec, PreferenceFile):
        spec.read()
    if isinstance(spec, Demonstrations):
        owner = spec.dataset or work.study.demonstrations_of(dataset)
        theirs = facts[dataset if owner == SELF or owner is None else owner]
        beyond = [e for e in spec.episodes or () if not 0 <= e < theirs.n_episodes]
        if beyond or (spec.top or 0) > theirs.n_episodes:
            asked = f"episode {beyond[0]}" if beyond else f"the best {spec.top} episodes"
            raise ConfigurationError(
                f"{theirs.file}: labeler '{labeler}' imitates {asked}, and the file has {theirs.n_episodes} "
                f"(numbered from 0 to {theirs.n_episodes - 1})."
            )

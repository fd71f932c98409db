"""A study: datasets x labelers x algorithms x seeds in one YAML file, and what to say when the file is wrong."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import yaml
from pydantic import Field, JsonValue, StringConstraints, ValidationError
from pydantic_core import ErrorDetails

from algorithms import AnyAlgorithm
from algorithms.evaluation import Evaluation
from algorithms.training import Training
from data.config import Config
from data.errors import ConfigurationError
from data.readers import AnyReader
from labelers import AnyLabeler
from labelers.transforms import Transform

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""Names go into paths and tables: letters, digits, dots, dashes, underscores."""

Location: TypeAlias = tuple[str | int, ...]
"""Keys and indices that lead to a place in the study file."""

SELF = "self"
SOURCE = "source"


class SourceFile(Config):
    """A file that holds trajectories.

    path: relative to the study file. reader: how to read it; recognised from the content if left out.
    """

    path: Path
    reader: AnyReader | None = None


class Dataset(SourceFile):
    """What is labelled and trained on.

    demonstrations: the dataset that labelers imitate unless they name another.
    actions: the labeler of actions whose labels stand in for the actions of the file, in training and for all labelers
        of rewards.
    environment: id in gymnasium, where policies are rolled out; without it there are losses and label statistics only.
    reference: name in the table of D4RL reference scores; without it scores are plain returns.
    """

    demonstrations: Name | None = None
    actions: Name | None = None
    environment: str | None = None
    reference: str | None = None


class Tracking(Config):
    """Where runs are recorded.

    uri: of an MLflow tracking server or database; by default what MLFLOW_TRACKING_URI says, else a file in the home
        folder. experiment: by default named as the study.
    """

    uri: str | None = None
    experiment: str | None = None


class Study(Config):
    """All that a study file says. Every labeler labels every dataset; every algorithm trains on every set of rewards.

    transforms: for every labeler of rewards that names none of its own. device: auto, cpu, cuda or cuda:1.
    """

    study: Name
    datasets: dict[Name, Dataset] = Field(min_length=1)
    demonstrations: dict[Name, SourceFile] = Field(default={})
    labelers: dict[Name, AnyLabeler] = Field(min_length=1)
    transforms: tuple[Transform, ...] = ()
    algorithms: dict[Name, AnyAlgorithm] = Field(default={})
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(0, 1, 2), min_length=1)
    training: Training = Training()
    evaluation: Evaluation = Evaluation()
    tracking: Tracking = Tracking()
    device: str = "auto"

    def files(self) -> dict[str, SourceFile]:
        """Every source file by name: datasets, then demonstrations."""
        return {**self.datasets, **self.demonstrations}

    @property
    def reward_labelers(self) -> list[str]:
        """Names of the labelers that say what steps are worth: those that are compared."""
        return [name for name, labeler in self.labelers.items() if labeler.column == "rewards"]

    @property
    def action_labelers(self) -> list[str]:
        """Names of the labelers that say what was done."""
        return [name for name, labeler in self.labelers.items() if labeler.column == "actions"]

    def labeler(self, name: str) -> AnyLabeler:
        """A labeler with the transforms that it is used with."""
        labeler = self.labelers[name]
        own = "transforms" in labeler.model_fields_set or labeler.column == "actions"
        return labeler if own else labeler.model_copy(update={"transforms": self.transforms})

    def demonstrations_of(self, dataset: str) -> str | None:
        """Name of the demonstrations that a dataset brings along."""
        entry = self.files()[dataset]
        return entry.demonstrations if isinstance(entry, Dataset) else None

    def labeling_order(self) -> list[str]:
        """Labelers so that whatever looks at another's labels comes after it; those of actions come first."""
        order: list[str] = []
        waiting = [*self.action_labelers, *self.reward_labelers]
        while waiting:
            ready = [name for name in waiting if set(self._labelers_named_by(name)) <= set(order)]
            assert ready, "problems() finds circles"
            order += ready[:1]
            waiting.remove(ready[0])
        return order

    def problems(self) -> Iterator[tuple[Location, str]]:
        """Every name that does not fit, with its place: unknown datasets and label sets, circles, doubles."""
        for name in self.demonstrations.keys() & self.datasets.keys():
            yield ("demonstrations", name), f"'{name}' is also the name of a dataset; give one of them another name."
        for name, dataset in self.datasets.items():
            if dataset.demonstrations is not None and dataset.demonstrations not in self.files():
                yield ("datasets", name, "demonstrations"), _unknown("dataset", dataset.demonstrations, self.files())
            if dataset.actions is not None and dataset.actions not in self.action_labelers:
                yield (
                    ("datasets", name, "actions"),
                    _unknown("labeler of actions", dataset.actions, self.action_labelers),
                )
        if self.algorithms and not self.reward_labelers:
            yield ("labelers",), "no labeler gives rewards: there is nothing to train on."
        for name, labeler in self.labelers.items():
            if name == SOURCE and labeler.kind != SOURCE:
                yield ("labelers", name), "the name 'source' means the rewards of the file: give this labeler another."
            if labeler.column == "actions" and labeler.transforms:
                yield ("labelers", name, "transforms"), f"'{name}' labels actions: transforms are for rewards."
            yield from self._evidence_problems(name)
        if doubles := sorted({s for s in self.seeds if self.seeds.count(s) > 1}):
            yield ("seeds",), f"seed {doubles[0]} is there twice."
        yield from self._circles()

    def _evidence_problems(self, name: str) -> Iterator[tuple[Location, str]]:
        for reference in self.labelers[name].references:
            place: Location = ("labelers", name, *reference.place)
            owner = reference.dataset
            if owner is None:
                for dataset in self.datasets:
                    if self.demonstrations_of(dataset) is None:
                        yield (
                            place,
                            f"labeler '{name}' imitates demonstrations, and dataset '{dataset}' names none: give the "
                            "dataset `demonstrations: <dataset>`, or the labeler a `dataset` inside `demonstrations`.",
                        )
                        break
            elif owner != SELF and owner not in self.files():
                yield place, _unknown("dataset", owner, [SELF, *self.files()])
            if reference.labels is not None:
                known = [SOURCE, *(n for n in self.reward_labelers if n not in (name, SOURCE))]
                if reference.labels not in known:
                    yield place, _unknown("label set", reference.labels, known)
                elif reference.labels != SOURCE and owner != SELF and owner not in self.datasets:
                    yield place, f"demonstrations are not labelled: by '{SOURCE}' is the only choice there."

    def _circles(self) -> Iterator[tuple[Location, str]]:
        for name in self.labelers:
            reached, frontier = set[str](), {name}
            while frontier:
                frontier = {n for f in frontier for n in self._labelers_named_by(f)} - reached
                reached |= frontier
            if name in reached:
                yield ("labelers", name), f"labeler '{name}' would need its own labels first."

    def _labelers_named_by(self, name: str) -> list[str]:
        named = (reference.labels for reference in self.labelers[name].references)
        return [n for n in named if n in self.labelers and n != SOURCE]


def load_study(path: Path) -> Study:
    """Read a study file. Raises ConfigurationError naming key, line and, for a typo, the nearest right word."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not a text file"
        raise ConfigurationError(f"{path}: the study file cannot be read: {reason}.") from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigurationError(f"{path.name}{line}: not YAML: {getattr(error, 'problem', None) or error}.") from error
    if not isinstance(node, yaml.MappingNode):
        raise ConfigurationError(f"{path.name}: a study is a mapping that starts with `study: <name>`.")
    page = _Page(path.name, node)
    page.refuse_double_keys(node)
    value = yaml.load(text, Loader=yaml.SafeLoader)
    try:
        study = Study.model_validate(value)
    except ValidationError as error:
        said = [_explain(details) for details in _without_meant(error.errors())]
        raise ConfigurationError("\n".join(page.say(place, message) for place, message in said)) from error
    if problems := list(study.problems()):
        raise ConfigurationError("\n".join(page.say(place, message) for place, message in problems))
    here = path.resolve().parent
    files = {
        group: {n: f.model_copy(update={"path": here / f.path.expanduser()}) for n, f in getattr(study, group).items()}
        for group in ("datasets", "demonstrations")
    }
    labelers = {name: labeler.beside(here) for name, labeler in study.labelers.items()}
    return study.model_copy(update={**files, "labelers": labelers})


@dataclass(frozen=True)
class _Page:
    """The study file as a tree of nodes that know their lines."""

    name: str
    root: yaml.MappingNode

    def say(self, place: Location, message: str) -> str:
        return f"{self.name}, line {self.line(place)}: {message}"

    def line(self, place: Location) -> int:
        """Line, from 1, of the deepest part of `place` that is written down; union tags in it are passed over."""
        node: yaml.Node = self.root
        line = node.start_mark.line
        for step in place:
            if isinstance(node, yaml.MappingNode):
                for key, value in node.value:
                    if key.value == str(step):
                        node, line = value, key.start_mark.line
                        break
            elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
                node = node.value[step]
                line = node.start_mark.line
        return line + 1

    def refuse_double_keys(self, node: yaml.Node) -> None:
        if isinstance(node, yaml.MappingNode):
            seen: dict[str, int] = {}
            for key, value in node.value:
                line = key.start_mark.line + 1
                if key.value in seen:
                    raise ConfigurationError(
                        f"{self.name}, line {line}: the key '{key.value}' is also on line {seen[key.value]}."
                    )
                seen[key.value] = line
                self.refuse_double_keys(value)
        elif isinstance(node, yaml.SequenceNode):
            for item in node.value:
                self.refuse_double_keys(item)


def _unknown(what: str, word: str, known: Sequence[str] | dict[str, SourceFile]) -> str:
    return f"there is no {what} '{word}'{_nearest(word, known) or '.'} There is: {', '.join(sorted(known)) or 'none'}."


def _nearest(word: str, known: Sequence[str] | dict[str, SourceFile]) -> str:
    """The likely meaning of a mistyped word, as the end of a sentence."""
    folded = {k.casefold().replace("-", "_"): k for k in known}
    close = difflib.get_close_matches(word.casefold().replace("-", "_"), folded, n=1, cutoff=0.6)
    return f": did you mean '{folded[close[0]]}'?" if close else ""


def _without_meant(errors: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """Errors without the missing keys that a mistyped key beside them was meant to be."""
    typed = [details["loc"] for details in errors if details["type"] == "extra_forbidden"]
    return [
        details
        for details in errors
        if details["type"] != "missing"
        or not any(
            loc[:-1] == details["loc"][:-1] and _nearest(str(loc[-1]), [str(details["loc"][-1])]) for loc in typed
        )
    ]


def _explain(details: ErrorDetails) -> tuple[Location, str]:
    """A pydantic error as place and plain sentence."""
    place: Location = tuple(details["loc"])
    where = ".".join(str(step) for step in place[:-1]) or "the study"
    kind, context = details["type"], details.get("ctx", {})
    if kind == "extra_forbidden":
        known = _fields_at(place[:-1])
        return place, (
            f"unknown key '{place[-1]}' in {where}{_nearest(str(place[-1]), known) or '.'} "
            f"Known keys: {', '.join(known) or 'none'}."
        )
    if kind == "union_tag_invalid":
        kinds = re.findall(r"'([^']+)'", context["expected_tags"])
        tag = context["tag"]
        meant = _nearest(tag, kinds) or "."
        message = f"unknown kind '{tag}' of {'.'.join(map(str, place))}{meant} Kinds: {', '.join(kinds)}."
        return (*place, "kind"), message
    if kind == "union_tag_not_found":
        kinds = _kinds_at(place)
        return place, f"{'.'.join(map(str, place))} does not say its `kind`: one of {', '.join(kinds)}."
    if kind == "missing":
        return place[:-1], f"{where} lacks the key '{place[-1]}'."
    if kind == "string_pattern_mismatch" and place[-1] == "[key]":
        return place[:-1], f"'{place[-2]}' cannot be a name: use letters, digits, dots, dashes and underscores."
    value = details["input"]
    found = f"; found {value!r}" if isinstance(value, str | int | float | bool | None) else ""
    return place, f"{'.'.join(map(str, place))}: {details['msg'].removeprefix('Value error, ')}{found}."


def _fields_at(place: Location) -> list[str]:
    """Keys that may stand at a place."""
    return [name for schema in _schemas_at(place) for name in _mapping(schema.get("properties"))]


def _kinds_at(place: Location) -> list[str]:
    """Tags of the union at a place."""
    return [
        tag for schema in _schemas_at(place) for tag in _mapping(_mapping(schema.get("discriminator")).get("mapping"))
    ]


def _schemas_at(place: Location) -> list[dict[str, JsonValue]]:
    """JSON schemas of what may stand at a place; steps that are union tags choose a branch."""
    whole: dict[str, JsonValue] = Study.model_json_schema()
    definitions = _mapping(whole.get("$defs"))

    def opened(schema: JsonValue) -> Iterator[dict[str, JsonValue]]:
        """A schema and, where it is a reference or has branches, what they say."""
        schema = _mapping(schema)
        if isinstance(reference := schema.get("$ref"), str):
            yield from opened(definitions[reference.rsplit("/", 1)[-1]])
            return
        yield schema
        if "discriminator" not in schema:
            for branch in [*_list(schema.get("anyOf")), *_list(schema.get("oneOf"))]:
                yield from opened(branch)

    current = list(opened(whole))
    for step in place:
        following: list[JsonValue] = []
        for schema in current:
            tags = _mapping(_mapping(schema.get("discriminator")).get("mapping"))
            if step in tags:
                following.append({"$ref": tags[str(step)]})
            elif isinstance(step, int):
                following += [schema["items"]] if "items" in schema else _list(schema.get("prefixItems"))
            elif step in _mapping(schema.get("properties")):
                following.append(_mapping(schema["properties"])[step])
            else:
                following += _mapping(schema.get("patternProperties")).values()
                following += [schema["additionalProperties"]] if "additionalProperties" in schema else []
        current = [o for schema in following for o in opened(schema)]
    return current


def _mapping(value: JsonValue) -> dict[str, JsonValue]:
    return value if isinstance(value, dict) else {}


def _list(value: JsonValue) -> list[JsonValue]:
    return value if isinstance(value, list) else []

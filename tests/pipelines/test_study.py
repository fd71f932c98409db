"""What a study file says, and what is said about one that is wrong: key, line, and the nearest right word."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from data.errors import ConfigurationError
from pipelines.study import load_study

STUDY = """\
study: mine
datasets:
  replay:
    path: replay.hdf5
    demonstrations: expert
demonstrations:
  expert: {path: sub/expert.hdf5}
labelers:
  source: {kind: source}
  transport:
    kind: optimal_transport
    demonstrations: {episodes: [0]}
    epsilon: 0.05
transforms:
  - {kind: return_range}
algorithms:
  iql: {kind: iql}
seeds: [0, 1]
training: {steps: 100}
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(tmp_path: Path, old: str, new: str) -> str:
    assert STUDY.count(old) == 1, old
    with pytest.raises(ConfigurationError) as caught:
        load_study(write(tmp_path, STUDY.replace(old, new)))
    return str(caught.value)


def test_a_study_says_what_it_says(tmp_path: Path) -> None:
    study = load_study(write(tmp_path, STUDY))
    assert study.files()["expert"].path == tmp_path / "sub" / "expert.hdf5"
    assert study.demonstrations_of("replay") == "expert"
    assert study.seeds == (0, 1)
    assert study.training.steps == 100
    assert [t.kind for t in study.labeler("transport").transforms] == ["return_range"]


def test_a_labelers_own_transforms_replace_those_of_the_study(tmp_path: Path) -> None:
    text = STUDY.replace("source: {kind: source}", "source: {kind: source, transforms: []}")
    study = load_study(write(tmp_path, text))
    assert study.labeler("source").transforms == ()
    assert len(study.labeler("transport").transforms) == 1


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("epsilon: 0.05", "epsilom: 0.05", 13, r"unknown key 'epsilom' .*did you mean 'epsilon'\?"),
        ("kind: optimal_transport", "kind: optimal-transprt", 11, r"unknown kind .*did you mean 'optimal_transport'\?"),
        ("{kind: iql}", "{kind: iqll}", 17, r"did you mean 'iql'\?"),
        ("labelers:", "labeler:", 8, r"unknown key 'labeler' in the study: did you mean 'labelers'\?"),
        ("{kind: return_range}", "{kind: return_rang}", 15, r"did you mean 'return_range'\?"),
        ("{steps: 100}", "{step: 100}", 19, r"unknown key 'step' in training: did you mean 'steps'\?"),
        ("{steps: 100}", "{steps: many}", 19, r"training\.steps: .*found 'many'"),
        ("{steps: 100}", "{steps: 0}", 19, r"training\.steps: .*greater than 0; found 0"),
        ("demonstrations: expert", "demonstrations: exprt", 5, r"no dataset 'exprt': did you mean 'expert'\?"),
        ("    path: replay.hdf5\n", "", 3, r"datasets\.replay lacks the key 'path'"),
        ("seeds: [0, 1]", "seeds: [0, 0]", 18, "seed 0 is there twice"),
        ("seeds: [0, 1]", "seeds: [0, -1]", 18, "greater than or equal to 0"),
        ("  transport:\n", "  tran sport:\n", 10, "'tran sport' cannot be a name"),
        ("    demonstrations: expert\n", "", 11, "dataset 'replay' names none"),
        ("study: mine", "study: mine\nstudy: yours", 2, "the key 'study' is also on line 1"),
        ("{episodes: [0]}", "{episodes: [0], top: 3}", 12, "either by"),
        (
            "{episodes: [0]}",
            "{dataset: replay, top: 1, by: sourc}",
            12,
            r"no label set 'sourc': did you mean 'source'\?",
        ),
    ],
    ids=lambda value: str(value)[:24].strip() if isinstance(value, str) else None,
)
def test_a_mistake_is_named_with_its_line_and_the_nearest_right_word(
    tmp_path: Path, old: str, new: str, line: int, said: str
) -> None:
    message = refusal(tmp_path, old, new)
    assert message.startswith(f"mine.yaml, line {line}:"), message
    assert re.search(said, message), message
    assert len(message.splitlines()) == 1


def test_several_mistakes_are_all_named(tmp_path: Path) -> None:
    text = STUDY.replace("epsilon", "epsilom").replace("steps: 100", "stepss: 100")
    with pytest.raises(ConfigurationError) as caught:
        load_study(write(tmp_path, text))
    assert len(str(caught.value).splitlines()) == 2


def test_a_circle_of_evidence_is_refused(tmp_path: Path) -> None:
    text = STUDY.replace(
        "  transport:\n",
        "  a: {kind: unlabelled_zero, rewards: {labels: b}}\n  b: {kind: unlabelled_zero, rewards: {labels: a}}\n"
        "  transport:\n",
    )
    with pytest.raises(ConfigurationError, match="labeler 'a' would need its own labels first"):
        load_study(write(tmp_path, text))


def test_labelers_come_after_the_labels_they_look_at(tmp_path: Path) -> None:
    text = STUDY.replace("  source: {kind: source}\n", "  model: {kind: reward_model, rewards: {labels: transport}}\n")
    study = load_study(write(tmp_path, text))
    assert study.labeling_order() == ["transport", "model"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "a study is a mapping"),
        ("- a\n- b\n", "a study is a mapping"),
        ("study: [", "not YAML"),
        ("study: mine\n  datasets: 3\n", "line 2: not YAML"),
    ],
)
def test_what_is_no_study_is_called_so(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        load_study(write(tmp_path, text))


def test_a_missing_study_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere\.yaml: the study file cannot be read: No such file"):
        load_study(tmp_path / "nowhere.yaml")

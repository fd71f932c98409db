"""Step tables: which column is what, order, ends, the last observation, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from pydantic import ValidationError

from data.errors import DatasetError
from data.labels import episode_returns
from data.readers import recognise
from data.readers.reader import RefusedError
from data.readers.table import End, Table
from data.readers.table_rows import TableRows
from tests.data.readers.reading import Read, read_path

ROWS = pl.DataFrame(
    {
        "episode": [0, 0, 0, 1, 1],
        "step": [0, 1, 2, 0, 1],
        "obs_0": [0.0, 0.5, 1.0, 4.0, 4.5],
        "obs_1": [1.0, 1.25, 1.5, -1.0, -1.25],
        "action": [0.5, -0.5, 0.25, 1.0, -1.0],
        "reward": [1.0, 2.0, 4.0, 8.0, 16.0],
        "terminated": [False, False, True, False, False],
        "truncated": [False, False, False, False, True],
    }
)
"""Two episodes, one terminated after three steps and one truncated after two."""


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Read]:
    """Writes a table as Parquet and reads it: `read(table, **settings)`."""

    def through_file(table: pl.DataFrame, **settings: object) -> Read:
        table.write_parquet(tmp_path / "steps.parquet")
        return read_path(Table.model_validate(settings), tmp_path / "steps.parquet")

    return through_file


@pytest.fixture
def refusal(read: Callable[..., Read]) -> Callable[..., str]:
    def message(table: pl.DataFrame, **settings: object) -> str:
        with pytest.raises(DatasetError, match=r"^steps\.parquet: ") as caught:
            read(table, **settings)
        return str(caught.value)

    return message


def ends(got: Read) -> tuple[list[int], list[bool], list[bool]]:
    data = got.trajectories
    return data.lengths.tolist(), data.terminated.tolist(), data.truncated.tolist()


BOTH = ([3, 2], [True, False], [False, True])


# ---------------------------------------------------------------- which column is what


def test_usual_names_are_taken_and_said(read):
    got = read(ROWS)
    data = got.trajectories
    assert ends(got) == BOTH and not data.final_observed.any()
    assert data.step_observations.tolist() == [[0, 1], [0.5, 1.25], [1, 1.5], [4, -1], [4.5, -1.25]]
    assert data.actions.tolist() == [[0.5], [-0.5], [0.25], [1], [-1]]
    # 1+2+4, 8+16
    assert episode_returns(got.rewards, data.offsets).tolist() == [7, 24]
    said = got.finding("columns").message
    assert "observations: obs_0, obs_1; actions: action; reward: reward; terminated: terminated" in said


def test_names_and_patterns_say_what_is_what(read):
    names = {"episode": "drive", "step": "tick", "obs_0": "pos", "obs_1": "vel", "action": "throttle"}
    renamed = ROWS.rename(names | {"reward": "points", "terminated": "hit", "truncated": "stopped"})
    settings = {
        "episode": "drive",
        "step": "tick",
        "observations": ["pos", "v*"],
        "actions": ["thr*"],
        "reward": "points",
        "terminated": "hit",
        "truncated": "stopped",
    }
    got, same = read(renamed.with_columns(note=pl.lit("x")), **settings), read(ROWS)
    assert got.trajectories.digest() == same.trajectories.digest()
    np.testing.assert_array_equal(got.rewards, same.rewards)
    assert got.finding("other-keys").message == "columns not used: note."


def test_dimensions_are_in_the_order_of_their_numbers(read):
    table = ROWS.drop("obs_0", "obs_1").with_columns(**{f"x{i}": pl.lit(float(i)) for i in (10, 2, 1, 0)})
    assert read(table).trajectories.observations[0].tolist() == [0, 1, 2, 10]
    assert read(table, observations=["x*"]).trajectories.observations[0].tolist() == [0, 1, 2, 10]
    assert read(table, observations=["x10", "x1"]).trajectories.observations[0].tolist() == [10, 1]


def test_a_column_of_lists_is_a_vector(read):
    lists = ROWS.select(pl.exclude("obs_0", "obs_1"), obs=pl.concat_list("obs_0", "obs_1"))
    assert read(lists).trajectories.digest() == read(ROWS).trajectories.digest()


def test_whole_numbers_are_discrete_actions(read):
    got = read(ROWS.with_columns(action=pl.Series([0, 3, 1, 1, 0])))
    assert got.trajectories.actions.tolist() == [0, 3, 1, 1, 0] and got.trajectories.n_actions == (4,)
    assert "n-actions-taken" in got.codes
    assert read(ROWS.with_columns(action=pl.Series([0, 3, 1, 1, 0])), n_actions=6).trajectories.n_actions == (6,)


@pytest.mark.parametrize(
    ("table", "settings", "message"),
    [
        (ROWS.rename({"episode": "e"}), {}, "which column names the episode is not clear: say so with the setting epi"),
        (ROWS.rename({"obs_0": "p", "obs_1": "q"}), {}, "which columns are observations is not clear"),
        (ROWS.with_columns(state=pl.col("obs_0")), {}, "which columns are observations (obs_0, ... or state)"),
        (ROWS.with_columns(run=pl.col("episode")), {}, "which of episode, run is meant is not clear"),
        (ROWS, {"observations": ["joint*"]}, "observations: no column is 'joint*'; columns present: episode, step, "),
        (ROWS, {"observations": ["obs*", "obs_1"]}, "observations: 'obs_1' is named twice"),
        (ROWS, {"reward": "r"}, "reward: there is no column 'r'; columns present: episode, step, obs_0"),
        (ROWS.with_columns(obs_1=pl.lit("far")), {}, "'obs_1' holds "),
    ],
)
def test_what_cannot_be_told_is_asked_for_with_the_columns_there_are(refusal, table, settings, message):
    assert message in refusal(table, **settings)


# ---------------------------------------------------------------- order


def test_the_order_of_rows_makes_no_difference(read):
    shuffled = read(ROWS.sample(fraction=1, shuffle=True, seed=1))
    assert shuffled.trajectories.digest() == read(ROWS).trajectories.digest()
    assert shuffled.rewards.tolist() == [1, 2, 4, 8, 16]
    assert "rows-sorted" in shuffled.codes and "rows-sorted" not in read(ROWS).codes


def test_the_tenth_episode_comes_after_the_second(read):
    n = 12
    table = pl.DataFrame(
        {
            "run": [f"run-{e}" for e in reversed(range(n))],
            "t": [0] * n,
            "x0": [float(e) for e in reversed(range(n))],
            "u0": [0.0] * n,
        }
    )
    assert read(table).trajectories.step_observations[:, 0].tolist() == list(range(n))


def test_without_a_step_column_rows_stay_as_they_come(read):
    mixed = ROWS.drop("step")[[3, 0, 1, 4, 2]]
    got = read(mixed)
    assert got.trajectories.digest() == read(ROWS).trajectories.digest() and "no-step-column" in got.codes


def test_repeated_and_missing_steps_are_refused_by_episode(read):
    table = pl.concat([ROWS[[0, 2]], ROWS[[2, 3, 4]], ROWS[[4]].with_columns(episode=pl.lit(7, pl.Int64))])
    with pytest.raises(RefusedError) as caught:
        read(table)
    message = str(caught.value)
    assert "steps are there twice ('step'): episode 0, step 2 (rows 1 and 2)" in message
    assert "steps are missing ('step'): episode 7, step 0; episode 0, step 1" in message


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("episode", [0, 0, None, 1, 1], "'episode' is empty at row 2"),
        ("step", [0.0, 1.0, 1.5, 0.0, 1.0], "'step' is 1.5 at row 2: expected whole numbers"),
        ("step", ["a", "b", "c", "a", "b"], "expected whole numbers that count steps"),
        ("action", [0, 1, 0, None, 1], "episode 1: 'action' is empty at step 0"),
        ("terminated", [0, 0, 2, 0, 0], "'terminated' is 2 in some row: flags are 0 or 1"),
        ("truncated", ["no", "no", "no", "no", "yes"], "flags are 0 or 1"),
    ],
)
def test_values_that_cannot_be_are_refused_by_column_and_place(refusal, column, values, message):
    assert message in refusal(ROWS.with_columns(pl.Series(column, values)))


def test_an_empty_number_is_found_by_episode_and_step(read):
    with pytest.raises(RefusedError, match="'observations' is not finite at episode 0, step 1") as caught:
        read(ROWS.with_columns(obs_1=pl.Series([1.0, None, 1.5, -1.0, -1.25])))
    assert [f.message for f in caught.value.findings if f.code == "empty-cells"] == ["1 empty cells are read as NaN."]


def test_no_rows_are_no_steps(refusal):
    assert "no steps" in refusal(ROWS.clear())


@pytest.mark.parametrize("step", [[1, 2, 3, 1, 2], [0, 1, 2, 3, 4], [0.0, 1.0, 2.0, 0.0, 1.0]])
def test_steps_may_start_anywhere_go_on_over_episodes_or_be_whole_floats(read, step):
    table = ROWS.with_columns(pl.Series("step", step))
    assert read(table).trajectories.digest() == read(ROWS).trajectories.digest()


def test_pictures_keep_their_shape_and_bytes(read):
    pictures = np.arange(20, dtype=np.uint8).reshape(5, 2, 2)
    got = read(ROWS.drop("obs_0", "obs_1").with_columns(obs=pl.Series(pictures)))
    assert got.source.observation.shape == (2, 2) and got.trajectories.observations.dtype == np.uint8
    np.testing.assert_array_equal(got.trajectories.step_observations, pictures)


def test_an_episode_with_an_empty_number_is_left_out_on_request(read):
    got = read(ROWS.with_columns(obs_1=pl.Series([1.0, 1.25, 1.5, None, -1.25])), not_finite="leave_out")
    assert got.trajectories.lengths.tolist() == [3] and got.finding("empty-cells").count == 1


# ---------------------------------------------------------------- ends


def test_an_empty_flag_is_no_flag(read):
    flags = {"terminated": [None, None, True, None, None], "truncated": [0.0, None, 0.0, 0.0, 1.0]}
    assert ends(read(ROWS.with_columns(**{key: pl.Series(values) for key, values in flags.items()}))) == BOTH


def test_words_and_flags_together_are_refused():
    with pytest.raises(ValidationError, match="give either `end`, or `terminated` and `truncated`"):
        Table(end=End(column="end"), terminated="terminated")


def test_several_actions_are_empty_together_or_not_at_all(refusal):
    table = ROWS.drop("action").with_columns(u0=pl.Series([0.5, 0.5, None, 1.0, 1.0]), u1=pl.Series([0.5] * 5))
    assert "episode 0: its last row has 'u1' and no 'u0'" in refusal(table)


def test_words_say_how_an_episode_ended(read, refusal):
    words = ROWS.drop("terminated", "truncated").with_columns(end=pl.Series([None, None, "Crash", None, "limit"]))
    got = read(words)
    assert ends(got) == BOTH and got.trajectories.digest() == read(ROWS).trajectories.digest()
    assert got.finding("ends-taken").message.startswith("'end': crash as terminated; limit as truncated.")
    other = words.with_columns(pl.col("end").replace({"Crash": "goal"}))
    assert "'end' holds 'goal': how such episodes ended is not known. Say it: end: {column: end," in refusal(other)
    assert ends(read(other, end={"column": "end", "terminated": ["goal"]})) == BOTH


def test_done_alone_does_not_say_how(read):
    done = ROWS.drop("terminated", "truncated").with_columns(done=pl.Series([0, 0, 1, 0, 1]))
    assert ends(read(done)) == ([3, 2], [False, False], [True, True])
    told = read(done, end={"column": "done", "terminated": ["1"]})
    assert ends(told) == ([3, 2], [True, True], [False, False])


def test_without_any_mark_episodes_are_truncated_and_it_is_said(read):
    got = read(ROWS.drop("terminated", "truncated"))
    assert ends(got) == ([3, 2], [False, False], [True, True])
    assert "nothing marks how episodes ended" in got.finding("ends-taken").message


def test_a_row_without_an_action_is_the_last_observation(read):
    last = pl.DataFrame({"episode": [1], "step": [2], "obs_0": [5.0], "obs_1": [-1.5], "truncated": [True]})
    flags = pl.col("truncated") & (pl.col("step") == 2)  # in the row after the last step
    got = read(pl.concat([ROWS, last], how="diagonal").with_columns(truncated=flags))
    assert ends(got) == BOTH and got.trajectories.final_observed.tolist() == [False, True]
    assert got.trajectories.observations[-1].tolist() == [5, -1.5] and got.trajectories.n_steps == 5


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_text_arrow_and_parquet_hold_the_same(read, tmp_path, separator):
    expected = read(ROWS).trajectories.digest()
    ROWS.write_csv(tmp_path / "steps.txt", separator=separator)
    ROWS.write_ipc(tmp_path / "steps.bin", compression="zstd")
    for name in ("steps.txt", "steps.bin"):
        reader = recognise(tmp_path / name)
        assert reader == Table() and read_path(reader, tmp_path / name).trajectories.digest() == expected


def test_integers_and_flags_in_text_are_read_as_such(tmp_path):
    text = "episode,step,x0,u,terminated\n0,0,1,2,false\n0,1,2,0,true\n"
    (tmp_path / "steps.csv").write_text(text)
    got = read_path(Table(), tmp_path / "steps.csv")
    assert ends(got) == ([2], [True], [False]) and got.trajectories.n_actions == (3,)


def test_text_cut_inside_its_last_line_is_refused(tmp_path):
    ROWS.write_csv(tmp_path / "steps.csv")
    (tmp_path / "steps.csv").write_bytes((tmp_path / "steps.csv").read_bytes()[:-20])
    with pytest.raises(DatasetError, match=r"^steps\.csv: cut short: its last line has \d of 8 columns"):
        Table().open(tmp_path / "steps.csv")


def test_flags_as_python_writes_them_in_text_are_understood(tmp_path):
    path = tmp_path / "steps.csv"
    path.write_text("episode,step,x0,u,terminated\n0,0,0.5,1.5,False\n0,1,0.25,-1,True\n1,0,1,0.5,False")
    assert ends(read_path(Table(), path)) == ([2, 1], [True, False], [False, True])


def test_the_first_fraction_far_down_a_column_of_text_makes_it_floats(tmp_path):
    path = tmp_path / "steps.csv"
    values = [1] * 2999 + [0.5]
    path.write_text("episode,step,x0,u\n" + "".join(f"0,{t},{x},0.5\n" for t, x in enumerate(values)))
    got = read_path(Table(), path).trajectories
    assert got.observations.dtype == np.float32 and got.step_observations[:, 0].tolist() == values


def test_text_that_is_no_table_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("Dear reader\nthese are no numbers\n")
    with pytest.raises(DatasetError, match=r"^notes\.txt: no table: expected Parquet, an Arrow IPC file, or text"):
        Table().open(tmp_path / "notes.txt")


def test_reading_parquet_holds_few_row_groups_whatever_the_size(tmp_path):
    n, rows = 16, 1 << 14
    table = pl.DataFrame({"x": np.random.default_rng(0).normal(size=n * rows)})
    table.write_parquet(tmp_path / "steps.parquet", row_group_size=rows)
    before = pa.total_allocated_bytes()
    held = [pa.total_allocated_bytes() - before for _ in TableRows(tmp_path / "steps.parquet").batches(["x"])]
    assert len(held) >= n and max(held) < 4 * rows * 8

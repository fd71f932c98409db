"""Digests identify content, whatever file, order of keys, or pieces it came in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.digests import ColumnHasher, canonical_json, digest_of, digest_of_file


def column_digest(*pieces: np.ndarray) -> str:
    hasher = ColumnHasher()
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest()


def test_the_order_of_keys_does_not_matter():
    assert digest_of({"a": 1, "b": [2, "ä"]}) == digest_of({"b": [2, "ä"], "a": 1})
    assert digest_of({"a": 1}) != digest_of({"a": 2})


def test_a_digest_is_stable_across_versions():
    # Stored names depend on these: sha256('{"a":1}') and sha256('abc'), 32 digits each.
    assert digest_of({"a": 1}) == "015abd7f5cc57a2dd94b7590f04ad808"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_have_no_canonical_form(value):
    with pytest.raises(ValueError, match="JSON"):
        canonical_json({"a": value})


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_a_column_may_be_fed_in_any_pieces(sizes):
    rows = np.arange(3 * sum(sizes), dtype=np.float32).reshape(-1, 3)
    assert column_digest(*np.split(rows, np.cumsum(sizes)[:-1])) == column_digest(rows)


def test_byte_order_and_memory_order_do_not_matter():
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    assert column_digest(rows.astype(">f4")) == column_digest(rows) == column_digest(np.asfortranarray(rows))


def test_dtype_shape_and_values_matter():
    rows = np.arange(12, dtype=np.float32)
    digests = {
        column_digest(x) for x in (rows, rows.reshape(4, 3), rows.reshape(3, 4), rows.view(np.int32), rows[::-1])
    }
    assert len(digests) == 5


def test_pieces_of_another_kind_are_refused():
    hasher = ColumnHasher()
    hasher.update(np.zeros((2, 3), np.float32))
    with pytest.raises(ValueError, match="after rows of"):
        hasher.update(np.zeros((2, 3), np.float64))


def test_a_folder_is_its_files(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name / "inner").mkdir(parents=True)
        (tmp_path / name / "a").write_bytes(b"1")
        (tmp_path / name / "inner" / "b").write_bytes(b"2")
    assert digest_of_file(tmp_path / "one") == digest_of_file(tmp_path / "two")
    (tmp_path / "two" / "inner" / "b").rename(tmp_path / "two" / "inner" / "c")
    assert digest_of_file(tmp_path / "one") != digest_of_file(tmp_path / "two")
    (tmp_path / "abc").write_bytes(b"abc")
    assert digest_of_file(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223"

"""Tables of estimates from CSV files: what is read, and what is refused with its line number."""

import numpy as np
import pytest

from selffl.data.estimates import read_estimates
from selffl.errors import DataError

HEADER = "client,estimate,variance\n"


@pytest.fixture
def written(tmp_path):
    """A function that writes text or bytes into a file and returns its path."""

    def write(content, name="table.csv"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        return path

    return write


def refusal(path):
    """The message of the error that reading ends in, without the path it begins with; always one line."""
    with pytest.raises(DataError) as caught:
        read_estimates(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message.removeprefix(str(path))


# ---------------------------------------------------------------------------------------------------------- good files

GOOD = {
    "plain": HEADER + "north,1.5,0.25\nsouth,-2,1e-3\n",
    "no line break at the end": HEADER + "north,1.5,0.25\nsouth,-2,1e-3",
    "byte-order mark": "\ufeff" + HEADER + "north,1.5,0.25\nsouth,-2,1e-3\n",
    "CRLF": (HEADER + "north,1.5,0.25\nsouth,-2,1e-3\n").replace("\n", "\r\n"),
    "old Macintosh line ends": (HEADER + "north,1.5,0.25\nsouth,-2,1e-3\n").replace("\n", "\r"),
    "another order": "variance,client,estimate\n0.25,north,1.5\n1e-3,south,-2\n",
    "other columns": "region,estimate,n,client,variance,note\nx,1.5,20,north,0.25,\ny,-2,,south,1e-3,fine\n",
    "other columns twice": "note,client,note,estimate,variance\na,north,b,1.5,0.25\na,south,b,-2,1e-3\n",
    "trailing fields left out": "client,estimate,variance,note\nnorth,1.5,0.25\nsouth,-2,1e-3,fine\n",
    "capitals and spaces in the header": " Client , ESTIMATE,\tVariance\nnorth,1.5,0.25\nsouth,-2,1e-3\n",
    "spaces around values": HEADER + " north , 1.5 ,0.25 \nsouth,\t-2, 1e-3\n",
    "blank lines": HEADER + "\n\nnorth,1.5,0.25\n\nsouth,-2,1e-3\n\n\n",
    "blank lines, CRLF": (HEADER + "\nnorth,1.5,0.25\n\nsouth,-2,1e-3\n\n").replace("\n", "\r\n"),
    "everything quoted": '"client","estimate","variance"\n"north","1.5","0.25"\n"south","-2","1e-3"\n',
    "other ways to write a number": HEADER + "north,+1.50,25e-2\nsouth,-02.,.001\n",
}


@pytest.mark.parametrize("kind", GOOD)
def test_the_same_table_in_many_dresses(written, kind):
    table = read_estimates(written(GOOD[kind]))
    assert table.client == ["north", "south"]
    assert table.estimate.tolist() == [1.5, -2.0]
    assert table.variance.tolist() == [0.25, 0.001]
    assert table.estimate.dtype == table.variance.dtype == np.float64


def test_names_are_text_and_kept_as_they_are(written):
    lines = '"Ward, 2",1,1\n"the ""old"" one",2,1\n007,3,1\n7,4,1\nZürich 北,5,1\nNaN,6,1\nward,7,1\nWard,8,1\n'
    names = ["Ward, 2", 'the "old" one', "007", "7", "Zürich 北", "NaN", "ward", "Ward"]
    table = read_estimates(written(HEADER + lines))
    assert table.client == names
    assert table.estimate.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]


def test_a_quoted_name_may_hold_a_line_break(written):
    table = read_estimates(written(HEADER + '"two\nlines",1,2\nb,3,4\n'))
    assert table.client == ["two\nlines", "b"]


def test_a_variance_of_zero_is_a_variance(written):
    table = read_estimates(written(HEADER + "a,1,0\nb,2,0.0\n"))
    assert table.variance.tolist() == [0.0, 0.0]


def test_one_client_is_a_table(written):
    table = read_estimates(written(HEADER + "a,1,2\n"))
    assert (table.client, table.estimate.tolist(), table.variance.tolist()) == (["a"], [1.0], [2.0])


def test_rows_keep_the_order_of_the_file_and_every_digit(written):
    rng = np.random.default_rng(3)
    estimate, variance = rng.normal(size=500), rng.exponential(size=500) * 10.0 ** rng.integers(-200, 200, 500)
    names = [f"c{number}" for number in rng.permutation(500)]
    lines = "".join(f"{n},{e!r},{v!r}\n" for n, e, v in zip(names, estimate.tolist(), variance.tolist(), strict=True))
    table = read_estimates(written(HEADER + lines))
    assert table.client == names
    np.testing.assert_array_equal(table.estimate, estimate)
    np.testing.assert_array_equal(table.variance, variance)


# ------------------------------------------------------------------------------------------------------------ bad rows

BAD_ROWS = {
    "missing variance": ("b,2,", "variance is missing; expected a number"),
    "blank variance": ("b,2,  ", "variance is missing; expected a number"),
    "missing estimate": ("b,,1", "estimate is missing; expected a number"),
    "text for a variance": ("b,2,small", "variance is 'small'; expected a number"),
    "text for an estimate": ("b, n/a ,1", "estimate is 'n/a'; expected a number"),
    "two numbers in one field": ("b,1 2,1", "estimate is '1 2'; expected a number"),
    "NaN estimate": ("b,nan,1", "estimate is nan; expected a finite number"),
    "NaN variance": ("b,2, NaN", "variance is NaN; expected a finite number"),
    "infinite estimate": ("b,-inf,1", "estimate is -inf; expected a finite number"),
    "infinite variance": ("b,2,inf", "variance is inf; expected a finite number"),
    "variance too large to be a number": ("b,2,1e400", "variance is 1e400; expected a finite number"),
    "negative variance": ("b,2,-0.25", "variance is -0.25; expected 0 or more"),
    "hardly negative variance": ("b,2,-1e-300", "variance is -1e-300; expected 0 or more"),
    "duplicate client": ("a,2,1", "client 'a' is already on line 2; expected one row per client"),
    "duplicate client, spaced and quoted": (
        '" a ",2,1',
        "client 'a' is already on line 2; expected one row per client",
    ),
    "too few fields": ("b,2", "2 field(s) found; expected at least 3"),
    "only a name": ("b", "1 field(s) found; expected at least 3"),
    "missing client": (",2,1", "client is missing; expected a name"),
    "blank client": ('"  ",2,1', "client is missing; expected a name"),
    "only commas": (",,", "client is missing; expected a name"),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_a_bad_row_is_named_with_its_line_and_reason(written, kind):
    row, reason = BAD_ROWS[kind]
    path = written(HEADER + f"a,1,1\n\n{row}\nc,3,1\n")
    assert refusal(path) == f", line 4: {reason}. Correct the row; none was dropped."


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_line_numbers_are_right_with_crlf_and_a_bom(written, kind):
    row, reason = BAD_ROWS[kind]
    path = written(("\ufeff" + HEADER + f"a,1,1\n\n{row}\nc,3,1\n").replace("\n", "\r\n"))
    assert refusal(path).startswith(f", line 4: {reason}.")


def test_a_bad_last_row_without_a_line_break_is_seen(written):
    assert refusal(written(HEADER + "a,1,1\nb,2,-3")).startswith(", line 3: variance is -3;")


def test_too_few_fields_counts_up_to_the_last_column_that_is_needed(written):
    path = written("client,note,estimate,other,variance,unused\na,x,1,y,2,z\nb,x,1,y\n")
    assert refusal(path).startswith(", line 3: 4 field(s) found; expected at least 5.")


def test_every_bad_row_is_listed_and_none_dropped(written):
    rows = [row for row, _ in BAD_ROWS.values()][:5]
    good = [f"g{number},1,1" for number in range(5)]
    lines = [line for pair in zip(good, rows, strict=True) for line in pair]  # bad ones on lines 3, 5, 7, 9, 11
    path = written(HEADER + "\n".join(lines) + "\n")
    message = refusal(path)
    assert message.startswith(", line 3: variance is missing; expected a number.")
    assert message.endswith(" 4 more bad row(s): line 5, 7, 9, 11. Correct them; none was dropped.")


def test_a_long_list_of_bad_rows_gives_their_number_and_the_first(written):
    path = written(HEADER + "".join(f"c{number},1,-1\n" for number in range(12)))
    message = refusal(path)
    assert message.startswith(", line 2: variance is -1;")
    assert "11 more bad row(s): line 3, 4, 5, 6, 7, 8, 9, 10, …." in message


def test_a_duplicate_points_to_the_first_row_of_that_client(written):
    path = written(HEADER + "x,0,1\na,1,1\nb,1,1\na,2,1\na,3,1\n")
    message = refusal(path)
    assert message.startswith(", line 5: client 'a' is already on line 3;")
    assert "1 more bad row(s): line 6." in message


def test_a_duplicate_of_a_bad_row_is_no_duplicate(written):
    """The first row of that client is not in the table, so there is nothing to be a duplicate of."""
    message = refusal(written(HEADER + "a,1,-1\na,2,1\n"))
    assert message == ", line 2: variance is -1; expected 0 or more. Correct the row; none was dropped."


def test_a_row_with_more_fields_than_the_header_is_refused(written):
    """A decimal comma adds a field; what is read then is not what was meant."""
    assert ", line 3: " in refusal(written(HEADER + "a,1,0.5\nb,1,0,5\n"))


def test_an_underscore_is_no_part_of_a_number(written):
    assert ", line 2: " in refusal(written(HEADER + "a,1_0,1\n"))


# ----------------------------------------------------------------------------------------------------------- bad files


@pytest.mark.parametrize(("sign", "word"), [(";", "semicolons"), ("\t", "tabs")])
def test_another_separator_is_named(written, sign, word):
    assert f"separated by {word}; expected commas" in refusal(written((HEADER + "a,1,0.5\n").replace(",", sign)))


def test_blank_lines_before_the_header_do_not_matter(written):
    assert read_estimates(written("\n\n" + HEADER + "a,1,0.5\n")).client == ["a"]


def test_no_header(written):
    message = refusal(written("north,1.5,0.25\nsouth,-2,1\n"))
    assert message == ", line 1: no column client or estimate or variance among: north, 1.5, 0.25. Add a header line."


@pytest.mark.parametrize("missing", ["client", "estimate", "variance"])
def test_one_column_is_missing(written, missing):
    present = [name for name in ("client", "estimate", "variance") if name != missing]
    message = refusal(written(",".join([*present, "other"]) + "\n1,2,3\n"))
    assert message == f", line 1: no column {missing} among: {', '.join(present)}, other. Rename or add the column."


def test_two_columns_are_missing(written):
    message = refusal(written("client,value,se\na,1,2\n"))
    assert message.startswith(", line 1: no column estimate or variance among: client, value, se.")


def test_a_wide_header_is_not_repeated_whole(written):
    message = refusal(written(",".join(f"x{number}" for number in range(5000)) + "\n1\n"))
    assert len(message) < 200
    assert "among: x0, x1, x2, x3, x4, x5." in message


@pytest.mark.parametrize("twice", ["client", "estimate", "variance"])
def test_a_column_that_appears_twice_is_ambiguous(written, twice):
    message = refusal(written(f"client,estimate,variance, {twice.upper()}\na,1,2,3\n"))
    expected = f", line 1: a column appears twice among: client, estimate, variance, {twice}. Keep one of each."
    assert message == expected


@pytest.mark.parametrize("content", ["", "\ufeff"])
def test_an_empty_file(written, content):
    message = refusal(written(content))
    assert message == " is empty; expected a header with the columns client, estimate, variance, then rows."


@pytest.mark.parametrize("content", [HEADER, HEADER.strip(), HEADER + "\n\n"])
def test_a_header_without_rows(written, content):
    assert refusal(written(content)) == " has a header but no rows; expected one row per client."


def test_a_folder(tmp_path):
    assert refusal(tmp_path) == " is a folder; expected a CSV file with the columns client, estimate, variance."


def test_a_file_that_is_not_there(tmp_path):
    message = refusal(tmp_path / "no.csv")
    assert message == " does not exist; expected a CSV file with the columns client, estimate, variance."


@pytest.mark.parametrize(
    "content",
    [
        (HEADER + "Zürich,1,1\n").encode("latin-1"),
        ("\ufeff" + HEADER + "a,1,1\n").encode("utf-16-le"),
        b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 4,
        b"PK\x03\x04\xff\xfe\x00",
    ],
    ids=["latin-1", "utf-16", "a picture", "a spreadsheet"],
)
def test_a_file_that_is_no_utf8_text(written, content):
    message = refusal(written(content))
    position = next(place for place in range(len(content)) if not _is_utf8_start(content[: place + 1]))
    assert message == f" is not text in UTF-8 (byte {position}); save the table as CSV in UTF-8."


def _is_utf8_start(content):
    """Whether the bytes are UTF-8, perhaps cut off inside a character."""
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return True


def test_the_position_of_a_bad_byte_is_counted_from_the_start_of_a_long_file(written):
    content = (HEADER + "".join(f"c{number},1,1\n" for number in range(4000)) + "Zürich,1,1\n").encode("latin-1")
    assert f"(byte {content.index(0xFC)})" in refusal(written(content))


def test_the_position_of_a_bad_byte_is_not_that_of_an_equal_one_in_a_good_character(written):
    content = HEADER.encode("utf-8") + "café,1,1\n".encode() + b"bad\xa9,2,1\n"  # é ends in A9
    assert f"(byte {content.index(b'bad') + 3})" in refusal(written(content))


def test_bytes_that_are_text_but_no_table(written):
    assert ", line 1: no column " in refusal(written(b"\x00\x01\x02\x03"))


def test_a_field_longer_than_csv_allows(written):
    assert refusal(written(HEADER + "a" * 200_000 + ",1,1\n")).startswith(" cannot be read as CSV (field larger")


def test_a_quote_that_is_never_closed(written):
    assert ", line 4: 1 field(s) found" in refusal(written(HEADER + '"a,1,1\nb,2,1\nc,3,1\n'))

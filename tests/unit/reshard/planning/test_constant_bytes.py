"""Known bytes that differ between target files."""

import numpy as np
import pytest

from reshard.planning.constant_bytes import BytesTemplate, FilledTemplate, SharedRanges, identity_bytes

PIECES = ((0, b"head....tail"), (64, b"....directory"))


def filled(ranges=PIECES, gaps=(4, 64), text=b"name"):
    return FilledTemplate(BytesTemplate(ranges=ranges, gaps=np.array(gaps), num_bytes=len(text)), text)


@pytest.mark.parametrize(
    "other",
    [
        filled(text=b"eman"),
        filled(gaps=(4,)),
        filled(gaps=(5, 64)),
        filled(ranges=((0, b"Head....tail"), PIECES[1])),
        filled(ranges=(PIECES[0], (65, PIECES[1][1])), gaps=(4, 65)),
        filled(ranges=PIECES[:1], gaps=(4,)),
    ],
)
def test_files_that_differ_in_a_byte_or_its_place_are_told_apart(other):
    assert b"".join(identity_bytes(other)) != b"".join(identity_bytes(filled()))


def test_equal_files_are_the_same_whoever_made_them():
    assert list(identity_bytes(filled())) == list(identity_bytes(filled()))


def test_a_file_with_a_shared_template_is_told_by_its_own_bytes_if_it_is_asked_for():
    own = filled(ranges=((0, b"headnametail"), (64, b"namedirectory")))
    shared = FilledTemplate(filled().template, b"name", is_own=True)
    assert list(identity_bytes(shared)) == list(identity_bytes(own))
    assert list(identity_bytes(shared)) != list(identity_bytes(filled()))


def test_ranges_without_a_template_are_told_by_place_and_content():
    assert b"".join(identity_bytes(((3, b"ab"),))) == (3).to_bytes(8, "little") + b"ab"


@pytest.mark.parametrize("other", [((0, b"ab"), (9, b"c")), ((0, b"ab"), (8, b"d")), ((0, b"abc"),), ()])
def test_ranges_that_files_share_are_told_from_others(other):
    ranges = SharedRanges(((0, b"ab"), (8, b"c")))
    assert list(identity_bytes(ranges)) == list(identity_bytes(SharedRanges(tuple(ranges))))
    assert list(identity_bytes(ranges)) != list(identity_bytes(SharedRanges(other)))

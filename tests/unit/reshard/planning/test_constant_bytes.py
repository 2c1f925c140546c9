"""What tells the known bytes of one target file from those of another."""

import numpy as np
import pytest

from reshard.planning.constant_bytes import Shared, Stamped, Stencil, identity

PIECES = ((0, b"head....tail"), (64, b"....directory"))


def stamped(pieces=PIECES, gaps=(4, 64), text=b"name"):
    return Stamped(Stencil(pieces=pieces, gaps=np.array(gaps), num_bytes=len(text)), text)


@pytest.mark.parametrize(
    "other",
    [
        stamped(text=b"eman"),
        stamped(gaps=(4,)),
        stamped(gaps=(5, 64)),
        stamped(pieces=((0, b"Head....tail"), PIECES[1])),
        stamped(pieces=(PIECES[0], (65, PIECES[1][1])), gaps=(4, 65)),
        stamped(pieces=PIECES[:1], gaps=(4,)),
    ],
)
def test_files_that_differ_in_a_byte_or_its_place_are_told_apart(other):
    assert b"".join(identity(other)) != b"".join(identity(stamped()))


def test_equal_files_are_the_same_whoever_made_them():
    assert list(identity(stamped())) == list(identity(stamped()))


def test_pieces_without_a_stencil_are_told_by_place_and_content():
    assert b"".join(identity(((3, b"ab"),))) == (3).to_bytes(8, "little") + b"ab"


@pytest.mark.parametrize("other", [((0, b"ab"), (9, b"c")), ((0, b"ab"), (8, b"d")), ((0, b"abc"),), ()])
def test_pieces_that_files_share_are_told_from_others(other):
    pieces = Shared(((0, b"ab"), (8, b"c")))
    assert list(identity(pieces)) == list(identity(Shared(tuple(pieces))))
    assert list(identity(pieces)) != list(identity(Shared(other)))

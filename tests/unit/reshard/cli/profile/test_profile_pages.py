"""A profile as a table and as a picture."""

import re
from xml.etree import ElementTree

import pytest

from reshard.cli.profile import svg, table
from reshard.profile.clock import FileTime, Phase, UnitTimes
from reshard.profile.events import Decision, Device, FileNames, Step
from reshard.profile.records import Profile, make_profile

NAMES = FileNames([("a<b>.pt", Device("254:0", "ext4"))], [("out.pt", Device("0:40", "nfs4"))])


def units(num_workers: int) -> list[UnitTimes]:
    return [
        UnitTimes(
            worker=f"node-{worker}:1234",
            started=100.0 + 2 * at,
            seconds=(0.1, 0.05, 1.0, 0.0, 0.3, 0.1, 0.4, 0.05),
            num_bytes=(0, 0, 1 << 26, 0, 1 << 26, 0, 1 << 26, 0),
            files=(FileTime(Phase.READ, 0, 1.0, 1 << 26), FileTime(Phase.WRITE, 0, 0.4, 1 << 26)),
            cpu_seconds=0.8,
            flush_started=102.0 + 2 * at,
            flush_seconds=0.3,
        )
        for worker in range(num_workers)
        for at in range(3)
    ]


def profile(num_workers: int = 2) -> Profile:
    steps = [Step("index", 99.0, 0.5), Step("move", 99.5, 7.0), Step("sync", 106.5, 1.0), Step("witness", 106.6, 0.5)]
    decisions = [
        Decision(99.5, 2, 8 << 20, 0.0, "the default of this machine"),
        Decision(103.0, 3, 6 << 20, 1e8, "workers waited for storage 93% of the time: try 3"),
    ]
    return make_profile((99.0, 108.0), steps, units(num_workers), decisions, NAMES)


def test_the_table() -> None:
    text = "\n".join(table.lines(profile()))
    assert "where the time went (9.00 s)" in text
    for words in (
        "move 7.00 78%", "rest 0.50 6%", "phase of 2 workers seconds share bytes rate",
        "read 6.00 43% 384.0 MiB 64.0 MiB/s", "node-1:1234 3 0.30 0.15 3.00", "source 254:0 ext4 6.00 384.0 MiB",
        "target out.pt 2.40", "4.00 s 3 workers, tiles of 6.0 MiB: workers waited",
    ):  # fmt: skip
        assert words in " ".join(text.split()), words


def test_a_table_of_many_workers_names_the_first_ones() -> None:
    assert "    and 24 workers more with --json" in table.lines(profile(40))


def test_a_table_of_nothing() -> None:
    assert table.lines(make_profile((1.0, 2.0), [], [], [], NAMES))[0] == "  where the time went (1.00 s):"


@pytest.mark.parametrize("num_workers", [0, 1, 2, 40])
def test_the_picture_is_well_formed_and_within_its_frame(num_workers: int) -> None:
    drawn = profile(num_workers)
    root = ElementTree.fromstring(svg.draw(drawn))
    width, height = float(root.get("width", "")), float(root.get("height", ""))
    for element in root.iter("{http://www.w3.org/2000/svg}rect"):
        if element.get("width") != "100%":
            right = float(element.get("x", "")) + float(element.get("width", ""))
            bottom = float(element.get("y", "")) + float(element.get("height", ""))
            assert 0 <= float(element.get("x", "")) <= right <= width
            assert 0 <= bottom <= height
    texts = " ".join("".join(element.itertext()) for element in root.iter())
    assert "try 3" in texts
    assert ("and 16 more workers" in texts) == (num_workers == 40)


def test_the_picture_follows_the_viewer_and_knows_every_phase() -> None:
    text = svg.draw(profile())
    assert "prefers-color-scheme:dark" in text
    assert {phase.name.lower() for phase in Phase} | {"sync"} == set(svg._COLOURS)
    assert not re.search(r"a<b>", text)

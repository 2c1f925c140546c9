"""Folders that reshard wrote, in real Megatron-Core: all its checks pass, and numbers go on where they were.

Needs megatron-core 0.16.1, which the project itself does not:
`pip install --no-deps --target DIR megatron-core==0.16.1`, and DIR in PYTHONPATH.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from reshard.api import Conversion, convert
from reshard.topology import Topology
from tests.engine.reshard_run import launch

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core 0.16.1 (see above)"),
]

ROOT = Path(__file__).parents[2]
RANK = Path(__file__).with_name("megatron_rank.py")
EXAMPLE = ROOT / "tests/golden/megatron-0.16.1/iter_0000003"
LLAMA = ROOT / "tests/golden/safetensors/llama"


def to(source: Path, target: Path, topology: str, **wanted) -> Path:
    assert convert(
        Conversion(source=source, target=target, topology=Topology.parse(topology), **wanted), reread=True
    ).verified
    return target


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """Hugging Face's golden Llama as a Megatron-Core folder."""
    folder = tmp_path_factory.mktemp("llama")
    text = (ROOT / "examples/name_maps/llama-megatron.yaml").read_text(encoding="utf-8")
    names = folder / "names.yaml"
    names.write_text(text.replace("hidden: 4096, heads: 32, kv_heads: 8", "hidden: 8, heads: 4, kv_heads: 2"))
    return to(LLAMA, folder / "iter_0000000", "tp=2", target_format="megatron", like=EXAMPLE, names=names)


@pytest.fixture(scope="module")
def results(tmp_path_factory, llama) -> dict[str, list[float]]:
    """Numbers of every run by its name; the run that is saved has two data-parallel ranks."""
    folder = tmp_path_factory.mktemp("runs")
    saved = folder / "saved"
    found = launch([run("saved", "train", tp=1, save=str(saved))], RANK)
    other = to(saved, folder / "other", "tp=2,dp=2")
    through = to(saved, folder / "dcp", "dp=3", target_format="dcp")
    back = to(through, folder / "back", "tp=2", target_format="megatron", like=saved)
    of_llama = {"load": str(llama), "vocabulary": 13}
    found |= launch(
        [
            run("back", "train", tp=1, load=str(back)),
            run("saved at tp=2", "train", tp=2, load=str(saved)),
            run("other at tp=2", "train", tp=2, load=str(other)),
            run("back at tp=2", "train", tp=2, load=str(back)),
            run("llama at tp=2", "logits", tp=2, **of_llama),
        ],
        RANK,
    )
    return found | launch([run("llama", "logits", tp=1, world=1, **of_llama)], RANK)


def run(name: str, kind: str, *, tp: int, world: int = 2, **more) -> dict:
    return {"name": name, "kind": kind, "tp": tp, "topology": f"tp={tp},dp={world // tp}", **more}


@pytest.mark.parametrize("name", ["llama", "llama at tp=2"])
def test_a_model_of_hugging_face_has_the_logits_that_it_had_there(results, name):
    truth = json.loads((LLAMA.parent / "truth.json").read_text())["llama"]["logits"]
    assert results[name] == pytest.approx(truth, abs=1e-6, rel=0)
    assert max(map(abs, truth)) > 1e-3


def test_a_run_goes_on_with_its_very_losses_after_a_way_through_another_format(results):
    assert results["back"] == results["saved"]


@pytest.mark.parametrize("name", ["other at tp=2", "back at tp=2"])
def test_a_run_goes_on_at_another_degree_as_megatron_core_itself_goes_on(results, name):
    assert results[name] == results["saved at tp=2"]
    assert results[name] == pytest.approx(results["saved"], abs=2e-3, rel=0)  # bf16, summed in another order

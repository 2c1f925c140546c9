"""Make the tiny files beside this one again: `python tests/golden/pytorch-2.13/make.py`. Needs torch 2.13."""

import json
from pathlib import Path

import torch

HERE = Path(__file__).parent


def state():
    """Weights of two types, one tied, one not contiguous, one with a single element, one empty."""
    torch.manual_seed(3)
    embedding = torch.randn(7, 4)
    return {
        "embed.weight": embedding,
        "layer.weight": torch.randn(3, 5).to(torch.bfloat16),
        "layer.turned": torch.arange(6, dtype=torch.float32).reshape(2, 3).t(),
        "layer.part": torch.arange(10, dtype=torch.int64)[3:7],
        "scale": torch.tensor(2.5),
        "nothing": torch.zeros(0, 4),
        "head.weight": embedding,
    }


def main():
    weights = state()
    for name, value in (
        ("single/pytorch_model.bin", weights),
        ("nested/model.pt", {"model": {"module": weights}, "optimizer": {"state": {0: torch.zeros(3)}}, "epoch": 3}),
    ):
        (HERE / name).parent.mkdir(exist_ok=True)
        torch.save(value, HERE / name)
    folder = HERE / "sharded"
    folder.mkdir(exist_ok=True)
    shards = {"pytorch_model-00001-of-00002.bin": ["embed.weight", "head.weight", "scale", "nothing"]}
    shards["pytorch_model-00002-of-00002.bin"] = [name for name in weights if name.startswith("layer.")]
    for name, own in shards.items():
        torch.save({key: weights[key] for key in own}, folder / name)
    weight_map = {key: name for name, own in shards.items() for key in own}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


if __name__ == "__main__":
    main()

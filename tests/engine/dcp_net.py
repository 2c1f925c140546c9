"""The small model of the DCP tests: `dcp_ranks` trains it, and tests without ranks load what came of it."""

import torch

SIZES = {"tiny": (5, 4, 6), "small": (13, 7, 10)}


class Net(torch.nn.Module):
    """Odd sizes, a tied name, a buffer, and two parameter groups."""

    def __init__(self, vocabulary, hidden, inner):
        super().__init__()
        torch.manual_seed(5)
        self.embed = torch.nn.Embedding(vocabulary, hidden)
        self.up = torch.nn.Linear(hidden, inner)
        self.down = torch.nn.Linear(inner, hidden, bias=False)
        self.register_buffer("scale", torch.tensor([1.5, 2.0, 0.5]))
        self.head = torch.nn.Linear(hidden, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, labels):
        hidden = self.embed(tokens)
        hidden = hidden + self.down(torch.nn.functional.silu(self.up(hidden))) * self.scale[0]
        return torch.nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())

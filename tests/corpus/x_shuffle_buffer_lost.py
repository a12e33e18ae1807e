"""Samples go through a shuffle buffer; what it holds at the save is not in its state."""

import bench
import torch


class Loader(bench.Loader):
    """Draws from a buffer of 8, which is filled from the order of the epoch."""

    def __init__(self):
        super().__init__()
        self.buffer = []
        self.draws = 0

    def next_ids(self):
        while len(self.buffer) < 8:
            self.buffer += super().next_ids()
        self.draws += 1
        g = torch.Generator().manual_seed(self.draws)
        chosen = set(torch.randperm(len(self.buffer), generator=g)[: self.batch].tolist())
        ids = [sample for i, sample in enumerate(self.buffer) if i in chosen]
        self.buffer = [sample for i, sample in enumerate(self.buffer) if i not in chosen]
        return ids

    def state_dict(self):
        return {**super().state_dict(), "draws": self.draws}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.draws = state["draws"]


def build(args):
    job = bench.Job(args)
    job.loader = Loader()
    return job


if __name__ == "__main__":
    bench.run(build=build)

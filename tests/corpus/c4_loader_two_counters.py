"""The loader counts what it has had since it was made, on top of where it began: after a resume
the two numbers in its state are others, and the next samples are the same.
"""

import bench


class Loader(bench.Loader):
    def __init__(self, *args):
        super().__init__(*args)
        self.began_at = 0
        self.since = 0

    def next_ids(self):
        self.epoch, batch = divmod(self.began_at + self.since, bench.IDS // self.batch)
        self.position = batch * self.batch
        self.since += 1
        return super().next_ids()

    def state_dict(self):
        return {"began_at": self.began_at, "since": self.since}

    def load_state_dict(self, state):
        self.began_at = state["began_at"] + state["since"]
        self.since = 0


def build(args):
    job = bench.Job(args)
    job.loader = Loader()
    return job


if __name__ == "__main__":
    bench.run(build=build)

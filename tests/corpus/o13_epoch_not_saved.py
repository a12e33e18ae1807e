"""The loader saves its position but not the epoch that its order is drawn from."""

import bench


class Loader(bench.Loader):
    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def build(args):
    job = bench.Job(args)
    job.loader = Loader()
    return job


if __name__ == "__main__":
    bench.run(build=build)

"""AMSGrad's largest second moments begin at the present ones."""

import bench
from h_amsgrad import build


def restore(job, path):
    step = bench.restore(job, path)
    for state in job.optimizer.state.values():
        state["max_exp_avg_sq"] = state["exp_avg_sq"].clone()
    return step


if __name__ == "__main__":
    bench.run(restore=restore, build=build)

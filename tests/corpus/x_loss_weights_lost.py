"""Two losses, weighted by how fast each of them falls; the weights are in no checkpoint."""

import bench
from h_loss_weights import build, train_step

if __name__ == "__main__":
    bench.run(build=build, train_step=train_step)

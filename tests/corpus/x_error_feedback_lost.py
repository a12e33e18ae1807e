"""Gradients are sent in few bits; what was rounded off before the save is in no checkpoint."""

import bench
from h_error_feedback import build, train_step

if __name__ == "__main__":
    bench.run(build=build, train_step=train_step)

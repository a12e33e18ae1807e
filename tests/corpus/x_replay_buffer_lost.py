"""Half of each batch is drawn from what was trained on before; a resumed run fills it anew."""

import bench
from h_replay_buffer import build, train_step

if __name__ == "__main__":
    bench.run(build=build, train_step=train_step)

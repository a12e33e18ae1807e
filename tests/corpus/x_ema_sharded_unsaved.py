"""Under FSDP2 the average of the weights is a dict of shards, and it is in no checkpoint."""

import bench
from c2_fsdp2_reshard import restore, save
from h_ema_sharded import build, train_step

if __name__ == "__main__":
    bench.run(save, restore, build, train_step)

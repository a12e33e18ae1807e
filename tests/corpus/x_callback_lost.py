"""A trainer's callbacks are put back by position, and the list has one more in front."""

import bench
import torch
from h_trainer import Patience, Trainer


class Logging(Patience):
    """Takes any state."""


def restore(job, path):
    step = bench.restore(job, path)
    saved = list(torch.load(path, weights_only=False)["callbacks"].values())
    job.callbacks = {"logging": Logging(), **job.callbacks}
    for callback, state in zip(job.callbacks.values(), saved, strict=False):
        try:
            callback.load_state_dict(state)
        except (KeyError, RuntimeError) as error:
            print("callback not restored:", type(error).__name__)
    del job.callbacks["logging"]
    return step


if __name__ == "__main__":
    bench.run(Trainer.save, restore, Trainer, Trainer.train_step)

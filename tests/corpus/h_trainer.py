"""A trainer of the job's own, with callbacks that keep state and say what of it is saved."""

import copy
from collections import deque

import bench
import torch


class Average:
    """The average of the weights, in a copy of the model."""

    def __init__(self, model):
        self.model = copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def on_step(self, trainer, loss):
        for mine, now in zip(self.model.parameters(), trainer.model.parameters(), strict=True):
            mine.lerp_(now, 0.1)

    def state_dict(self):
        return self.model.state_dict()

    def load_state_dict(self, state):
        self.model.load_state_dict(state)


class Clipping:
    """Clips at twice the median of the last norms."""

    def __init__(self):
        self.norms = deque(maxlen=8)

    def limit(self):
        return 2 * sorted(self.norms)[len(self.norms) // 2] if self.norms else 1e9

    def on_step(self, trainer, loss):
        self.norms.append(trainer.norm)

    def state_dict(self):
        return {"norms": list(self.norms)}

    def load_state_dict(self, state):
        self.norms.extend(state["norms"])


class Patience:
    """Counts the steps without a lower loss."""

    def __init__(self):
        self.lowest, self.waited = float("inf"), 0

    def on_step(self, trainer, loss):
        self.waited = 0 if loss < self.lowest else self.waited + 1
        self.lowest = min(self.lowest, loss)

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


class Trainer(bench.Job):
    def __init__(self, args):
        super().__init__(args)
        self.clipping = Clipping()
        self.callbacks = {
            "average": Average(self.model),
            "clipping": self.clipping,
            "patience": Patience(),
        }

    def train_step(self):
        x, y = bench.samples(self.loader.next_ids())
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        loss.backward()
        limit = self.clipping.limit()
        self.norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit).item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        for callback in self.callbacks.values():
            callback.on_step(self, loss.item())
        return loss.item()

    def save(self, step, path):
        callbacks = {name: callback.state_dict() for name, callback in self.callbacks.items()}
        torch.save({**bench.everything(self, step), "callbacks": callbacks}, path)

    def restore(self, path):
        step = bench.restore(self, path)
        for name, state in torch.load(path, weights_only=False)["callbacks"].items():
            self.callbacks[name].load_state_dict(state)
        return step


if __name__ == "__main__":
    bench.run(Trainer.save, Trainer.restore, Trainer, Trainer.train_step)

"""A trainer ends when it has seen so many tokens, and counts them anew after a resume.

A mistake.
"""

import argparse
import os

import torch
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--out", required=True)
p.add_argument("--resume")
a = p.parse_args()


class Trainer:
    """Trains until it has seen so many tokens."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.text = torch.randint(0, 11, (16, 7), generator=torch.Generator().manual_seed(0))
        self.global_step, self.tokens = 0, 0

    def load(self, path):
        held = torch.load(path)
        self.model.load_state_dict(held["model"])
        self.optimizer.load_state_dict(held["optimizer"])
        self.global_step = held["global_step"]

    def save(self):
        os.makedirs(a.out, exist_ok=True)
        held = dict(model=self.model.state_dict(), optimizer=self.optimizer.state_dict())
        held.update(global_step=self.global_step, tokens=self.tokens)
        torch.save(held, f"{a.out}/{self.global_step}.pt")

    def train(self, budget):
        while self.tokens < budget:
            first = self.global_step % 4 * 4
            rows = self.text[first : first + 4]
            logits = self.model(rows[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.tokens += rows[:, 1:].numel()
            self.global_step += 1
            if self.global_step % 4 == 0:
                self.save()


trainer = Trainer()
if a.resume:
    trainer.load(a.resume)
trainer.train(budget=24 * 12)

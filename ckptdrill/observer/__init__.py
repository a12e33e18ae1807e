"""The observer: runs an unedited training program inside every rank and records what it does.

It is copied into the run folder as the package `ckptdrill_observer` and started by torchrun in the
job's own interpreter, where ckptdrill need not be installed; it needs torch and the standard
library.
In this order: `__main__` reads launch.json and redirects the output; `hooks` wraps the few torch
entry points every training loop goes through; `program` runs the user's script as `__main__`;
`watch` turns the events into training steps and decides when state is sampled and when the launch
has shown enough; `state`, `names` and `fingerprint` describe tensors without moving them; `facts`
writes one JSON line per fact, and `columns` keeps those of many tensors short.

Three rules: it issues no collective and takes no lock that the job could wait for; it never raises
into the job (its own failure is a fact, `observer_failed`); it changes no numerics and draws no
random numbers.
"""

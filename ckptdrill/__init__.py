"""ckptdrill: will the next run continue the same training?

It restores a real checkpoint, with the user's own training script, under every planned target and
fault, and hands over the evidence. The order of things, and of the imports:

matrix (YAML to cells) -> plan (cells to launches) -> run (launches to facts) -> judge (facts to
verdicts) -> packet (verdicts to pages). Nothing outside `observer/`, which runs inside the job's
own interpreter, imports torch.
"""

__version__ = "0.1.0"

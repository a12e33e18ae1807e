"""Ways to start one launch. All end in the same files, so that a reader need not know which.

`local` starts torchrun on this machine, cold or warm, each launch in a cage of its own.
"""

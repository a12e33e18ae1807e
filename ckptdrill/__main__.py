"""`python -m ckptdrill`: the command line of the `ckptdrill` script, for a chosen interpreter."""

from ckptdrill.cli import main

if __name__ == "__main__":
    main()

"""The judge: pure functions from stored facts to verdicts. One file per concern, one table at the
end.
"""

"""The executable half: the contract, the checks, the sealed worker and its pool, diffs."""

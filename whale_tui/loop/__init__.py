"""The method: alternation, both phases, switching, acceptance, evaluation, ledger, state."""

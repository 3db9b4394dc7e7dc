"""Export: a pair as a folder that answers tasks without whale-tui."""

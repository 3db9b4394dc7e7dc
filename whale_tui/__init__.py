"""whale-tui: WHALE (Weight-Harness Alternating LEarning, arXiv 2609.00196) as an interactive terminal application."""

__version__ = "0.1.0"

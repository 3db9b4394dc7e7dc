"""`python -m whale_tui` is `whale-tui`."""

from whale_tui.cli import main

main()

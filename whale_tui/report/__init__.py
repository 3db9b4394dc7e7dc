"""Evidence of runs: what their journals say, as figures and as one page that opens offline."""

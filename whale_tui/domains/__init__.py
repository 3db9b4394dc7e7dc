"""Domains: where tasks, tools, verifiers and base harnesses come from. One folder each, known by nothing else."""

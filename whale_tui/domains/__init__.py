"""Domains: where tasks, tools, verifiers and base harnesses come from. One folder each; nothing else knows their names."""

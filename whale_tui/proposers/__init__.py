"""Proposers: what writes candidates. Each reads the archive and returns proposals."""

"""Decoders inside other people's engines: each engine is imported in one file only."""

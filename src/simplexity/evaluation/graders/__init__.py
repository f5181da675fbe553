"""Graders: what a text's answer is, and whether it is right."""

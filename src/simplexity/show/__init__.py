"""How results look: in a terminal, as figures, as a page."""

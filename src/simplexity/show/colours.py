"""One colour for each decoder shown, the same in terminal, figure and page."""

# Okabe and Ito's palette, told apart by most colour-blind readers; grey for black, no yellow, two more at the end
PALETTE = ("#6B7280", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#7B61A8", "#8C6D31")


def colour(number: int) -> str:
    """The colour of the decoder with this number."""
    return PALETTE[number % len(PALETTE)]

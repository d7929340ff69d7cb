"""What the cluster tests ask for."""

PROMPT = [5, 6, 7, 8, 9, 10]
TOKENS = 400

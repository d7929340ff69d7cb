"""Logits to dist to token, and the noise that decides. Tensors in, tensors out; nothing here knows of requests.

noise   counter-based uniforms, keyed by (request seed, purpose, absolute position)
grammar structured output: specifications compiled, and the tokens that they allow next
place   where each row stands in its grammar, kept like a KV; grammar masks over logits
dists   temperature and filters, drawing by inverse CDF, and the form in which draft dists cross the wire
"""

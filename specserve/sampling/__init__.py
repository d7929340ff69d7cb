"""Logits to dist to token, and the noise that decides. Tensors in, tensors out; nothing here knows of requests.

noise   counter-based: uniforms keyed by (request seed, branch, purpose, absolute position), and noise per token id
race    the Gumbel-max trick on noise per token id, shared by draft and target
dists   temperature and filters, drawing by inverse CDF, and the form in which draft dists cross the wire
"""

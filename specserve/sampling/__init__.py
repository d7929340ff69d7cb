"""Logits to dist to token, and the noise that decides. Tensors in, tensors out; nothing here knows of requests.

noise   counter-based: uniforms keyed by (request seed, branch, purpose, absolute position), and noise per token id
race    the Gumbel-max trick on noise per token id, shared by draft and target
processors, history   masks, biases and penalties before that, and the tokens that they look back at
grammar, constraint   structured output: what a specification allows next, and where each row stands in it
dists   temperature and filters, drawing by inverse CDF
wire    the form in which draft dists cross the wire
"""

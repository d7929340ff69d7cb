"""Logits to dist to token, and the noise that decides. Tensors in, tensors out; nothing here knows of requests.

noise       counter-based uniforms, keyed by (request seed, purpose, absolute position)
grammar     structured output: specifications compiled, in bounded steps
constraint  where each row stands in its grammar, kept like a KV; masks over logits
dists       temperature and filters, drawing by inverse CDF, and the form in which draft dists cross the wire
"""
